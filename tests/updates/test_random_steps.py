"""A sample of the random steps of `python -m tests.updates.random_steps`."""

from __future__ import annotations

from tests.updates.random_steps import RIGHT, outcome


def test_a_layout_that_is_legal_replicated_is_legal_sharded_and_gives_the_same_bits() -> None:
    found = {seed: outcome(seed)[0] for seed in range(20)}
    assert {seed: text for seed, text in found.items() if text not in RIGHT} == {}
    assert list(found.values()).count("equal") >= 10
