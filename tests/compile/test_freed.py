"""Traces and compiled programs are freed with their last reference, without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meshdsl as md
from meshdsl.models.transformer import lm

SMALL = lm.replace(batch=8, length=8, layers=2, vocab=16, d_model=8, heads=4, d_head=2, d_ff=8)
LAYOUT = "batch:rows; vocab:cols; d_ff:cols; heads:cols"
PLAN = md.Plan("stages:2 data:2", "layer:stages; batch:data", microbatches=2)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "make",
    [
        lambda: SMALL.specs(),
        lambda: md.compile(SMALL.train_step(), "", "").graph(*SMALL.specs()),
        lambda: md.compile(SMALL.train_step(), "rows:2 cols:4", LAYOUT).program(*SMALL.specs()),
        lambda: md.compile(SMALL.train_step(), "rows:2", "batch:rows").under("rows:4", "").program(*SMALL.specs()),
        lambda: md.compile(SMALL.train_step(), plan=PLAN).program(*SMALL.specs()),
    ],
    ids=["types", "graph", "program", "other layout", "pipeline"],
)
def test_no_cycle_of_references_keeps_a_trace_or_a_program(make: Callable[[], Any]) -> None:
    make()
    assert gc.collect() == 0, "see gc.DEBUG_SAVEALL for the objects"
