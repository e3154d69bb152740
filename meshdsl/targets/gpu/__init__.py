"""XLA for GPUs."""

from __future__ import annotations

from ..target import Target
from .cudnn import CUDNN

__all__ = ["GPU"]

GPU = Target("gpu", kernels=(CUDNN,))
