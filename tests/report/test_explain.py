"""Every move is costed as a program of its own; a collective says which moves remove it."""

from __future__ import annotations

import json

import pytest

import meshdsl as md
from meshdsl.cost.report import explain
from meshdsl.cost.report.explain import LayoutEdit, dims, edits_text, layout_edits, options
from meshdsl.cost.report.report import Report
from meshdsl.errors.tables import WIDTH

X, W1, W2 = md.spec("batch:512 io:512"), md.spec("io:512 hidden:1024"), md.spec("hidden:1024 out:512")


def mlp(x: md.Tensor, w1: md.Tensor, w2: md.Tensor) -> md.Tensor:
    return md.dot(md.relu(md.dot(x, w1, "io")), w2, "hidden")


STEP = md.compile(mlp, "rows:2 cols:4", "batch:rows hidden:cols")
BASE = STEP.cost(X, W1, W2)


def recost(layout: md.Layout) -> Report:
    return STEP.under(STEP.mesh, layout).cost(X, W1, W2)


@pytest.fixture(scope="module")
def found() -> list[LayoutEdit]:
    return layout_edits(BASE, recost)


def test_every_change_of_one_dim_is_there_once(found: list[LayoutEdit]):
    assert dims(BASE) == ["batch", "hidden", "io", "out"]
    assert options(BASE) == [(), ("rows",), ("cols",), ("rows", "cols")]
    asked = {(move.dim, move.after) for move in found}
    assert len(asked) == len(found) == 4 * 3
    assert ("batch", ("rows",)) not in asked and ("hidden", ("cols",)) not in asked


def test_a_move_costs_what_its_layout_costs(found: list[LayoutEdit]):
    (move,) = (move for move in found if (move.dim, move.after) == ("batch", ()))
    assert move.report is not None
    alone = md.compile(mlp, "rows:2 cols:4", "hidden:cols").cost(X, W1, W2)
    assert (move.report.seconds, move.report.peak_bytes) == (alone.seconds, alone.peak_bytes)


def test_the_best_first_and_the_illegal_last(found: list[LayoutEdit]):
    legal = [move for move in found if move.report is not None]
    times = [move.report.seconds for move in legal if move.report is not None]
    assert times == sorted(times)
    assert all(move.report is None and move.reason for move in found[len(legal) :])
    assert {move.dim for move in found[len(legal) :]}, "batch and hidden are in one tensor"


def test_the_text_of_moves(found: list[LayoutEdit]):
    text = edits_text(found)
    assert "split hidden no more (now cols)" in text
    assert "batch and hidden to 'rows', and both are in" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert repr(found[-1]).startswith("<LayoutEdit: map ") and "illegal: " in repr(found[-1])
    assert edits_text([]) == "there is nowhere else to map it"


def test_a_collective(found: list[LayoutEdit]):
    (number,) = explain.find(BASE, "0")
    text = explain.collective_text(BASE, number, found)
    assert text.startswith("collective 0: all_reduce(sum) over cols of 524 kB in float32, once a step\n")
    assert "sum over 'hidden' of einsum" in text
    assert "split hidden no more (now cols)" in text
    where = BASE.sends[0].line.where
    assert explain.find(BASE, f"test_explain.py:{where.line}") == [0]
    removing = [move for move in found if explain.removes(move, BASE.sends[0].line)]
    assert {(move.dim, move.after) for move in removing} >= {("hidden", ())}
    for move in removing:
        assert move.report is not None
        assert not any("'hidden'" in str(r.cause) for r in move.report.program.collectives)
    assert explain.dims_behind(BASE, [0]) == ["hidden"]


def test_a_dim(found: list[LayoutEdit]):
    mine = [move for move in found if move.dim == "hidden"]
    text = explain.dim_text(BASE, explain.check_dim(BASE, "hidden"), mine)
    assert text.startswith("hidden = 1024, split over cols (1024 / 4)\n  arguments that have it: 2, ")
    assert "all_reduce" in text
    assert "io = 512, not split" in explain.dim_text(BASE, "io", [])


@pytest.mark.parametrize("asked", ["7", "model.py:1", "x"])
def test_a_collective_that_is_not_there(asked: str):
    with pytest.raises(explain.ExplainError, match=f"there is no collective '{asked}'"):
        explain.find(BASE, asked)


def test_a_dim_that_is_not_there():
    with pytest.raises(explain.ExplainError, match="did you mean 'hidden'"):
        explain.check_dim(BASE, "hiden")


def test_what_binds():
    assert "of the step waits for it" in explain.binding_text(BASE)
    tight = STEP.cost(X, W1, W2, limit=1e6)
    assert explain.binding_text(tight).startswith("bound by memory: ")
    worse = layout_edits(tight, lambda layout: STEP.under(STEP.mesh, layout).cost(X, W1, W2, limit=1e6), ["io"])
    assert all("does not fit" in move.effect for move in worse if move.report is not None)


def test_json(found: list[LayoutEdit]):
    record = explain.to_dict(BASE, [0], found)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["collectives"][0]["dims"] == ["hidden"]
    assert record["collectives"][0]["removed_by"]
    assert len(record["moves"]) == len(found)
