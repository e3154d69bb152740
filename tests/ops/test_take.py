"""Rows of a table that is split along the taken dim are summed over devices: equal values, and 0.0 for -0.0."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["", "row:p", "row:p,q", "row:q k:p"])
def test_taken_rows_are_those_of_the_table_and_the_simulator_has_their_bits(layout: str, dtype: str) -> None:
    rows = np.array([[0.0, -0.0, 1.0], [-0.0, -0.0, -2.0], [np.nan, 0.0, -0.0], [-0.0, -np.inf, 0.0]], dtype)
    table, index = md.tensor(rows, "row k"), md.tensor(np.array([0, 3, 2, 9, -1, 1]), "n")
    step = md.compile(lambda x, i: md.take(x, i, "row"), "p:2 q:2", layout)
    (simulated,) = md.simulate(step.program(table, index), table, index)
    got, wanted = step(table, index).numpy(), md.take(table, index, "row", drop=True).numpy()
    np.testing.assert_array_equal(got, wanted)
    number = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got)[number], np.signbit(simulated)[number])
    negative = np.signbit(wanted) & (wanted == 0)
    assert not np.signbit(wanted[3:5]).any() and np.signbit(got[negative]).any() == (not layout)


def test_known_indices_count_from_the_end_and_stay_inside() -> None:
    """As in NumPy: numbers, 0-d arrays, and tensors of any integer dtype; also in a traced function."""
    rows = np.arange(200.0)
    x = md.tensor(rows, "a")
    for i in (-1, 0, 199, -200, np.int8(-3), np.array(-2), np.uint8(199)):
        for got in (md.take(x, i, "a"), md.compile(lambda x, i=i: md.take(x, i, "a"), "", "")(x)):
            assert got.item() == rows[i]
        changed = rows.copy()
        changed[i] += 5
        np.testing.assert_array_equal(md.put_add(x, i, 5.0, "a").numpy(), changed)
    for dtype in ("int8", "int16", "int64", "uint8"):
        values = np.array([3, 100, 0] if dtype == "uint8" else [-1, -128, 100], dtype)
        known = md.tensor(values, "n")
        for got in (md.take(x, known, "a"), md.compile(lambda x, known=known: md.take(x, known, "a"), "p:2", "a:p")(x)):
            np.testing.assert_array_equal(got.numpy(), rows[values])
        slope = md.grad(lambda x, known=known: md.sum(md.take(x, known, "a")))(x).numpy()
        assert slope[values].tolist() == [1, 1, 1] and slope.sum() == 3


@pytest.mark.parametrize("index", [3, -4, np.int64(7), md.tensor([0, 3], "n"), md.tensor([-4, 0], "n")], ids=str)
def test_known_indices_beyond_the_size_are_refused_unless_they_are_dropped(index: object) -> None:
    x = md.tensor([1.0, 2.0, 3.0], "a")
    place = r"of a=3: an index is from 0 to 2, or from -3 to -1, from the end\n  with drop=True"
    for call in (lambda x: md.take(x, index, "a"), lambda x: md.put_add(x, index, 1.0, "a")):
        for run in (call, md.compile(call, "", ""), md.grad(lambda x, call=call: md.sum(call(x)))):
            with pytest.raises(md.ShapeError, match=place):
                run(x)
    taken = md.take(x, index, "a", drop=True).numpy()
    assert taken.reshape(-1)[-1] == (1.0 if taken.ndim and np.any(np.asarray(index) == -4) else 0.0)
    np.testing.assert_array_equal(md.put_add(x * 0, -1, 1.0, "a", drop=True).numpy(), [0, 0, 0])
