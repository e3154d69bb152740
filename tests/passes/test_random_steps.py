"""A sample of the random steps of `python -m tests.passes.random_steps`."""

from __future__ import annotations

import pytest

from tests.passes.random_steps import NOTHING, outcome


@pytest.mark.parametrize("seeds", [range(10), range(10, 20)])
def test_a_layout_that_is_legal_replicated_is_legal_sharded_and_gives_the_same_bits(seeds: range) -> None:
    found = [outcome(seed)[0] for seed in seeds]
    assert set(found) <= {"equal", "illegal", NOTHING}
    assert found.count("equal") >= len(seeds) // 2
