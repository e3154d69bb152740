"""A trace opens: it is what the format asks for, and it says what the timeline says."""

from __future__ import annotations

import json
from collections import Counter

import pytest

import meshdsl as md
from meshdsl.cost.lanes import COMPUTE
from meshdsl.cost.report.trace_events import trace_events
from meshdsl.models.transformer import lm

LM = lm.replace(batch=8, length=8, vocab=16, layers=3, d_model=8, heads=4, d_head=2, d_ff=16)


@pytest.mark.parametrize("name", ["empty", "data_model", "sequence"])
def test_a_train_step(name: str) -> None:
    timeline = md.compile(LM.train_step(), *LM.layouts[name]).cost(*LM.specs(), machine="tpu-v5e").timeline
    trace = json.loads(json.dumps(trace_events(timeline), allow_nan=False))
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    loops = [event for event in complete if event["name"].startswith("scan x3")]
    assert len(loops) == 2 and len(complete) > len(timeline.events)
    for loop in loops:  # every trip shows the same instructions
        end = loop["ts"] + loop["dur"]
        inside = [event for event in complete if loop["ts"] - 1e-6 <= event["ts"] < end - 1e-6 and event is not loop]
        counts = Counter((event["name"], event["args"]["trips"]) for event in inside)
        assert counts and all(count % 3 == 0 for count in counts.values()), counts
    assert any("[batch length" in event["name"] and " at models/transformer.py:" in event["name"] for event in complete)
    assert {event["ph"] for event in events} == {"X", "M"}
    assert {lanes[event["tid"]] for event in complete} == {event.lane for event in timeline.events}
    for event in complete:
        assert event["pid"] == 0 and event["ts"] >= 0 and event["dur"] >= 0
        assert event["args"]["where"].startswith(("models/transformer.py", "tests/"))
        if event["cat"] == "communication":
            assert event["args"]["cause"] and event["args"]["bytes"] > 0
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(timeline.seconds * 1e6)
    for lane in lanes:
        slices_nest([event for event in complete if event["tid"] == lane])
    sent = {event["name"].partition(" ")[0] for event in complete if event["cat"] != COMPUTE}
    assert ("all_reduce" in sent) == (name != "empty")


def slices_nest(events: list[dict]) -> None:
    """Slices of one thread must lie in each other or apart: viewers drop what overlaps."""
    some = 1e-6
    open_until: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"] + some:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + some, event
        open_until.append(end)
