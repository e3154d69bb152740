"""Unrolled loops have the bits of the loop, also if it has no trips, and when rows are reduced one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.control import BARRIER
from meshdsl.ir import Scan, verify
from meshdsl.lowering.check import check
from meshdsl.lowering.program import Program
from meshdsl.lowering.unroll import unroll
from meshdsl.models.transformer import lm
from tests.lowering.programs import same_bits


def step(x: md.Tensor, w: md.Tensor) -> Any:
    """A loop over layers, and the gradient of its weights, which is reduced after the backward loop."""

    def total(w: md.Tensor) -> md.Tensor:
        y, sums = md.scan(lambda y, row: (y * md.broadcast(row, y.dims), md.sum(y, "batch")), x, w, over="layer")
        return md.sum(y) + md.sum(sums)

    return md.value_and_grad(total)(w)


def program_of(layers: int) -> tuple[Program, list[np.ndarray]]:
    rng = np.random.default_rng(layers)
    arrays = [rng.integers(-2, 3, shape).astype("float32") for shape in ((4, 2), (layers, 2))]
    x, w = (md.tensor(array, names) for array, names in zip(arrays, ("batch io", "layer io"), strict=True))
    return md.compile(step, "rows:2 cols:2", "batch:rows; io:cols").program(x, w), arrays


@pytest.mark.parametrize("large", [0, 2**18])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_unroll_keeps_bits_for_any_number_of_trips(layers: int, large: float) -> None:
    program, arrays = program_of(layers)
    flat = check(verify(unroll(program, large), "unroll"), "unroll")
    assert any(isinstance(eqn.control, Scan) for eqn in program.eqns)
    assert any(isinstance(eqn.control, Scan) for eqn in flat.eqns) is (layers == 0)
    assert same_bits(md.simulate(flat, *arrays), md.simulate(program, *arrays))


def test_unroll_reduces_large_rows_as_soon_as_they_are_there() -> None:
    program, _ = program_of(3)
    together, apart = (
        [record.count for record in unroll(program, large).collectives if record.axes == ("rows",)]
        for large in (2**18, 0)
    )
    assert len(apart) > len(together)


def test_unrolled_steps_store_the_residuals_of_the_loop() -> None:
    """Without barriers, weights of attention in 16 bits would be computed again from scores in 32 bits."""
    model = lm.replace(layers=4, d_model=16, heads=4, d_head=8, d_ff=32, length=256, batch=8, compute_dtype="bfloat16")

    def saved(unrolled: bool) -> int:
        step = md.compile(model.train_step(), "rows:2", "batch:rows", donate=(0, 1), unroll=unrolled)
        return step.cost(*model.specs(), machine="a100-p4de").memory.by_category["saved activations"]

    assert saved(True) <= saved(False)


def test_backward_trips_read_residuals_behind_barriers() -> None:
    program, _ = program_of(3)
    behind = [eqn for eqn in unroll(program).eqns if eqn.op is BARRIER]
    loop = next(eqn for eqn in program.eqns if isinstance(eqn.control, Scan) and eqn.backward)
    assert len(behind) == 3 * len(set(loop.ins) & {v for eqn in program.eqns if eqn.control for v in eqn.outs})
    assert behind and all(eqn.backward for eqn in behind)
