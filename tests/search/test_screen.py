"""Estimates of all layouts at once: legal ones are never called illegal, and their order is that of exact costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import transformer
from meshdsl.search.api import _compiled
from meshdsl.search.costed import evaluate
from meshdsl.search.digest import digest
from meshdsl.search.estimate import Estimate
from meshdsl.search.roles import best_roles
from meshdsl.search.screen import WEIGHTS, Axes, Candidate, Screen
from meshdsl.search.space import space
from meshdsl.search.variants import Variants
from meshdsl.updates.weight_update import WeightUpdate

LM = transformer.lm.replace(batch=64, length=512, layers=4, d_model=512, heads=8, d_head=64, d_ff=4096)
H100 = md.machine("h100")


@pytest.fixture(scope="module")
def costs() -> tuple[Any, Any, Any]:
    """Exact seconds, estimated seconds, and whether an estimate is infinite, of every layout of four dims."""
    compiled, args = _compiled(LM, ())
    problem = Variants(compiled, args, "", H100).problem(compiled.plan.replace(mesh="", layout=""))
    mesh, layouts = md.Mesh("x:2 y:4"), space(problem.graph, dims=["batch", "d_ff", "heads", "model"])
    every = [
        layouts.layout(mesh, [role, other]) for role in ROLES for other in ROLES if layouts.allows(mesh, [role, other])
    ]
    candidates = [
        Candidate(mesh, tuple(tuple(d for d in rules.rules if a in rules.axes(d)) for a in "xy")) for rules in every
    ]
    screen = Screen(digest(problem.graph, problem.results), Axes(candidates, H100), H100)
    seconds, _ = Estimate(screen, H100).of(WeightUpdate(), 1)
    exact = [_seconds(problem, mesh, layout) for layout in every]
    return np.array(exact), seconds, np.isinf(seconds)


ROLES = [(), ("batch",), ("model",), ("d_ff",), ("d_ff", "heads"), ("batch", "d_ff")]


def _seconds(problem: Any, mesh: md.Mesh, layout: md.Layout) -> float:
    try:
        return evaluate(problem, mesh, layout).seconds
    except md.LayoutError:
        return np.inf


def test_estimates_call_no_legal_layout_illegal(costs: tuple[Any, Any, Any]):
    exact, _, bad = costs
    assert len(exact) > 25 and not (bad & np.isfinite(exact)).any()


def test_estimates_have_the_order_of_exact_costs(costs: tuple[Any, Any, Any]):
    exact, estimated, _ = costs
    legal = np.isfinite(exact)
    exact, estimated = exact[legal], estimated[legal]
    ranks = [np.argsort(np.argsort(each)) for each in (exact, estimated)]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] > 0.9
    assert exact[np.argmin(estimated)] <= 1.02 * exact.min()
    ratio = exact / estimated
    assert ratio.min() > 0.5 and ratio.max() < 2


def test_gradients_are_scattered_over_the_axes_of_one_dim_together():
    """Over those of two dims one after the other, the outer axis first: it takes the whole gradient."""

    def step(params: dict[str, Any], x: Any) -> dict[str, Any]:
        gradients = md.grad(lambda params: md.sum(md.square(md.dot(x, params["w"], "io"))))(params)
        return {"w": params["w"] - 0.1 * gradients["w"]}

    graph = md.compile(step, "").graph({"w": md.spec("io:4096 hidden:4096")}, md.spec("batch:65536 io:4096"))
    outer = ("batch", "hidden")
    every = [Candidate(md.Mesh("x:8 y:8"), (outer, inner)) for inner in (outer, ("batch", "io"))]
    together, apart = Screen(digest(graph, ["0/w"]), Axes(every, H100), H100).by_loop[""][WEIGHTS]
    assert apart > 3 * together > 0


def test_roles_of_few_devices_have_the_batch_first():
    compiled, args = _compiled(LM, ())
    problem = Variants(compiled, args, "", H100).problem(compiled.plan.replace(mesh="", layout=""))
    work = digest(problem.graph, problem.results)

    def score(candidates: Sequence[Candidate]) -> tuple[Any, Any]:
        return Estimate(Screen(work, Axes(candidates, H100), H100), H100).of(WeightUpdate("sharded"), 1)

    dims = ["batch", "d_ff", "heads", "model", "length", "vocab"]
    roles = best_roles(score, space(problem.graph, dims=dims), dims, [md.Mesh("x:8")])
    assert "batch" in roles[0] and len(roles) == len(set(roles)) and all(list(role) == sorted(role) for role in roles)
