"""Overlap plans of whole training steps: equal results under every mode, what a plan says, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.ledger import ledger
from meshdsl.cost.memory import memory
from meshdsl.cost.network import place
from meshdsl.cost.timeline import timeline
from meshdsl.lowering.asynchrony import FENCE, Start
from meshdsl.models.gpt_moe import gpt_moe
from meshdsl.models.mlp import mlp
from meshdsl.overlap.memory_target import MemoryTarget
from meshdsl.overlap.planner import Planner
from tests.stablehlo import cost_law

SMALL = {"batch": 8, "length": 8, "layers": 2, "d_model": 16, "heads": 2, "d_head": 8, "d_ff": 32}
EXPERTS = {"expert_hidden": 32, "vocab": 32, "experts": 8}
WHERE = ("rows:4", "batch:rows; group:rows; expert:rows")
MODES = ("lancet", "halves", "auto")  # the others, with other routers, in test_routers.py


@cache  # planning and lowering a step takes seconds, and the tests of this file read the same steps
def step_of(mode: Any, router: str) -> tuple[md.Compiled, tuple[Any, ...]]:
    """The training step of a small mixture of experts under one overlap, and the types of its arguments."""
    workload = gpt_moe.replace(**SMALL, **EXPERTS, router=router)
    machine = None if mode == "none" else "a100-p4de"
    return md.compile(workload.train_step(), *WHERE, overlap=mode, machine=machine), workload.specs()


def arguments(program: md.Program) -> list[np.ndarray]:
    """Random tokens and weights, positive optimizer state."""
    rng = np.random.default_rng(5)

    def draw(v: Any) -> np.ndarray:
        sizes = [d.size for d in v.dims]
        if v.dtype.kind in "iu":
            return rng.integers(0, 32, sizes).astype(v.dtype)
        values = 0.3 * rng.normal(size=sizes)
        return (np.abs(values) if v.name.startswith("state") else values).astype(v.dtype)

    return [draw(v) for v in program.ins]


@pytest.mark.usefixtures("fixed_order_of_sums")
@pytest.mark.parametrize(("router", "modes"), [("switch", MODES), ("batch_prioritised", ("halves",))])
def test_overlap_modes_keep_loss_bitwise_and_gradients_close(router: str, modes: tuple[str, ...]) -> None:
    plain, types = step_of("none", router)
    program = plain.program(*types)
    given = arguments(program)
    wanted = md.simulate(program, *given)
    for mode in modes:
        compiled, _ = step_of(mode, router)
        got = md.simulate(compiled.program(*types), *given)
        for v, a, b in zip(program.outs, wanted, got, strict=True):
            if v.dims:
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=f"{mode}: {v}")
            else:
                assert a.tobytes() == b.tobytes(), f"{mode}: loss, metrics and step are bitwise those of 'none'"


def test_overlap_halves_runs_on_devices_as_simulated() -> None:
    compiled, types = step_of("halves", "switch")
    program = compiled.program(*types)
    given = arguments(program)
    leaves, structure = jax.tree.flatten(types, is_leaf=lambda x: hasattr(x, "shape"))
    tensors = [md.tensor(x, spec.dims) for x, spec in zip(given, leaves, strict=True)]
    ran = jax.tree.leaves(compiled(*jax.tree.unflatten(structure, tensors)))
    for x, y in zip(ran, md.simulate(program, *given), strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-4, atol=1e-5)


def test_overlap_sends_the_same_bytes_and_states_them_in_stablehlo() -> None:
    plain, types = step_of("none", "switch")
    sent = Counter[str]()
    for record in plain.program(*types).collectives:
        sent[record.kind] += round(record.bytes * record.count)
    for mode in ("dw", "list", "halves"):
        compiled, _ = step_of(mode, "switch")
        program = compiled.program(*types)
        found = Counter[str]()
        for record in program.collectives:
            found[record.kind] += round(record.bytes * record.count)
        assert found["all_to_all"] == sent["all_to_all"]
        assert found["all_reduce"] == sent["all_reduce"]
        assert any(isinstance(eqn.op, Start) for eqn in program.eqns) and any(eqn.op is FENCE for eqn in program.eqns)
    cost_law(program, compiled.lower(*types).as_text())


def test_overlap_plan_says_what_was_tried_and_what_runs_in_each_window() -> None:
    compiled, types = step_of("auto", "switch")
    compiled.program(*types)
    plan = compiled.overlap
    assert plan.attempts[0].name == "none" and plan.after.seconds <= plan.before.seconds
    assert {"dw", "list"} <= {one.name for one in plan.attempts}
    text = str(plan)
    assert "exposed" in text and "tried" in text
    assert plan.to_dict()["chosen"] == plan.chosen


REFUSED = {
    "an unknown mode": ({"overlap": "lots"}, "overlap='lots' is not available"),
    "parts of nothing": ({"overlap": md.Overlap("list")}, None),
    "nothing to exchange": ({"overlap": "dw", "machine": "a100-p4de"}, "the program has no all_to_all"),
    "no such dim": (
        {"overlap": md.Overlap("halves", dim="nothing"), "machine": "a100-p4de"},
        "no collective runs in 2 parts\n  'nothing': no tensor has this dim",
    ),
    "no such dim for auto": (
        {"overlap": md.Overlap("auto", dim="nothing"), "machine": "a100-p4de"},
        "no collective runs in 2 parts\n  'nothing': no tensor has this dim",
    ),
    "parts that do not divide": (
        {"overlap": md.Overlap("halves", dim="batch", parts=7), "machine": "a100-p4de"},
        "a device's block of .* does not divide into 7 parts",
    ),
    "nothing fits": (
        {"overlap": md.Overlap("auto", memory_limit=10), "machine": "a100-p4de"},
        "over the limit of 10 B\n  set a higher memory_limit",
    ),
    "over the limit": (
        {"overlap": md.Overlap("list", memory_limit=10), "machine": "a100-p4de"},
        "over the limit of 10 B",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_overlap_refuses_what_has_no_effect(case: str) -> None:
    options, text = REFUSED[case]
    if text is None:
        with pytest.raises(md.LayoutError, match="dim has no effect"):
            md.Overlap("list", dim="batch")
        with pytest.raises(md.LayoutError, match="it chooses the number of parts"):
            md.Overlap("lancet", parts=4)
        return
    with pytest.raises(md.LayoutError, match=text):
        md.compile(mlp.train_step(), "rows:4", "batch:rows", **options).program(*mlp.specs())


def test_overlap_of_a_program_that_sends_nothing_is_refused() -> None:
    with pytest.raises(md.LayoutError, match="sends nothing"):
        md.compile(mlp.train_step(), "rows:1", "", overlap="list", machine="a100-p4de").program(*mlp.specs())


def test_overlap_auto_of_a_program_that_sends_nothing_is_none() -> None:
    compiled = md.compile(mlp.train_step(), "rows:1", "", overlap="auto", machine="a100-p4de")
    compiled.program(*mlp.specs())
    assert compiled.overlap.chosen == "none"


def test_overlap_reduces_stacks_of_gradients_at_once_where_latency_dominates() -> None:
    """With many devices, one reduction per layer costs more latency than it hides; small stacks share one."""

    def layer(h: md.Tensor, rows: dict[str, md.Tensor]) -> tuple[md.Tensor, None]:
        up = md.relu(md.einsum(h, rows["w"], out="b o") + rows["up"])
        return md.einsum(up, md.prefer(rows["w"]), out="b i") + rows["down"], None

    def loss(w: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
        return md.sum(md.scan(layer, x, w, over="layer")[0])

    def reductions(devices: int) -> int:
        large, up, down = md.spec("layer:3 i:4096 o:2048"), md.spec("layer:3 o:2048"), md.spec("layer:3 i:4096")
        types = {"w": large, "up": up, "down": down}, md.spec(f"b:{4096 * devices} i:4096")
        program = md.compile(md.grad(loss), f"rows:{devices}", "b:rows").program(*types)
        machine = md.machine("a100-p4de")
        placement = place(machine.network, program.mesh)
        target = MemoryTarget(memory, lambda one: timeline(ledger(one), machine, placement).seconds, math.inf, math.inf)
        planner = Planner(program, machine, placement, md.Overlap("list"), target)
        return len(planner.unrolled.collectives)

    assert reductions(8) == 3 + 1 and reductions(4096) == 1 + 1


def test_a_plan_that_is_slower_than_none_says_so() -> None:
    model = gpt_moe.replace(**SMALL, **EXPERTS, router="switch")
    compiled = md.compile(model.train_step(), *WHERE, overlap="lancet", machine="a100-p4de:eager")
    compiled.program(*model.specs())
    plan = compiled.overlap
    assert plan.slower == (plan.after.seconds > plan.before.seconds) == plan.to_dict()["slower"]
    assert plan.slower == (", slower than no plan" in str(plan).splitlines()[0])
    assert plan.slower
