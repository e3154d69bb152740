"""A timeline as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each lane is a named thread: computation, and each set of mesh axes that sends. Each instruction is a complete event
("ph": "X") in microseconds, named by its operation, its dims and its source line. A loop is one event that contains
the events of its first trips, which the timeline puts at equal intervals; `trips` is how often they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...lowering.program import Program
from ..fusion import LoopStep
from ..lanes import COMPUTE, Event
from ..timeline import Timeline

TRIPS = 3  # of every loop


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace as an object to write as JSON.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> report = step.cost(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32"), machine="tpu-v5e")
    >>> events = trace_events(report.timeline)["traceEvents"]
    >>> [(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    [('process_name', 'one of 4 devices of tpu-v5e'), ('thread_name', 'compute'), ('thread_name', 'rows')]
    >>> [(event["name"].partition(" at ")[0], event["tid"]) for event in events if event["ph"] == "X"]
    [('einsum [batch hidden]', 0), ('all_reduce [batch hidden]', 1)]
    """
    program, machine = timeline.ledger.program, timeline.machine
    mesh = program.mesh
    lanes = list(dict.fromkeys([COMPUTE, *(event.lane for event in timeline.events)]))
    device = f"one of {mesh.size} devices of {machine.name}" if mesh.size > 1 else machine.name
    named = [_meta("process_name", 0, device), *(_meta("thread_name", i, lane) for i, lane in enumerate(lanes))]
    return {
        "traceEvents": [
            *named,
            *(_complete(event, lanes.index(event.lane), program) for event in _unrolled(timeline.events)),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"machine": str(machine), "mesh": str(mesh), "seconds": timeline.seconds},
    }


def _unrolled(events: Sequence[Event]) -> list[Event]:
    """The events, with the first trips of every loop: its first trip again, an interval later."""
    shown: list[Event] = []
    i = 0
    while i < len(events):
        event = events[i]
        end = next((j for j in range(i + 1, len(events)) if events[j].depth <= event.depth), len(events))
        shown.append(event)
        if isinstance(event.step, LoopStep):
            trip = _unrolled(events[i + 1 : end])
            interval = event.seconds / event.step.trips if event.step.trips else 0.0
            apart = all(each.start + each.seconds <= event.start + interval * (1 + 1e-6) for each in trip)
            for number in range(min(event.step.trips, TRIPS if apart else 1)):  # trips that overlap are shown once
                shown += [each._replace(start=each.start + number * interval) for each in trip]
            i = end
        else:
            i += 1
    return shown


def _meta(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": thread, "args": {"name": name}}


def _complete(event: Event, thread: int, program: Program) -> dict[str, Any]:
    """One event with the details shown on click."""
    lines = event.lines
    writes = event.step.writes
    args: dict[str, Any] = {
        "where": str(event.where),
        "results": " ".join(program.show(v) for v in writes[:4]),
        "backward": any(line.backward for line in lines),
        "trips": event.trips,
        "flops": sum(line.flops for line in lines),
        "hbm_bytes": sum(line.hbm_bytes for line in lines),
        "operations": " ".join(line.op for line in lines),
    }
    for record in (line.collective for line in lines):
        if record is not None:
            args |= {
                "axes": list(record.axes), "dtype": record.dtype.name, "bytes": record.bytes,
                "wire_bytes": record.wire_bytes, "cause": str(record.cause), "tensor": record.name,
            }  # fmt: skip
    dims = f" [{' '.join(d.name for d in writes[0].dims)}]" if writes and not isinstance(event.step, LoopStep) else ""
    return {
        "ph": "X",
        "name": f"{event.name}{dims} at {event.where}",
        "cat": event.lane if event.lane == COMPUTE else "communication",
        "pid": 0,
        "tid": thread,
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": args,
    }
