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


@pytest.mark.parametrize("layout", ["batch:rows; params:rows", "batch:rows"])
def test_a_table_whose_rows_are_read_in_a_narrow_dtype_is_gathered_in_it(layout: str) -> None:
    work = SMALL.replace(compute_dtype="bfloat16")
    update = "replicated" if "params" in layout else "sharded"
    program = md.compile(work.train_step(), "rows:4", layout, weight_update=update).program(*work.specs())
    tables = [r for r in program.collectives if r.kind == "all_gather" and "embed" in str(r.cause)]
    assert {str(r.dtype) for r in tables} == {"bfloat16"}


@pytest.mark.parametrize("read", ["narrow", "wide", "two dtypes", "result"])
def test_rows_that_are_only_cast_are_looked_up_in_the_narrow_table(read: str) -> None:
    vocab, width = md.dims("vocab:5 width:3")
    table = md.tensor(np.linspace(-1, 1, 15, dtype="float32").reshape(5, 3), [vocab, width])
    ids = md.tensor(np.array([0, 4, 7, 2]), "token")  # one of them is outside: its row is 0

    def rows(table: md.Tensor, ids: md.Tensor) -> tuple[md.Tensor, ...]:
        found = md.take(table, ids, vocab, drop=True)
        narrow = md.cast(found, "bfloat16")
        others = {"wide": found * 2.0, "two dtypes": md.cast(found, "float16"), "result": found}
        return narrow, md.cast(found, "bfloat16") * 2.0, others.get(read, md.sin(narrow))

    graph = md.compile(rows, "").graph(table, ids)
    hoisted = hoist_casts(graph)
    assert {str(eqn.outs[0].dtype) for eqn in hoisted.eqns if str(eqn.op) == "take"} == {
        "bfloat16" if read == "narrow" else "float32"
    }
    for new, old in zip(evaluate(hoisted, (table, ids)), evaluate(graph, (table, ids)), strict=True):
        np.testing.assert_array_equal(new.numpy(), old.numpy())
