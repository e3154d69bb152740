"""How exact costs correct the estimates of the plans that are not costed yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import meshdsl as md
from meshdsl.cost.machine import machine
from meshdsl.search.guesses import Guess, Guesses, Knobs
from meshdsl.search.screen import Candidate

SHARDED = md.WeightUpdate("sharded")


def guess(*roles: str, remat: str = "full", mesh: str = "x:4 y:2") -> Guess:
    """A plan that is estimated at 1 s and 10 bytes."""
    candidate = Candidate(md.Mesh(mesh), tuple(tuple(role.split()) for role in roles))
    return Guess(candidate, Knobs(remat, SHARDED, 1), 1.0, 10.0)


def corrected(*costed: tuple[Guess, float, float]) -> Guesses:
    """The guesses after some exact costs: seconds and bytes."""
    guesses = Guesses({}, machine("h100"), 100.0, [SHARDED], [1])
    for each, seconds, peak in costed:
        guesses.costed(each, cast(Any, SimpleNamespace(seconds=seconds, peak_bytes=peak)))
    return guesses


def test_bytes_are_corrected_by_plans_that_split_the_same_dims() -> None:
    """Of a family with ratios of 2 and 3, a plan has the ratio of its own roles, in any order and on any mesh."""
    guesses = corrected((guess("batch", "heads"), 1.0, 20.0), (guess("expert", "length"), 1.0, 30.0))
    for own, bytes_ in ((("batch", "heads"), 20.0), (("length", "expert"), 30.0)):
        assert guesses._bytes(guess(*own)) == bytes_
        assert guesses._bytes(guess(*own, remat="none")) == bytes_
        assert guesses._bytes(guess(*own, mesh="x:2 y:4")) == bytes_
    assert guesses._bytes(guess("vocab", "heads")) == 25.0, "of the whole family"


def test_seconds_are_corrected_by_the_family_whatever_the_roles() -> None:
    guesses = corrected((guess("batch", "heads"), 2.0, 10.0))
    other = guess("expert", "length")
    assert guesses._rank(other) > 2 * (1 - 1e-9) and guesses._rank(other) < 2.2


def test_a_plan_over_the_limit_by_its_corrected_bytes_is_not_next() -> None:
    guesses = corrected((guess("batch", "heads"), 1.0, 110.0))
    guesses._put([guess("heads", "batch", mesh="x:2 y:4")])
    assert guesses.next(fits=True) is None
