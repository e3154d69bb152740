"""A program drops the barriers on rows of its loops, and its results stay the same."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.program import Program
from meshdsl.targets.tpu.stored_rows import drop_row_barriers
from tests.lowering.programs import same_bits


def before_and_after(layers: int, twice: bool) -> tuple[Program, Program]:
    """The gradient of a loop over rematerialised layers, whose rows one or two layers read, around the pass."""

    def layer(h: md.Tensor, row: md.Tensor) -> md.Tensor:
        return md.tanh(h * row)

    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def trip(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, None]:
            h = md.checkpoint(layer)(h, row)
            return (md.checkpoint(layer)(h, row) if twice else h), None

        return md.sum(md.scan(trip, x, w, over="layer")[0])

    specs = md.spec([md.Dim("layer", layers), md.Dim("batch", 4)]), md.spec("batch:4")
    program = md.compile(md.grad(loss), "rows:2", "batch:rows").program(*specs)
    return program, drop_row_barriers(program)


@pytest.mark.parametrize(
    ("layers", "twice", "counts"),
    [
        pytest.param(3, False, (2, 0), id="the rows of one layer"),
        pytest.param(3, True, (4, 2), id="a row of weights that two layers read"),
        pytest.param(1, False, (2, 2), id="a loop of one trip"),
    ],
)
def test_barriers_stay_between_two_readers(layers: int, twice: bool, counts: tuple[int, int]) -> None:
    before, after = before_and_after(layers, twice)
    assert tuple(str(program).count(" = barrier ") for program in (before, after)) == counts
    assert drop_row_barriers(after) is after
    draw = np.random.default_rng(layers)
    arrays = [draw.normal(size=shape).astype(np.float32) for shape in ((layers, 4), (4,))]
    assert same_bits(md.simulate(after, *arrays), md.simulate(before, *arrays))
