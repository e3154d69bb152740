"""Meshes, layouts and shardings: where the parts of a tensor live. Nothing here knows about operations."""

from .layout import Layout
from .mesh import Mesh
from .sharding import Extents, Sharding

__all__ = ["Extents", "Layout", "Mesh", "Sharding"]
