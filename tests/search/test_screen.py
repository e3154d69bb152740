"""The screen: one memo for the programs of many layouts, and what it remembers of illegal ones."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md
from meshdsl.lowering.partition import partition
from meshdsl.models import transformer
from meshdsl.search import screen as screens
from meshdsl.search.screen import ILLEGAL
from tests.search.bounds_law import candidates_of

LM = transformer.lm.replace(batch=16, length=64, layers=2, d_model=64, heads=4, d_head=16, d_ff=128, vocab=64)


def test_screen_program_is_that_of_partition():
    candidates = candidates_of(LM, (), "x:2 y:2", "tpu-v5e")
    problem, grid = candidates.problem, candidates.space.mesh
    for rules in ("", "batch:x", "batch:x heads:y d_ff:y", "length:y batch:x", "batch:x,y", "batch:x heads:y vocab:y"):
        layout = md.Layout(rules)  # the later ones replay runs of the earlier ones
        memoised = candidates.screen.program(layout)
        plain = partition(problem.graph, grid, layout, problem.results)
        assert str(memoised) == str(plain), rules


def test_screen_lowers_no_layout_with_rules_known_to_be_illegal(monkeypatch: pytest.MonkeyPatch):
    def step(x: Any, w: Any, v: Any) -> Any:
        y = md.dot(x, w, "io")  # batch and hidden cannot have one axis
        return md.scan(lambda carry, row: (carry * row, None), md.sum(md.tanh(y), "batch hidden"), v, "steps")[0]

    args = md.spec("batch:8 io:8"), md.spec("io:8 hidden:8"), md.spec("steps:8")
    candidates = candidates_of(step, args, "x:2 y:2", "tpu-v5e")
    lowered: list[Any] = []
    lower = screens.lower_graph
    monkeypatch.setattr(
        screens, "lower_graph", lambda scope, results: (lowered.append(scope), lower(scope, results))[1]
    )

    def amount(rules: str) -> float:
        return candidates.screen.seconds(md.Layout(rules))

    assert amount("batch:x hidden:x") == ILLEGAL and lowered
    lowered.clear()
    assert amount("batch:x hidden:x steps:y") == ILLEGAL and not lowered
    assert amount("batch:x hidden:y") < ILLEGAL and lowered
