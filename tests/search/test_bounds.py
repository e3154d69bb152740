"""The floor of a search is below the cost of every layout."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md
from meshdsl.models import mlp, transformer
from meshdsl.search.api import _compiled
from tests.search.bounds_law import drawn, other_knobs, violations
from tests.search.test_search import CASES


def convolutions(x: Any, w: Any) -> Any:
    """The gradient of two convolutions: both exchange the same halo."""

    def loss(w: Any) -> Any:
        y = md.conv(x, w, {"height": "kh"}, "batch height out")
        return md.mean(md.square(y) * md.conv(x, md.tanh(w), {"height": "kh"}, "batch height out"))

    return md.grad(loss)(w)


CONVOLUTIONS = (md.spec("batch:8 height:16 color:4"), md.spec("kh:3 color:4 out:8"))


@pytest.mark.parametrize("case", [*CASES, "convolutions"])
def test_bounds_are_below_the_cost_of_layouts(case: str):
    f, args, mesh, _ = {**CASES, "convolutions": (convolutions, CONVOLUTIONS, "x:2 y:2", None)}[case]
    counts = violations(f, args, mesh, "tpu-v5e", 8, seed=1)
    assert counts["layouts"] == 8


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_the_cost_of_random_programs(seed: int):
    assert violations(*drawn(seed), 1, seed)["bounds"]


def test_bounds_of_products_and_inputs_hold_for_every_plan():
    workload = mlp.mlp.replace(batch=64, io=32, hidden=64)
    compiled, args = _compiled(workload, ())
    assert other_knobs(workload, compiled, args, "x:2 y:2", md.machine("h100"), seed=1)


def test_bounds_of_loops_take_values_as_earlier_equations_have_resharded_them():
    workload = transformer.lm.replace(batch=16, length=512, remat=True)
    layout = {"vocab": ("x", "y"), "length": ("y", "z")}
    assert violations(workload, (), "x:8 y:32 z:4", "tpu-v5p", 1, seed=1, layout=layout)["layouts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_bounds_are_below_the_cost_of_many_random_programs(seed: int):
    assert violations(*drawn(seed), 3, seed)["bounds"]
