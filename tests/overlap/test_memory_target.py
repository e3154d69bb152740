"""Plans near the peak memory of the unplanned program, at little cost in time, and below a limit that the user sets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import meshdsl as md
from meshdsl.models.transformer import lm
from meshdsl.overlap.memory_target import GROWTH, SLOWER
from meshdsl.overlap.values import OverlapPlan

MODEL = lm.replace(
    d_model=1024, d_ff=4096, heads=16, d_head=64, length=1024, batch=64, vocab=32768, compute_dtype="bfloat16"
)
REGATHER = md.WeightUpdate("sharded", regather=True)
CASES: dict[str, tuple[int, str, str, Any, str]] = {  # layers, mesh, layout, weight update, overlap
    "weight gradients": (3, "rows:2 cols:8", "batch:rows; vocab:cols; d_ff:cols; heads:cols", "replicated", "halves"),
    "gathered weights": (6, "rows:16", "batch:rows", REGATHER, "list"),
}
UNLIMITED = 1e15


@cache
def planned(name: str, limit: float | None) -> OverlapPlan:
    layers, mesh, layout, update, mode = CASES[name]
    model = MODEL.replace(layers=layers)
    overlap = md.Overlap(mode, memory_limit=limit)
    options: Any = {"donate": (0, 1), "weight_update": update, "overlap": overlap, "machine": "a100-p4de"}
    step = md.compile(model.train_step(), mesh, layout, **options)
    step.program(*model.specs())
    return step.overlap


@pytest.mark.parametrize("name", CASES)
def test_a_plan_defers_no_memory_that_time_does_not_need(name: str) -> None:
    """Deferred weight gradients keep their operands, and early gathers their results, unless the order avoids it."""
    free, near = planned(name, UNLIMITED), planned(name, None)
    if name == "gathered weights":  # in any other order, the parts of the other case need less memory than the whole
        assert free.after.peak_bytes > GROWTH * free.before.peak_bytes
    assert near.after.peak_bytes <= GROWTH * near.before.peak_bytes
    assert near.after.seconds <= SLOWER * free.after.seconds


def test_a_limit_that_no_order_keeps_is_an_error_with_the_need() -> None:
    before = planned("weight gradients", None).before.peak_bytes
    with pytest.raises(md.LayoutError, match=r"(?s)needs .* of memory, over the limit of .*use overlap='auto'"):
        planned("weight gradients", 0.5 * before)
