"""Choose the kernel that computes an attention: the fused one of the platform if it takes the case, else blocks in JAX.

A choice never changes a result, except for rounding. It is data of the program, with the reason for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .tiling import LANES

__all__ = ["BLOCKWISE", "KERNELS", "Case", "Kernel", "choose"]

KERNELS = ("auto", "blockwise", "pallas", "pallas_interpret", "cudnn")
FUSED = {"tpu": "pallas", "gpu": "cudnn"}  # the fused kernel of a platform
PLATFORMS = {"pallas": "tpu", "cudnn": "gpu"}  # the platforms of kernels that run on one only
HEAD = 16  # sizes of heads are multiples of this
LARGEST_HEAD, LARGEST_BLOCK = 256, 512  # whose arrays fit a core's 16 MiB of vector memory


@dataclass(frozen=True)
class Kernel:
    """A kernel with the sizes of its blocks, the name that was asked for, and the reason why it is no fused one."""

    name: str
    asked: str = "auto"
    reason: str = ""
    queries: int = 0  # of a block
    keys: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.queries}x{self.keys}" if self.queries else self.name

    @property
    def fused(self) -> bool:
        """True if scores do not go through the device's memory."""
        return self.name != "blockwise"


BLOCKWISE = Kernel("blockwise")


@dataclass(frozen=True)
class Case:
    """The properties of an attention on one device by which a kernel takes or refuses it."""

    queries: int  # at consecutive positions; 0 if queries have no positions
    keys: int  # at consecutive positions
    head: int
    value: int
    dtype: np.dtype
    block: int  # queries, and keys, of a block at most
    extras: tuple[str, ...] = ()  # the operands beside q, k and v
    empty: bool = False  # an operand has no elements
    part: bool = False  # other devices have the other keys
    padded: bool = False  # keys are stored with padding
    ahead: bool = False  # a window in which queries see later keys too
    apart: bool = False  # positions decide who sees whom, and the device has other positions of queries than of keys


@functools.lru_cache(maxsize=4096)
def choose(case: Case, asked: str, platform: str) -> Kernel:
    """The kernel for a case on a platform. One that is asked for and cannot take the case has the name "" and a reason.

    >>> case = Case(4096, 4096, 128, 128, np.dtype("float32"), 512)
    >>> print(choose(case, "auto", "tpu"))
    pallas:512x512
    >>> choose(case, "auto", "cpu")
    Kernel(name='blockwise', asked='auto', reason='no fused kernel for cpu', queries=0, keys=0)
    """
    if asked == "blockwise":
        return Kernel("blockwise", asked)
    name = FUSED.get(platform, "") if asked == "auto" else asked
    if not name:
        return Kernel("blockwise", asked, f"no fused kernel for {platform}")
    wrong = _refusal(case, name, platform)
    if wrong:
        return Kernel("blockwise" if asked == "auto" else "", asked, f"{name} {wrong}")
    if name == "cudnn":
        return Kernel(name, asked)
    return Kernel(name, asked, "", _block(case.queries, case.block), _block(case.keys, case.block))


def _refusal(case: Case, name: str, platform: str) -> str:
    """The reason why the kernel cannot take the case; "" if it can."""
    if platform != PLATFORMS.get(name, platform):
        return f"runs on {PLATFORMS[name]}, not on {platform}"
    if case.empty:
        return "takes operands with elements"
    return _refused_by_cudnn(case) if name == "cudnn" else _refused_by_pallas(case, name == "pallas_interpret")


def _refused_by_pallas(case: Case, interpreted: bool) -> str:
    unknown = [role for role in case.extras if role in ("bias", "mask")]
    if unknown:
        return f"takes no {unknown[0]}="
    if not case.queries:
        return "takes queries with positions"
    if case.dtype.name not in ("bfloat16", "float32") and not interpreted:
        return f"takes bfloat16 and float32, not {case.dtype.name}"
    for what, n in (("queries", case.queries), ("keys", case.keys)):
        if n % LANES or not n:
            return f"takes multiples of {LANES} {what}, not {n}"
    for size in (case.head, case.value):
        if (size % HEAD or size > LARGEST_HEAD) and not interpreted:
            return f"takes heads of multiples of {HEAD} up to {LARGEST_HEAD}, not {size}"
    return ""


def _refused_by_cudnn(case: Case) -> str:
    if case.extras:
        return f"is not used with {case.extras[0]}="
    if case.part:
        return "is not used on a part of the keys"
    if case.ahead:
        return "takes a window only with causal=True"
    if case.padded or case.apart or not case.queries:
        return "takes queries and keys of equal positions, without padding"
    if case.dtype.name not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {case.dtype.name}"
    if case.head != case.value or case.head % 8 or case.head > 128:
        return f"takes equal heads of multiples of 8 up to 128, not {case.head} and {case.value}"
    return ""


def _block(n: int, most: int) -> int:
    """The largest part of n that is a multiple of 128 and at most `most`, or 128."""
    parts, most = n // LANES, min(most, LARGEST_BLOCK)
    size = max(d for d in range(1, parts + 1) if parts % d == 0 and (d == 1 or d * LANES <= most))
    return size * LANES
