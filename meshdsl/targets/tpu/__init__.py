"""The TPU compiler: its tiles, the order of its loops, and programs as it needs them."""

from __future__ import annotations

from ..target import MemoryRules, Target
from .before_loops import products_before_loops
from .body_order import body_order
from .emission import EMISSION
from .extremes import one_reduction
from .fused import INTERPRETED, PALLAS
from .softmaxes import inside_softmaxes, softmaxes
from .stored_rows import drop_row_barriers, read_stored_rows
from .tiles import padding, read_by_convolutions

__all__ = ["TPU"]

TPU = Target(
    "tpu",
    devices=("chip", "core"),
    emission=EMISSION,
    passes=(
        ("one reduction for an index", one_reduction),
        ("drop row barriers", drop_row_barriers),
        ("products before loops", products_before_loops),
        ("read stored rows", read_stored_rows),
    ),
    memory=MemoryRules(
        softmaxes, inside_softmaxes, read_by_convolutions, padding, combines=2**27, body_order=body_order
    ),
    one_in_flight=True,
    kernels=(PALLAS, INTERPRETED),
)
