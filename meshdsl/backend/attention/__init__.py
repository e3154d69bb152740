"""Attention on arrays: blocks in JAX (`blockwise`), kernels (`fused`, `cudnn`), and the formula in NumPy (`plain`)."""

from . import blockwise, cudnn, fused, plain
from .arrays import Arrays, Sees, Span
from .kernels import BLOCKWISE, KERNELS, Case, Kernel, choose

__all__ = [
    "BLOCKWISE",
    "KERNELS",
    "Arrays",
    "Case",
    "Kernel",
    "Sees",
    "Span",
    "blockwise",
    "choose",
    "cudnn",
    "fused",
    "plain",
]
