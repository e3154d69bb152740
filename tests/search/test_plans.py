"""The search over plans: equal to brute force where it finishes, and honest where it does not."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

import meshdsl as md
from meshdsl.models import mlp, transformer
from meshdsl.search import plans
from meshdsl.search.knobs import TURNS, UPDATES, turns_of
from meshdsl.search.space import space

SMALL = mlp.mlp.replace(batch=1024, io=512, hidden=1024)
LM = transformer.lm.replace(batch=16, length=64, layers=2, d_model=64, heads=4, d_head=16, d_ff=128)


def brute_force(workload: md.Workload, mesh: str, knobs: dict[str, list[Any]], dims: str, machine: str, limit: float):
    """Every plan: its seconds and peak, by plan; without those that are illegal."""
    graph = md.compile(workload.train_step(), mesh).graph(*workload.specs())
    grid, candidates = md.Mesh(mesh), space(graph, dims=dims.split())
    found: dict[md.Plan, tuple[float, int]] = {}
    cuts = [cut for n in range(len(grid.axes) + 1) for cut in itertools.combinations(grid.axes, n)]
    for picks in itertools.product(cuts, repeat=len(candidates.sizes)):
        layout = md.Layout({d: cut for d, cut in zip(candidates.sizes, picks, strict=True) if cut})
        for values in itertools.product(*knobs.values()):
            given = dict(zip(knobs, values, strict=True))
            needs = given.get("overlap", "none") != "none"
            plan = md.Plan(mesh, layout, **given, machine=machine if needs else None)
            try:
                step = md.compile(workload.train_step(), plan=plan, donate=(0, 1))
                report = step.cost(*workload.specs(), machine=machine, limit=limit)
            except (md.LayoutError, md.ShapeError):
                continue
            found[plan] = report.seconds, report.peak_bytes
    return found


CASES = [
    (
        SMALL,
        "x:4",
        {"weight_update": ["replicated", "sharded"], "microbatches": [1, 2, 3]},
        "batch hidden",
        "h100",
    ),
    (SMALL, "x:2 y:2", {"overlap": ["none", "list"]}, "batch", "h100"),
    (LM, "x:4", {"remat": ["model", "none", "full"]}, "batch", "tpu-v5e"),
]


@pytest.mark.parametrize(("workload", "mesh", "knobs", "dims", "machine"), CASES)
def test_plan_search_equals_brute_force(workload: Any, mesh: str, knobs: Any, dims: str, machine: str):
    every = brute_force(workload, mesh, knobs, dims, machine, math.inf)
    peaks = sorted(peak for _, peak in every.values())
    for limit in (math.inf, peaks[0]):
        result = md.search(workload, mesh=mesh, knobs=knobs, dims=dims, machine=machine, limit=limit)
        least = min(seconds for seconds, peak in every.values() if peak <= limit)
        assert result.complete and least == result.bound
        assert result.best.seconds <= 1.01 * least
        assert every[result.plan] == (result.best.seconds, result.best.peak_bytes)
    with pytest.raises(md.LayoutError, match="no plan costed fits"):
        md.search(workload, mesh=mesh, knobs=knobs, dims=dims, machine=machine, limit=peaks[0] - 1)


def test_plan_search_result_costs_what_compile_costs():
    result = md.search(LM, devices=4, plans=4, machine="tpu-v5e")
    step = md.compile(LM.train_step(), plan=result.plan, donate=(0, 1))
    report = step.cost(*LM.specs(), machine="tpu-v5e")
    assert (report.seconds, report.peak_bytes) == (result.best.seconds, result.best.peak_bytes)
    assert 0 <= result.bound <= result.best.seconds and not result.complete
    assert result.to_dict()["plan"] == result.plan.to_dict()


def test_plan_search_text_says_why_runners_up_lose():
    text = str(md.search(SMALL, mesh="x:4", machine="h100", dims="batch", knobs="remat weight_update"))
    for words in ("the best plan", "weight update", "every plan is costed", "next:"):
        assert words in text
    assert "remat: the config of mlp has no field remat" in text


def test_plan_search_saves_memory_by_knobs_if_no_layout_fits():
    knobs = {"remat": ["model", "full"], "microbatches": [1, 2]}
    alone = md.search(LM, mesh="x:4", knobs=(), layout="batch:x", dims="", limit=math.inf)
    result = md.search(LM, mesh="x:4", knobs=knobs, layout="batch:x", dims="", limit=0.9 * alone.best.peak_bytes)
    assert result.best.fits and result.plan.replace(mesh="", layout="") != md.Plan()


def test_functions_search_layouts_only_unless_knobs_are_named():
    def two(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.dot(x, w, "io")

    args = md.spec("batch:64 io:64"), md.spec("io:64 hidden:64")
    found = md.search(two, *args, mesh="x:2")
    assert found.knobs == () and found.plan == md.Plan("x:2", found.best.layout)
    assert md.search(two, *args, mesh="x:2", knobs="overlap").knobs == ("overlap",)
    with pytest.raises(md.LayoutError, match="no knob 'remats'; did you mean 'remat'"):
        md.search(two, *args, mesh="x:2", knobs="remats")


def test_search_takes_steps_where_they_are_faster():
    """Weights are gathered over `node` in one large message, unless by time over the idle `gpu` too."""

    def f(x: md.Tensor) -> md.Tensor:
        return md.rename(x, batch="out")

    x, on = (
        md.spec("batch:64 io:1048576"),
        {"mesh": "node:4 gpu:8", "machine": "h100", "layout": "batch:node", "dims": ()},
    )
    found = md.search(f, x, knobs="steps", **on)
    assert (found.plan.steps, found.plan.machine, found.gap) == ("auto", "h100", 0)
    assert md.compile(f, plan=found.plan).cost(x, machine="h100").seconds == found.best.seconds
    flat = md.search(f, x, knobs={"steps": ["flat"]}, **on)
    assert (flat.plan.steps, flat.plan.machine) == ("flat", None) and flat.best.seconds > 2 * found.best.seconds
    assert md.search(f, x, **on).best.seconds == flat.best.seconds
    with pytest.raises(md.NoEffectError, match="no mesh has axes of several levels of 'h100'"):
        md.search(f, x, mesh="gpu:8", machine="h100", knobs="steps")
    assert "steps" not in md.search(LM, devices=4, machine="h100", plans=1).knobs


def test_every_turn_is_a_knob_of_a_plan():
    plan = md.Plan("x:16 y:2", "batch:x")
    for turn in TURNS:
        values = list(turn.candidates(plan))
        assert len(values) == len(set(map(str, values))) and values
        for value in values:
            assert getattr(plan.replace(**{turn.knob: value}), turn.knob) == value


def test_plan_search_interrupted_keeps_the_best_so_far():
    seen: list[Any] = []

    def interrupt(progress: Any) -> None:
        seen.append(progress)
        if progress.best is not None:
            raise KeyboardInterrupt

    result = md.search(LM, devices=4, progress=interrupt)
    assert result.stopped == "an interrupt" and result.gap > 0 and str(seen[-1]).count("costed")


def test_plan_search_is_at_least_as_good_as_its_start():
    start = md.Plan("x:2 y:4", "batch:x,y heads:y", weight_update="sharded", remat="none")
    result = md.search(LM, devices=8, machine="h100", plans=1, start=start)
    assert result.plan == start
    with pytest.raises(md.LayoutError, match="this is a search for layouts"):
        md.search(LM, devices=8, machine="h100", knobs=(), start=start)


ANSWER = """
import meshdsl as md
from meshdsl.models import mlp
found = md.search(mlp.mlp.replace(batch=1024, io=512, hidden=1024), devices=4, machine="h100", plans=4)
print(found.plan.to_dict(), found.best.outcome, found.counts)
"""


def test_plan_search_has_the_same_answer_with_every_hash_seed():
    def answer(seed: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", ANSWER], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True
        )
        return run.stdout.decode()

    assert answer("1") == answer("2") and "costed exactly" in answer("1")


def test_plan_search_costs_fewer_plans_of_long_programs():
    """30,000 equations in all, but at least 4 plans."""
    assert plans.EQUATIONS // plans.USUAL == 1000 and plans.LEAST == 4
    result = md.search(LM, devices=8, machine="h100", plans=3)
    assert result.counts.costed <= 3 and not result.complete


RECIPES = [  # what people write first
    md.Plan("x:8", "batch:x", weight_update="sharded"),
    md.Plan("x:8", "batch:x", weight_update=md.WeightUpdate("sharded", regather=True)),
    md.Plan("x:8", "batch:x", weight_update=md.WeightUpdate("sharded", regather=True), remat="full"),
    md.Plan("x:4 y:2", "batch:x vocab:y", weight_update="sharded"),
    md.Plan("x:4 y:2", "batch:x length:y vocab:y", weight_update="sharded", microbatches=2),
]


@pytest.mark.parametrize(("machine", "part"), [("tpu-v5e", 0.6), pytest.param("h100", 0.6, marks=pytest.mark.slow)])
def test_plan_search_is_no_slower_than_common_recipes(machine: str, part: float):
    """With less memory than plain data parallelism needs."""
    wide = transformer.lm.replace(layers=2, d_model=512, d_ff=2048, d_head=64, batch=64, vocab=8192)
    knobs = {"weight_update": None, "remat": ["model", "full"], "microbatches": [1, 2]}

    def cost(plan: md.Plan) -> Any:
        return md.compile(wide.train_step(), plan=plan, donate=(0, 1)).cost(*wide.specs(), machine=machine)

    limit = part * cost(md.Plan("x:8", "batch:x")).peak_bytes
    every = [report.seconds for report in map(cost, RECIPES) if report.peak_bytes <= limit]
    dims, meshes = "batch length vocab d_ff heads", ["x:8", "x:4 y:2"]
    result = md.search(wide, mesh=meshes, dims=dims, machine=machine, limit=limit, knobs=knobs)
    assert every and result.best.fits and result.best.seconds <= min(every)
    for update in UPDATES:
        with suppress(md.LayoutError):  # without effect
            other = cost(result.plan.replace(weight_update=update))
            assert other.peak_bytes > limit or other.seconds >= result.best.seconds * (1 - 1e-9)


@pytest.mark.parametrize(("bandwidth", "layout", "microbatches"), [(350e9, "batch:x", 1), (2e9, "layer:x", 16)])
def test_search_takes_stages_where_the_network_is_slow(bandwidth: float, layout: str, microbatches: int):
    """Stages send activations, and data parallelism sends the gradients of these wide layers."""
    machine = md.machine("h100")
    levels = tuple(dataclasses.replace(level, bandwidth=bandwidth) for level in machine.network.levels)
    machine = dataclasses.replace(machine, network=dataclasses.replace(machine.network, levels=levels, tables=()))
    wide = LM.replace(batch=32, length=512, layers=4, d_model=512, d_head=128, d_ff=65536, vocab=512)
    knobs: dict[str, list[Any]] = {"remat": ["full"], "microbatches": [1, 16]}
    place: dict[str, Any] = {"mesh": "x:4", "dims": "batch layer", "machine": machine, "knobs": knobs}
    found = md.search(wide, **place, plans=5)
    assert (str(found.best.plan.layout), found.best.plan.microbatches) == (layout, microbatches)


def test_search_tries_ticks_where_there_are_micro_batches():
    (turn,) = turns_of("overlap")
    modes = [[value.mode for value in turn.candidates(md.Plan("x:4", "layer:x", microbatches=m))] for m in (1, 4)]
    assert modes[1] == [*modes[0], "ticks"]


@pytest.mark.parametrize(("bandwidth", "most", "chunks"), [(350e9, 2, 2), (350e9, 30, 2), (2e9, 2, 1)])
def test_search_interleaves_stages_where_the_weights_that_move_cost_less_than_the_bubble(
    bandwidth: float, most: int, chunks: int
):
    machine = md.machine("h100")
    levels = tuple(dataclasses.replace(level, bandwidth=bandwidth) for level in machine.network.levels)
    machine = dataclasses.replace(machine, network=dataclasses.replace(machine.network, levels=levels, tables=()))
    deep = LM.replace(batch=32, length=512, layers=8, d_model=1024, d_head=128, d_ff=8192, vocab=64)
    knobs: dict[str, Any] = {"remat": ["full"], "microbatches": [4], "chunks": None}
    found = md.search(deep, mesh="x:4", layout="layer:x", dims="", machine=machine, knobs=knobs, plans=most)
    tried = {entry.plan.chunks for entry in (found.best, *found.runners_up)}
    assert found.best.plan.chunks == chunks and tried == {1, 2}  # of 2 layers, there are no 4
