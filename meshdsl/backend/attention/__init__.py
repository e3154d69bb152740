"""Attention on arrays: block by block in JAX (`blockwise`), and by the plain formula in NumPy (`plain`)."""

from . import blockwise, plain
from .arrays import Arrays, Sees, Span

__all__ = ["Arrays", "Sees", "Span", "blockwise", "plain"]
