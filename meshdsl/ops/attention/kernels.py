"""The kernel that computes an attention: a fused one of a platform if it takes the case, else blocks in JAX.

A choice never changes a result, except for rounding. It is data of the program, with the reason for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .spec import AttentionSpec


@dataclass(frozen=True)
class Case:
    """The properties of an attention on one device by which a kernel takes or refuses it."""

    queries: int  # at consecutive positions; 0 if queries have no positions
    keys: int  # at consecutive positions
    head: int
    value: int
    dtype: np.dtype
    how: AttentionSpec  # its options and the operands beside q, k and v
    empty: bool = False  # an operand has no elements
    part: bool = False  # other devices have the other keys
    padded: bool = False  # keys are stored with padding
    ahead: bool = False  # a window in which queries see later keys too
    apart: bool = False  # positions decide who sees whom, and the device has other positions of queries than of keys


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that keeps scores out of the device's memory: the cases that it takes, and its functions of arrays."""

    name: str
    refusal: Callable[[Case, float], str]  # why it cannot take a case on a device of this capability; "" if it can
    forward: Callable[..., Any]  # like `blockwise.forward`, of `Arrays`
    backward: Callable[..., Any]  # like `blockwise.backward`
    platform: str = ""  # the only one that it runs on; "": every one
    capability: float = 0.0  # JAX's `compute_capability` of devices from which on it runs
    block: Callable[[int, int], int] | None = None  # positions of a block: of these, of at most so many


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel with the sizes of its blocks, the name that was asked for, and the reason why it is no fused one."""

    name: str
    asked: str = "auto"
    reason: str = ""
    queries: int = 0  # of a block
    keys: int = 0
    by: FusedKernel | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}:{self.queries}x{self.keys}" if self.queries else self.name

    @property
    def fused(self) -> bool:
        """True if scores do not go through the device's memory."""
        return self.name != "blockwise"


BLOCKWISE = AttentionKernel("blockwise")
