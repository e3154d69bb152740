"""`Target`: what is known of the compiler of one platform, and what it therefore gets to compile.

Emission, memory, overlap and the choice of kernels ask a target and know no platform. The defaults are those of a
compiler without known habits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.attention import FusedKernel

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """One platform, by JAX's name of it."""

    name: str
    kernels: tuple[FusedKernel, ...] = ()  # of attention; the first one is chosen where it takes the case
