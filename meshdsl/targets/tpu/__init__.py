"""The TPU compiler: its tiles, the order of its loops, and programs as it needs them."""

from __future__ import annotations

from ..target import Target
from .pallas import INTERPRETED, PALLAS

__all__ = ["TPU"]

TPU = Target("tpu", kernels=(PALLAS, INTERPRETED))
