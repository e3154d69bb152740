"""From a graph, a mesh and a layout to the program of one device, and the readers that run it."""

from .program import CollectiveRecord, Program
from .simulate import simulate

__all__ = ["CollectiveRecord", "Program", "simulate"]
