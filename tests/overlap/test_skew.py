"""Skewed loops and loops in parts have the bits of the loop, for random bodies, stages and dims."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ir import Eqn, Scan, Var, verify
from meshdsl.lowering.check import check
from meshdsl.lowering.program import Program
from meshdsl.models.transformer import lm
from meshdsl.overlap.loops import LoopsInParts
from meshdsl.overlap.skew import EarlyStage, gathers_ahead, gradients_behind, skew
from tests.lowering.maker import Draw, Maker, whole_numbers
from tests.lowering.programs import MESHES, draw_layout, same_bits

MACHINE = "a100-p4de"


class Looping(Maker):
    """Random operations, most of them loops."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        if not self.depth:
            self.kinds = ["op_scan", "op_scan", "op_scan", "op_einsum", "op_mul"]


def draw(seed: int) -> tuple[Program, list[np.ndarray]]:
    """A random program with loops and its gradient, and its arguments."""
    rng = Draw(seed)
    pool = [Dim(name, rng.choice([3, 3, 4, 6])) for name in "abcd"]
    mesh = rng.choice(MESHES)
    numbers = np.random.default_rng(seed)
    args = [whole_numbers(numbers, tuple(rng.sample(pool, rng.choice([2, 3])))) for _ in range(2)]
    layout = md.Layout(dict(draw_layout(rng, mesh, [[d.name for d in x.dims] for x in args])))

    def forward(*xs: md.Tensor) -> md.Tensor:
        maker = Looping(Draw(seed + 1), list(xs), [])
        for _ in range(3):
            maker.step()
        return md.sum(maker.live[-1])

    return md.compile(md.value_and_grad(forward, argnums=(0, 1)), mesh, layout).program(*args), [
        x.numpy() for x in args
    ]


def closed(eqns: tuple[Eqn, ...], values: list[Var]) -> set[Eqn]:
    """The equations that compute these values, with all that they read."""
    made = {v: eqn for eqn in eqns for v in eqn.outs}
    found: set[Eqn] = set()
    while values:
        eqn = made.get(values.pop())
        if eqn is not None and eqn not in found:
            found.add(eqn)
            values += eqn.ins
    return found


def any_stages(rng: random.Random, scan: Scan) -> EarlyStage:
    """Random stages that no dependency forbids."""
    eqns = scan.body.eqns
    if rng.random() < 0.5:
        more = [v for eqn in eqns if rng.random() < 0.3 for v in eqn.outs]
        return EarlyStage(frozenset(closed(eqns, [*scan.results(scan.body.outs)[0], *more])), True)
    carried = set(scan.inputs(scan.body.ins)[1])
    for eqn in eqns:
        if not carried.isdisjoint(eqn.ins):
            carried.update(eqn.outs)
    free = [v for eqn in eqns for v in eqn.outs if v not in carried and rng.random() < 0.5]
    return EarlyStage(frozenset(closed(eqns, free)), False)


def sent(program: Program) -> Counter[str]:
    found = Counter[str]()
    for record in program.collectives:
        found[record.kind] += round(record.bytes * record.count)
    return found


def law(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            program, arrays = draw(seed)
        except md.LayoutError:
            continue
        rng = random.Random(seed)
        made = check(verify(skew(program, lambda scan, rng=rng: any_stages(rng, scan), lambda body: body), "skew"), "")
        assert same_bits(md.simulate(made, *arrays), md.simulate(program, *arrays)), f"seed {seed}"
        if all(not isinstance(eqn.control, Scan) or eqn.control.trips for eqn in program.eqns):
            assert sent(made) == sent(program), f"seed {seed}"
        for loops in itertools.starmap(LoopsInParts, itertools.product("abcd", (2, 3))):
            in_parts = check(verify(loops.split(program), "loops in parts"), "")
            if loops.part:
                assert same_bits(md.simulate(in_parts, *arrays), md.simulate(program, *arrays)), f"seed {seed}, {loops}"
                counts["in parts"] += 1
        counts["programs"] += 1
        counts["skewed"] += made is not program
    return counts


def test_skewed_loops_and_loops_in_parts_keep_bits_of_random_programs() -> None:
    counts = law(range(40))
    assert counts["skewed"] > 10 and counts["in parts"] > 10, counts


@pytest.mark.slow
def test_skewed_loops_and_loops_in_parts_keep_bits_of_many_random_programs() -> None:
    law(range(1_000, 2_500))


DENSE = lm.replace(layers=4, d_model=32, d_ff=64, heads=2, d_head=16, length=8, batch=8, vocab=64)
SHARDED = md.WeightUpdate("sharded", regather=True)


def compiled(overlap: Any) -> md.Compiled:
    machine = None if overlap == "none" else MACHINE
    return md.compile(
        DENSE.train_step(), "rows:4", "batch:rows", weight_update=SHARDED, overlap=overlap, machine=machine
    )


@pytest.mark.parametrize("choose", [gathers_ahead, gradients_behind])
def test_skewed_loops_of_a_model_keep_one_body_per_direction(choose: Any) -> None:
    program = compiled("none").program(*DENSE.specs())
    made = skew(program, choose, lambda body: body)
    before, after = (
        [eqn.control.trips for eqn in one.eqns if isinstance(eqn.control, Scan)] for one in (program, made)
    )
    assert before == [4, 4] and after == ([3, 3] if choose is gathers_ahead else [4, 3])
    rng = np.random.default_rng(0)
    given = [
        rng.integers(0, 64, [d.size for d in v.dims]).astype(v.dtype)
        if v.dtype.kind in "iu"
        else np.abs(0.3 * rng.normal(size=[d.size for d in v.dims])).astype(v.dtype)
        for v in program.ins
    ]
    assert same_bits(md.simulate(made, *given), md.simulate(program, *given))
    assert sent(made) == sent(program)


def test_overlap_skew_runs_on_devices_and_shows_the_windows_of_its_bodies() -> None:
    step, params = compiled("skew"), DENSE.specs()
    step.program(*params)
    plan = step.overlap
    assert {"gathers ahead", "gradients behind"} < {one.name for one in plan.attempts}
    assert any("all_gather" in window.collective or "reduce_scatter" in window.collective for window in plan.windows)
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: hasattr(x, "shape"))
    rng = np.random.default_rng(0)
    tensors = [
        md.tensor(
            rng.integers(0, 64, [d.size for d in x.dims]).astype(x.dtype)
            if x.dtype.kind in "iu"
            else np.abs(0.3 * rng.normal(size=[d.size for d in x.dims])).astype(x.dtype),
            x.dims,
        )
        for x in leaves
    ]
    arguments = jax.tree.unflatten(structure, tensors)
    ran = jax.tree.leaves(step(*arguments))
    for x, y in zip(ran, md.simulate(step.program(*params), *(t.numpy() for t in tensors)), strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-4, atol=1e-5)


def test_overlap_skew_keeps_to_the_memory_limit() -> None:
    step = compiled(md.Overlap("skew"))
    step.program(*DENSE.specs())
    least = min(one.peak_bytes for one in step.overlap.attempts[1:])
    with pytest.raises(md.LayoutError, match="over the limit"):
        compiled(md.Overlap("skew", memory_limit=least - 1)).program(*DENSE.specs())
    fitting = compiled(md.Overlap("skew", memory_limit=least))
    fitting.program(*DENSE.specs())
    assert fitting.overlap.after.peak_bytes == least


def test_overlap_skew_without_a_loop_is_refused() -> None:
    with pytest.raises(md.LayoutError, match="the program has no loop"):
        md.compile(lambda x, w: md.dot(x, w, "i"), "rows:4", "i:rows", overlap="skew", machine=MACHINE).program(
            md.spec("b:8 i:16"), md.spec("i:16 h:8")
        )


def test_overlap_skew_shows_no_windows_of_the_shorter_arm_of_a_branch() -> None:
    def arm(turns: int) -> Any:
        def run(h: md.Tensor, u: md.Tensor) -> md.Tensor:
            y, z = md.einsum(h, u, out="batch out"), md.einsum(h * 2, u, out="batch out")
            for _ in range(turns):
                y = md.tanh(y)
            return md.sum(y) + md.sum(md.einsum(z, z, out="out"))

        return run

    def f(w: md.Tensor, u: md.Tensor, x: md.Tensor) -> md.Tensor:
        def layer(h: md.Tensor, w: md.Tensor) -> Any:
            return md.einsum(md.einsum(h, w, out="batch hidden"), w, out="batch io"), None

        h, _ = md.scan(layer, x, w, over="layer")
        return md.cond(md.sum(x) > 0, arm(1), arm(3), h, u)

    specs = md.spec("layer:3 io:1024 hidden:1024"), md.spec("io:1024 out:1024"), md.spec("batch:64 io:1024")
    step = md.compile(f, "r:4", "io:r", overlap="skew", machine="h100")
    assert step.program(*specs).collectives and step.overlap.windows


def test_loops_whose_rows_are_in_the_hosts_memory_are_not_skewed():
    def loss(w, x):
        layer = md.checkpoint(lambda h, row: md.tanh(md.einsum(h, row, out="b i2")), policy="offload")
        return md.sum(md.scan(lambda h, row: (md.rename(layer(h, row), i2="i"), None), x, w, over="layer")[0])

    types = md.spec("layer:4 i:8 i2:8"), md.spec("b:8 i:8")
    arrays = [np.random.default_rng(0).standard_normal(t.shape).astype(np.float32) for t in types]
    grads = [
        md.simulate(md.compile(md.grad(loss), "rows:2", "i:rows", overlap=mode).program(*types), *arrays)[0]
        for mode in ("none", "skew")
    ]
    np.testing.assert_allclose(*grads, rtol=1e-5)
