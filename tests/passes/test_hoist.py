"""Casts of weights move out of loops, so that a sharded update gathers the narrow weight."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.llama import llama
from meshdsl.passes.hoist import hoist_casts
from meshdsl.trace import evaluate

SMALL = llama.replace(batch=16, length=8, vocab=32, layers=8, d_model=16, d_ff=32, query_heads=2, heads=1)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("mesh", "layout", "microbatches", "chunks"),
    [
        ("rows:4", "batch:rows", 1, 1),
        ("rows:4", "batch:rows", 2, 1),
        ("stages:2 rows:2", "layer:stages; batch:rows", 4, 1),
        ("stages:2 rows:2", "layer:stages; batch:rows", 4, 2),
    ],
    ids=["one loop", "micro-batches", "pipeline", "chunks"],
)
def test_a_sharded_update_gathers_matrices_after_their_cast(
    mesh: str, layout: str, microbatches: int, chunks: int, remat: str
) -> None:
    work = SMALL.replace(compute_dtype="bfloat16")
    plan = md.Plan(mesh, layout, weight_update="sharded", remat=remat, chunks=chunks, microbatches=microbatches)
    program = md.compile(work.train_step(), plan=plan).program(*work.specs())
    gathered = [r for r in program.collectives if r.kind == "all_gather" and "layer" in str(r.cause)]
    matrices = [r.dtype for r in gathered if "norm" not in str(r.cause)]
    assert len(matrices) == 7 and set(map(str, matrices)) == {"bfloat16"}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_takes_the_narrow_value_unless_a_loop_inside_reads_the_wide_one(wide: bool, remat: bool) -> None:
    def both(rows: md.Tensor, w: md.Tensor) -> md.Tensor:
        def inner(total: md.Tensor, x: md.Tensor) -> tuple[md.Tensor, None]:
            narrow = md.cast(md.cast(w, "bfloat16"), "float32")
            return total + narrow * x + (w if wide else 0.0), None

        def trip(total: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, None]:
            layer = md.checkpoint(inner) if remat else inner
            return md.scan(layer, total, row, over="column")[0], None

        return md.scan(trip, md.tensor(0.0), rows, over="row")[0]

    args = md.tensor(np.arange(6, dtype="float32").reshape(2, 3), "row column"), md.tensor(1.005859375)
    step = md.compile(both, "", "")
    graph = step.graph(*args)
    hoisted = hoist_casts(graph)
    first = [eqn for eqn in hoisted.eqns if str(eqn.op) == "cast"]
    assert len(first) == (0 if wide else 1)
    again = [x.numpy() for x in evaluate(hoisted, args)]
    np.testing.assert_array_equal(again, [step(*args).numpy()])
