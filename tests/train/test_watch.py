"""A step that takes too long: who is late, and what the others wait for."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md
from meshdsl.train import stages, watch
from tests.train.tiny import tiny


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def run(clock: Clock, factor: float | None = 5.0, steps: int = 5, seconds: float = 1.0) -> watch.Watch:
    """A run that is in the data of the step after so many, each of which took so long."""
    found = watch.Watch(factor)
    compiled, types = stages(tiny, md.Plan("all:2", "batch:all"))
    found.program = compiled.program(*types)
    for step in range(1, steps + 2):
        found.reads(step)
        if step <= steps:
            found.starts(step)
            clock.now += seconds
            found.position()
    return found


def wait(clock: Clock, found: watch.Watch, seconds: float) -> watch.Position:
    """The position of a run that was looked at often for so many seconds."""
    for _ in range(int(seconds / watch.POLL)):
        clock.now += watch.POLL
        found.position()
    return found.position()


@pytest.mark.parametrize(
    ("factor", "steps", "seconds", "limit"),
    [(5.0, 5, 1.0, 5.0), (5.0, 5, 0.01, 2.0), (5.0, 2, 1.0, None), (None, 5, 1.0, None)],
    ids=["factor", "least", "few steps", "off"],
)
def test_watch_limits_a_step(clock: Clock, factor: float | None, steps: int, seconds: float, limit: float | None):
    found = run(clock, factor, steps, seconds)
    assert found.limit() == (None if limit is None else pytest.approx(limit))
    assert not wait(clock, found, limit or 100.0)["overdue"]
    assert bool(wait(clock, found, 0.5)["overdue"]) == (limit is not None)


def test_watch_does_not_limit_saves_compilation_and_a_process_that_was_stopped(clock: Clock):
    found = run(clock)
    found.saves()
    assert wait(clock, found, 100)["overdue"] is None
    found.evaluates(0)
    assert wait(clock, found, 100)["overdue"] is None
    found.evaluates(1)
    assert wait(clock, found, 6)["overdue"] == pytest.approx(6)
    found.reads(7)
    clock.now += 1000  # nobody looked
    assert found.position()["overdue"] is None and found.limit() == pytest.approx(5)
    assert wait(clock, found, 6)["overdue"]


def test_watch_times_steps_that_are_all_saved(clock: Clock):
    found = watch.Watch(5.0)
    for step in range(1, 5):
        found.reads(step)
        found.starts(step)
        clock.now += 1
        found.saves()
        clock.now += 100
    assert found.limit() == pytest.approx(5)


def test_watch_names_what_is_late(clock: Clock):
    found = run(clock)
    early: dict[str, Any] = {**wait(clock, found, 6), "stack": ["data.py:3 in read: queue.get()"]}
    found.starts(6)
    waits = found.position()
    said = found.report({0: waits, 1: early})
    assert said is not None and said.splitlines()[:4] == [
        "step 6 takes 6.0 s, and the median is 1 s",
        "  process 1 is late: it reads the data of step 6",
        "    data.py:3 in read: queue.get()",
        "  process 0 has started step 6; it waits for process 1 in the check for signals between steps",
    ]
    silent = found.report({0: waits, 1: {**early, "silent": True, "overdue": None}})
    assert silent is not None and "process 1 is late: it does not answer; last, it reads the data of step 6" in silent
    same = found.report({0: waits, 1: waits})
    assert same is not None and "process 1 has started step 6" in same and "all are as far" in same
    assert found.report({0: waits, 1: {**early, "limited": False}}) is None


def test_watch_compares_programs():
    found = [watch.Watch(), watch.Watch()]
    for one, layout in zip(found, ("batch:all", "hidden:all"), strict=True):
        compiled, types = stages(tiny, md.Plan("all:2", layout))
        one.program = compiled.program(*types)
    first, other = (one.collectives() for one in found)
    assert (
        first == found[0].collectives() and first["collective 0"] == "all_reduce(sum) over all sum over 'batch' of sum"
    )
    assert first["equations"] != other["equations"]
