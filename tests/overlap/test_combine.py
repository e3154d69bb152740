"""Collectives of gradients share one, up to a limit; those that the backward pass waits for stay alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.network import KINDS
from meshdsl.lowering.program import Program
from meshdsl.lowering.unroll import unroll
from meshdsl.overlap.combine import combine

LAYERS, WIDTH = 4, 8  # a gradient has 256 bytes


def program_of(layout: str, update: str = "replicated") -> Program:
    def loss(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
        h, _ = md.scan(lambda h, w: (layer(h, w), None), x, params["w"], over="layer")
        return md.mean(md.square(h))

    def layer(h: md.Tensor, w: md.Tensor) -> md.Tensor:
        up = md.tanh(md.dot(h, w, "io"))
        return md.rename(md.dot(up, md.rename(md.prefer(w), io="out"), "hidden"), out="io")

    def step(params: dict[str, md.Tensor], x: md.Tensor) -> tuple[dict[str, md.Tensor], md.Tensor]:
        value, grads = md.value_and_grad(loss)(params, x)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, value

    types = {"w": md.spec(f"layer:{LAYERS} io:{WIDTH} hidden:{WIDTH}")}, md.spec(f"batch:16 io:{WIDTH}")
    return unroll(md.compile(step, "rows:2 cols:2", layout, weight_update=update).program(*types), large=0)


def counts(program: Program) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for record in program.collectives:
        found[record.kind, ",".join(record.axes)] += round(record.count)
    return found


@pytest.mark.parametrize(("limit", "left"), [(0, 4), (256, 4), (512, 2), (900, 2), (1024, 1), (math.inf, 1)])
def test_gradients_share_collectives_up_to_the_limit(limit: float, left: int) -> None:
    program = program_of("batch:rows")
    made = combine(program, {"all_reduce": limit})
    scalar = 1  # the loss
    assert counts(program)["all_reduce", "rows"] == LAYERS + scalar
    assert counts(made)["all_reduce", "rows"] in (left, left + scalar)
    assert sum(r.bytes for r in made.collectives) == sum(r.bytes for r in program.collectives)
    rng = np.random.default_rng(0)
    given = [rng.standard_normal([d.size for d in v.dims]).astype(v.dtype) for v in program.ins]
    for a, b in zip(md.simulate(made, *given), md.simulate(program, *given), strict=True):
        assert a.tobytes() == b.tobytes()


def test_collectives_that_the_backward_pass_waits_for_stay_alone() -> None:
    program = program_of("batch:rows; hidden:cols")
    made = combine(program, {"all_reduce": math.inf})
    assert counts(made)["all_reduce", "cols"] == counts(program)["all_reduce", "cols"] > LAYERS
    assert counts(made)["all_reduce", "rows"] < counts(program)["all_reduce", "rows"]


def test_sharded_updates_combine_scatters() -> None:
    def step(params: dict[str, md.Tensor], x: md.Tensor) -> dict[str, md.Tensor]:
        grads = md.grad(lambda p: md.mean(md.square(md.dot(x, p["w"], "io") * p["v"])))(params)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}

    types = {"w": md.spec("io:8 hidden:8"), "v": md.spec("hidden:8")}, md.spec("batch:16 io:8")
    update = md.WeightUpdate("sharded", bucket_bytes=0)
    program = md.compile(step, "rows:4", "batch:rows", weight_update=update).program(*types)
    limits: dict[str, float] = dict.fromkeys(KINDS, math.inf)
    before, after = counts(program), counts(combine(program, limits))
    assert after["reduce_scatter", "rows"] < before["reduce_scatter", "rows"]
    assert combine(program, {}) is program
