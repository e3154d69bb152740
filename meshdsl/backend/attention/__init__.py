"""Attention on arrays: blocks in JAX (`blockwise`), the formula in NumPy (`plain`), records of fused kernels."""

from . import blockwise, plain
from .arrays import Arrays, Sees, Span
from .kernels import BLOCKWISE, AttentionKernel, Case, FusedKernel

__all__ = [
    "BLOCKWISE",
    "Arrays",
    "Case",
    "FusedKernel",
    "AttentionKernel",
    "Sees",
    "Span",
    "blockwise",
    "plain",
]
