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
    got, wanted = step(table, index).numpy(), md.take(table, index, "row").numpy()
    np.testing.assert_array_equal(got, wanted)
    number = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got)[number], np.signbit(simulated)[number])
    negative = np.signbit(wanted) & (wanted == 0)
    assert not np.signbit(wanted[3:5]).any() and np.signbit(got[negative]).any() == (not layout)
