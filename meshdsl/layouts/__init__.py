"""Meshes, layouts and shardings: how tensors are distributed over devices, independent of operations."""

from .layout import PARAMS, Layout
from .mesh import Mesh, MeshLike
from .sharding import Extents, Sharding

__all__ = ["PARAMS", "Extents", "Layout", "Mesh", "MeshLike", "Sharding"]
