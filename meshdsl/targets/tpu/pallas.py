"""The attention cases that the fused kernels for TPUs take, and the sizes of their blocks."""

from __future__ import annotations

from functools import partial

from ...ops.attention.kernels import Case, FusedKernel
from . import fused
from .tiling import LANES

HEAD = 16  # sizes of heads are multiples of this
LARGEST_HEAD, LARGEST_BLOCK = 256, 512  # whose arrays fit a core's 16 MiB of vector memory


def _refusal(case: Case, capability: float, *, interpreted: bool) -> str:
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


def _block(n: int, most: int) -> int:
    """The largest part of n that is a multiple of 128 and at most `most`, or 128."""
    parts, most = n // LANES, min(most, LARGEST_BLOCK)
    size = max(d for d in range(1, parts + 1) if parts % d == 0 and (d == 1 or d * LANES <= most))
    return size * LANES


PALLAS = FusedKernel(
    "pallas", partial(_refusal, interpreted=False), fused.forward, fused.backward, platform="tpu", block=_block
)
INTERPRETED = FusedKernel(
    "pallas_interpret", partial(_refusal, interpreted=True), fused.forward, fused.backward, block=_block
)
