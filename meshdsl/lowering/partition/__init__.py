"""Partition a graph for a mesh and a layout into the program of one device."""

from .partition import partition

__all__ = ["partition"]
