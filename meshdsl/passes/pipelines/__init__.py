"""Pipeline stages: a layout that maps the dim of the layers to mesh axes turns a loop over micro-batches into ticks.

The passes work on graphs, after differentiation and before weight updates are sharded. Stages are a dim like any
other, messages between them are shifts along it, and branches depend on the tick alone, which is the same on all
devices. So the partitioner, the simulator, the cost model and the printer need to know nothing of pipelines.
"""

from .pipeline import pipelined
from .schedule import Schedule, bubble

__all__ = ["Schedule", "bubble", "pipelined"]
