"""Readers never fail on a program that runs; at length: `python -m tests.compile.readers_law`."""

from __future__ import annotations

from collections import Counter

from tests.compile.readers_law import READERS, judge, law, of_row
from tests.laws import rows
from tests.lowering.maker import Draw


def test_readers_never_fail_on_programs_that_run() -> None:
    counts, failures = law(28, 1, show=False)
    assert not failures, "\n".join(failures)
    assert all(counts[name] > 20 for name in READERS), counts


def test_readers_never_fail_on_functions_of_blocks() -> None:
    rng, counts = Draw("local"), Counter[str]()
    local = [row for row in rows() if row.name.startswith("local")]
    failures = [text for row in local for _ in range(3) for text in judge(of_row(row, rng), rng, counts)]
    assert not failures, "\n".join(failures)
    assert counts["cost"] > 6, counts
