"""Mixture of experts: routing, dispatch, and the layer that uses both.

The code does not mention mesh axes. Under a layout such as `batch:rows; expert:rows`, token tensors are sharded by
group and expert tensors by expert; the compiler inserts an all_to_all between the two.
"""

from .assignment import Assignment, Choice, Picks, assign
from .dispatch import INDEX_FROM, Dispatch, dispatch_by
from .layer import moe_layer
from .nodes import NodeExchange, by_node
from .options import PRESETS, Preset, balanced_table, capacity_of
from .routing import Routing, route
from .values import Router, TokenExchange

__all__ = [
    "route", "Routing", "assign", "Assignment", "Choice", "Picks",
    "dispatch_by", "Dispatch", "INDEX_FROM", "moe_layer", "by_node", "NodeExchange",
    "Router", "TokenExchange", "PRESETS", "Preset", "capacity_of", "balanced_table",
]  # fmt: skip
