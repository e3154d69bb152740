"""XLA for GPUs.

A product is a call of cuBLAS, and a convolution one of cuDNN (openxla.org/xla/gpu_architecture): operands are read from
memory, and results are written there. Arrays have no tiles: an array takes the bytes of its elements. NCCL sums in
place, so an all_reduce writes over an operand that nothing else reads (xla/service/gpu/buffer_sharing.cc). Every
collective has a start and a done, and any number may be in flight; its operand and its result stay allocated between
the two. The workspace of the libraries is not counted.
"""

from __future__ import annotations

from ..target import Target
from .cudnn import CUDNN, FLASH

__all__ = ["CUDNN", "GPU"]

GPU = Target("gpu", devices=("GPU",), capability=FLASH, kernels=(CUDNN,))
