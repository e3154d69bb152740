"""Lower a graph, on a mesh and under a layout, to the program of one device; emit it for JAX or simulate it."""

from .program import CollectiveRecord, Program
from .simulate import simulate

__all__ = ["CollectiveRecord", "Program", "simulate"]
