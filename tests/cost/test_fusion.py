"""The bytes that kernels read and write when they pick or update rows, and which products count as batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.fusion import steps
from meshdsl.cost.ledger import ledger
from meshdsl.cost.scores import Scores, batches
from meshdsl.ops.creation import EMPTY
from meshdsl.trace import bind1

ROW = 4 * 256 * 256  # bytes
RING, INDEX, BLOCK = md.spec("slot:8 batch:256 io:256"), md.spec("", "int32"), md.spec("batch:256 io:256")


def moved(f: Callable[..., Any], *specs: Any) -> list[tuple[str, float]]:
    """The operations and the rows, read and written, of each kernel of a step that moves at least half a row."""
    costs = ledger(md.compile(f, "x:1").program(*specs))
    kernels = [costs.of(step) for step in dict.fromkeys(line.step for line in costs.lines)]
    found = [("+".join(line.op for line in lines), sum(line.hbm_bytes for line in lines) / ROW) for lines in kernels]
    return [(ops, round(rows, 1)) for ops, rows in found if rows >= 0.5]


def test_each_reader_picks_a_row_from_where_it_is() -> None:
    """Neither reads a copy, nor the other rows; a value computed from the row reads it once."""

    def f(ring: md.Tensor, i: md.Tensor) -> Any:
        row = md.take(ring, i, "slot")
        return md.sum(md.exp(row)), md.sum(row * md.tanh(row))

    assert [rows for _, rows in moved(f, RING, INDEX)] == [1, 1]
    two = moved(lambda ring, i, j: md.take(ring, i, "slot") + md.take(ring, j, "slot"), RING, INDEX, INDEX)
    assert [rows for _, rows in two] == [3]


def test_rows_at_several_indices_are_gathered_once() -> None:
    def f(ring: md.Tensor, i: md.Tensor) -> Any:
        rows = md.take(ring, i, "slot")
        return md.sum(md.exp(rows)), md.sum(md.tanh(rows))

    assert [rows for _, rows in moved(f, RING, md.spec("n:2", "int32"))] == [4, 2, 2]


@pytest.mark.parametrize(
    ("make", "kernels"),
    [
        pytest.param(md.tanh, [("tanh", 2), ("dynamic_update_slice", 1), ("exp+sum", 1)], id="computed"),
        pytest.param(lambda x: x, [("dynamic_update_slice", 2), ("exp+sum", 1)], id="carried"),
    ],
)
def test_a_kernel_that_makes_a_row_also_writes_it_into_a_ring(make: Any, kernels: list[tuple[str, float]]) -> None:
    """Another reader finds the row where it was made. What no kernel made is copied: read and written."""

    def f(ring: md.Tensor, row: md.Tensor, i: md.Tensor) -> Any:
        def trip(state: Any, _: Any) -> Any:
            ring, new = state[0], make(state[1])
            return (md.dynamic_update_slice(ring, md.stack([new], "slot"), "slot", i), new), md.sum(md.exp(new))

        return md.scan(trip, (ring, row), None, over=md.Dim("trip", 3))

    assert moved(f, RING, BLOCK, INDEX) == kernels


def test_memory_that_nothing_has_written_is_only_allocated() -> None:
    def f(row: md.Tensor) -> md.Tensor:
        ring = bind1(EMPTY, dtype=row.dtype, shape=RING.dims, number=0)

        def trip(ring: Any, i: md.Tensor) -> Any:
            return md.dynamic_update_slice(ring, md.stack([md.exp(row)], "slot"), "slot", i), None

        return md.scan(trip, ring, md.iota("slot:8"), over="slot")[0]

    assert [rows for _, rows in moved(f, BLOCK)] == [2]  # in each trip


def test_a_product_of_one_stage_is_not_batched() -> None:
    """Rows by the weights of the only stage, or expert, of a device are plain products."""
    for stages, batched in ((1, 1), (2, 1), (4, 0)):
        step = md.compile(lambda x, w: md.dot(x, w, "io"), f"stages:{stages} rows:2", "stage:stages; batch:rows")
        program = step.program(md.spec("stage:4 batch:8 io:16"), md.spec("stage:4 io:16 hidden:32"))
        assert len(batches(program)) == batched


def test_steps_differ_by_the_function_that_decides_and_not_by_its_name() -> None:
    program = md.compile(lambda x, w: md.dot(md.tanh(x), w, "io"), "").program(BLOCK, md.spec("io:256 out:8"))
    fused, alone = (lambda _, alone=alone: Scores(set(), set(), False, alone) for alone in (False, True))
    assert fused.__name__ == alone.__name__
    assert [len(steps(program, rule)) for rule in (fused, alone, fused)] == [1, 2, 1]
