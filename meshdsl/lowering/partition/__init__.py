"""From a graph, a mesh and a layout to the program of one device."""

from .partition import partition

__all__ = ["partition"]
