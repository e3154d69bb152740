"""Meshes, layouts and shardings: how tensors are distributed over devices, independent of operations."""

from .layout import Layout
from .mesh import Mesh, MeshLike
from .sharding import Extents, Sharding

__all__ = ["Extents", "Layout", "Mesh", "MeshLike", "Sharding"]
