"""XLA for CPUs."""

from __future__ import annotations

from .target import Target

__all__ = ["CPU"]

CPU = Target("cpu")
