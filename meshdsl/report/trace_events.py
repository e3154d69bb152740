"""A timeline as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each lane is a named thread; each instruction is a complete event ("ph": "X") in microseconds. A loop is one event
that contains the events of its first trip; `trips` is how often they run.
"""

from __future__ import annotations

from typing import Any

from ..cost.lanes import COMPUTE, Event
from ..cost.timeline import Timeline

__all__ = ["trace_events"]


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace as an object to write as JSON.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> report = step.cost(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32"), machine="tpu-v5e")
    >>> events = trace_events(report.timeline)["traceEvents"]
    >>> [(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    [('process_name', 'one of 4 devices of tpu-v5e'), ('thread_name', 'compute'), ('thread_name', 'rows')]
    >>> [(event["name"], event["tid"]) for event in events if event["ph"] == "X"]
    [('einsum', 0), ('all_reduce', 1)]
    """
    mesh, machine = timeline.ledger.program.mesh, timeline.machine
    lanes = list(dict.fromkeys([COMPUTE, *(event.lane for event in timeline.events)]))
    device = f"one of {mesh.size} devices of {machine.name}" if mesh.size > 1 else machine.name
    named = [_meta("process_name", 0, device), *(_meta("thread_name", i, lane) for i, lane in enumerate(lanes))]
    return {
        "traceEvents": [*named, *(_complete(event, lanes.index(event.lane)) for event in timeline.events)],
        "displayTimeUnit": "ms",
        "otherData": {"machine": str(machine), "mesh": str(mesh), "seconds": timeline.seconds},
    }


def _meta(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": thread, "args": {"name": name}}


def _complete(event: Event, thread: int) -> dict[str, Any]:
    """One event with the details shown on click."""
    lines = event.lines
    args: dict[str, Any] = {
        "where": str(event.where),
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
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane if event.lane == COMPUTE else "communication",
        "pid": 0,
        "tid": thread,
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": args,
    }
