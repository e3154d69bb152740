"""Meshes, layouts and shardings: how tensors are distributed over devices, independent of operations."""

from .layout import Layout
from .mesh import Mesh
from .sharding import Extents, Sharding

__all__ = ["Extents", "Layout", "Mesh", "Sharding"]
