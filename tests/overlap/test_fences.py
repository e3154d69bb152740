"""Fences make the planned order of products and collectives a dependency, for compilers that ignore any other order."""

from __future__ import annotations

from itertools import pairwise

import pytest

import meshdsl as md
from meshdsl.ir import Eqn
from meshdsl.lowering.asynchrony import FENCE, pairs
from meshdsl.lowering.program import Program
from meshdsl.models.gpt_moe import gpt_moe
from meshdsl.models.transformer import lm
from meshdsl.overlap.fences import Kernels, is_product, kernels_with_products, products, windows

SIZES = {"batch": 16, "length": 32, "d_model": 64, "d_ff": 256, "vocab": 128, "layers": 2}
CASES = {
    "moe, halves": (
        gpt_moe.replace(**SIZES, heads=4, d_head=16, expert_hidden=256, experts=8, capacity_factor=1.0),
        md.Plan("rows:4", "batch:rows; group:rows; expert:rows", overlap="halves"),
    ),
    "sharded update, list": (
        lm.replace(**SIZES, heads=4, d_head=16),
        md.Plan("rows:4", "batch:rows", weight_update="sharded", overlap="list"),
    ),
}


def sources(program: Program, eqn: Eqn) -> set[Eqn]:
    """The equations that an equation depends on, and itself."""
    producers = {v: other for other in program.eqns for v in other.outs}
    left = [eqn]
    for one in left:  # grows
        left += {producers[v] for v in one.ins if v in producers} - set(left)
    return set(left)


@pytest.mark.parametrize("case", CASES)
def test_planned_products_depend_on_the_fence_before_them_and_the_fence_after_on_them(case: str) -> None:
    model, plan = CASES[case]
    program = md.compile(model.train_step(), plan=plan, machine="tpu-v5e").program(*model.specs())
    place = {eqn: i for i, eqn in enumerate(program.eqns)}
    waits = pairs(program)
    count = 0
    for start, planned in products(program, kernels_with_products(program)).items():
        if not planned:
            continue
        before, after = program.eqns[place[start] - 1], program.eqns[place[waits[start]] + 1]
        assert before.op is FENCE and after.op is FENCE
        assert set(planned) <= sources(program, after)
        assert all(before in sources(program, product) for product in planned)
        count += len(planned)
    inside = [eqn for eqns in windows(program).values() for eqn in eqns if is_product(eqn)]
    assert count >= max(4, 0.8 * len(inside))


@pytest.mark.parametrize("case", CASES)
def test_windows_on_the_same_axes_follow_each_other_by_dependencies(case: str) -> None:
    """A start depends on the wait before it, so that the compiler cannot run another collective in its window."""
    model, plan = CASES[case]
    program = md.compile(model.train_step(), plan=plan, machine="tpu-v5e").program(*model.specs())
    waits = pairs(program)
    starts = list(waits)
    assert len(starts) >= 4
    for one, following in pairwise(starts):
        assert waits[one] in sources(program, following)


def test_products_inside_a_kernel_that_ends_after_the_wait_are_not_planned() -> None:
    def step(x: md.Tensor, a: md.Tensor, w: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return md.dot(x, w, "io"), md.shard(a, {})

    specs = md.spec("batch:8192 io:2048"), md.spec("m:2048 inner:2048"), md.spec("io:2048 hidden:2048")
    compiled = md.compile(step, "rows:8", "batch:rows; inner:rows", overlap="list", machine="tpu-v5e")
    program = compiled.program(*specs)
    kernels = kernels_with_products(program)
    ((start, planned),) = products(program, kernels).items()
    (product,) = planned
    later = Kernels({pairs(program)[start]: (product,)}, kernels.stored)  # the kernel ends with the wait
    assert products(program, later)[start] == ()
