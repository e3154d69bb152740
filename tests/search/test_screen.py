"""Bounds of single layouts: what the screen remembers of other layouts, and what rules alone tell."""

from __future__ import annotations

import math
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.network import place
from meshdsl.lowering.partition import partition
from meshdsl.search import screen as screens
from meshdsl.search.api import _compiled, _problem
from meshdsl.search.bound import rule_bound
from meshdsl.search.candidates import Candidates
from meshdsl.search.screen import ILLEGAL
from meshdsl.search.space import space
from models import transformer

LM = transformer.lm.replace(batch=16, length=64, layers=2, d_model=64, heads=4, d_head=16, d_ff=128, vocab=64)
V5E = md.machine("tpu-v5e")


def candidates_of(f: Any, args: Any, mesh: str) -> Candidates:
    compiled, args = _compiled(f, tuple(args), ())
    problem, grid = _problem(f, compiled, args), md.Mesh(mesh)
    return Candidates(problem, space(problem.graph, grid), V5E, place(V5E.network, grid), "seconds")


def test_screen_program_is_that_of_partition():
    candidates = candidates_of(LM, (), "x:2 y:2")
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
    candidates = candidates_of(step, args, "x:2 y:2")
    lowered: list[Any] = []
    lower = screens.lower
    monkeypatch.setattr(screens, "lower", lambda scope, eqns: (lowered.append(eqns), lower(scope, eqns)))

    def bound(rules: str) -> float:
        row = candidates.space.row(md.Layout(rules))
        return candidates.screen.bound(md.Layout(rules), candidates.rules.least(row), "seconds", math.inf)

    assert bound("batch:x hidden:x") == ILLEGAL and lowered
    lowered.clear()
    assert bound("batch:x hidden:x steps:y") == ILLEGAL and not lowered
    assert bound("batch:x hidden:y") < ILLEGAL and lowered


def test_bound_by_rules_divides_an_operation_only_by_axes_of_its_dims():
    def step(x: Any, w: Any, u: Any) -> Any:
        return md.dot(x, w, "io"), u * 2

    args = md.spec("batch:4096 io:4096"), md.spec("io:4096 hidden:4096"), md.spec("other:8")
    graph = md.compile(step, "x:8").graph(*args)
    candidates = space(graph, md.Mesh("x:8"))
    bound = rule_bound(graph, candidates, V5E)
    rows = [candidates.row(md.Layout(rules)) for rules in ("", "other:x", "batch:x")]
    whole, other, split = (bound.least(row)[0] for row in rows)
    assert other > 0.99 * whole and split < 0.2 * whole
