"""Explain why a collective is needed, what one dim costs, and which single change of the layout removes either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import MeshdslError, nearest
from ...errors.units import percent, seconds, show_bytes
from ...layouts import Layout
from ...lowering import Program
from ..comm_groups import dims_of
from ..ledger import Line
from .layout_edits import LayoutEdit, dims, dims_of_values, edits_text
from .report import Report
from .schema import plain
from .show import sent_table
from .tables import line_of, table, wrapped


def collective_totals(program: Program) -> list[dict[str, Any]]:
    """The collectives of a program by kind, axes and dtype: counts and bytes per device, with loop trips included."""
    rows: dict[tuple[str, tuple[str, ...], str], dict[str, Any]] = {}
    for record in program.collectives:
        kind, axes, dtype = record.kind, record.axes, record.dtype.name
        fresh = {"kind": kind, "axes": list(axes), "dtype": dtype, "count": 0, "bytes": 0, "wire_bytes": 0}
        row = rows.setdefault((kind, axes, dtype), fresh)
        row["count"] += record.count
        row["bytes"] += record.count * record.bytes
        row["wire_bytes"] += record.count * record.wire_bytes
    return [rows[key] for key in sorted(rows)]


def totals_table(program: Program) -> str:
    """`collective_totals` as a table, with the total."""
    rows = collective_totals(program)
    if not rows:
        return "none"
    total = {key: sum(row[key] for row in rows) for key in ("count", "bytes", "wire_bytes")}
    rows.append({"kind": "total", "axes": [], "dtype": "", **total})
    header = ["kind", "axes", "dtype", "count", "bytes", "sent by a device"]
    return table(header, [
        [row["kind"], ",".join(row["axes"]), row["dtype"], round(row["count"], 4), show_bytes(row["bytes"]),
         show_bytes(row["wire_bytes"])]
        for row in rows
    ], "<<<>>>", indent=0)  # fmt: skip


class ExplainError(MeshdslError):
    """The requested collective or dim is not in the program."""

    exit_code = 2


def find(report: Report, query: str) -> list[int]:
    """The numbers of the requested collectives; `query` is a number, or `file.py:77` with the path or its end.

    Raises `ExplainError` if there is no such collective, and lists those of the program.
    """
    sends = report.sends
    if query.isdigit():
        numbers = [int(query)] if int(query) < len(sends) else []
    else:
        numbers = [i for i, cost in enumerate(sends) if _is_at(str(cost.line.where), query)]
    if not numbers:
        lines = list(dict.fromkeys(str(cost.line.where) for cost in sends))
        listing = f"{len(sends)} collectives, from 0 to {len(sends) - 1}, at {', '.join(lines)}" if sends else "none"
        raise ExplainError(
            f"there is no collective {query!r}; one is asked for by its number or by a line such as "
            f"{lines[0] if lines else 'model.py:7'}\n  there are {listing}"
        )
    return numbers


def dims_behind(report: Report, numbers: Sequence[int]) -> list[str]:
    """The dims that may affect these collectives: those that cause them, and those split over their axes."""
    lines = [report.sends[number].line for number in numbers]
    axes = {axis for line in lines if line.collective is not None for axis in line.collective.axes}
    rules = report.layout.rules if report.layout is not None else {}
    split = [dim for dim, dim_axes in rules.items() if axes.intersection(dim_axes)]
    program_dims = dims(report)
    return [
        dim
        for dim in dict.fromkeys([*(name for line in lines for name in dims_of(line)), *split])
        if dim in program_dims
    ]


def check_dim(report: Report, name: str) -> str:
    """Return the dim; raises `ExplainError` if the program has no dim of this name."""
    program_dims = dims(report)
    if name not in program_dims:
        raise ExplainError(f"the program has no dim {name!r} to explain; {nearest(name, program_dims)}")
    return name


def _is_at(where: str, query: str) -> bool:
    return where == query or where.endswith("/" + query)


def collective_text(report: Report, number: int, edits: Sequence[LayoutEdit]) -> str:
    """Text about one collective: its source line, reason and cost, and the single edits that remove it."""
    cost = report.sends[number]
    line, record = cost.line, cost.line.record
    times = f"{round(line.trips, 4)} times a step" if line.trips != 1 else "once a step"
    each = cost.seconds / line.trips if line.trips else 0.0
    hidden = cost.seconds - cost.exposed
    most = "at most " if record.op.at_most else ""
    rows = [
        ("asked for by", f"{line_of(line.where, 60)}  {line.where.source()}"[:82].rstrip()),
        ("pass", "backward" if line.backward else "forward"),
        ("cause", str(line.cause) or "(none given)"),
        ("because", _because(report, line)),
        ("time", f"{seconds(each)} each, {seconds(cost.seconds)} a step, {seconds(hidden)} of it hidden: "
                 f"{percent(cost.exposed, report.seconds)} of the step"),
        ("sends", f"{most}{show_bytes(record.wire_bytes)} each from every {report.machine.device}, "
                  f"along {_lanes(report, record.axes)}"),
    ]  # fmt: skip
    title = f"collective {number}: {record.op} of {record.size} in {record.dtype.name}, {times}"
    lines = [title, *(wrapped(text.split(" "), f"  {name:<13} ", 16) for name, text in rows)]
    removing = [edit for edit in edits if removes(edit, line)]
    lines += ["", *_removed_by(report, line, removing)]
    return "\n".join(lines)


def _lanes(report: Report, axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} ({report.program.mesh.axes[axis]} devices)" for axis in axes)


def _because(report: Report, line: Line) -> str:
    """The cause as a sentence, with the axes and dims involved."""
    record = line.record
    layout, names, axes = report.layout or Layout(), dims_of(line), ",".join(record.axes)
    split = [f"{name} over {','.join(layout.axes(name))}" for name in names if layout.axes(name)]
    intro = f"the layout splits {' and '.join(split)}; " if split else ""
    words = {
        "all_reduce": f"each device has only its part of the result, and all along {axes} need the whole",
        "reduce_scatter": f"each device has only its part of the sum, and keeps one block of it along {axes}",
        "all_gather": f"each device along {axes} has a block, and what follows needs all of it",
        "all_to_all": f"what was split over {axes} along one dim is needed split along another",
        "ragged_all_to_all": f"what was split over {axes} along one dim is needed split along another; of its slots "
        "those that are filled are sent, and the time is of those expected to be",
        "permute": f"a device needs blocks that another along {axes} has",
    }
    return intro + words.get(record.kind, f"devices along {axes} exchange blocks")


def removes(edit: LayoutEdit, line: Line) -> bool:
    """True if an edit is legal and leaves no collective with this line's source line, pass and dims."""
    if edit.report is None:
        return False
    key = (line.where, line.backward, dims_of(line))
    return all(key != (c.line.where, c.line.backward, dims_of(c.line)) for c in edit.report.sends)


def _removed_by(report: Report, line: Line, removing: Sequence[LayoutEdit]) -> Iterator[str]:
    what = " ".join(dims_of(line)) or "it"
    if not removing:
        yield f"no single move removes what {what} asks for at this line"
        return
    yield "one dim elsewhere that removes it, the rest of the layout as it is"
    rows = [[str(edit), edit.effect] for edit in removing[:6]]
    yield table(["move", "effect"], rows, "<<", shrink=0)


def dim_text(report: Report, name: str, edits: Sequence[LayoutEdit]) -> str:
    """Text about one dim: its axes, the arguments with it, the collectives it causes, and possible other axes."""
    layout = report.layout or Layout()
    axes = layout.axes(name)
    size = next((d.size for d in dims_of_values(report) if d.name == name), 0)
    split = f"split over {','.join(axes)} ({size} / {report.mesh.count(axes)})" if axes else "not split"
    having = [v for v in report.program.ins if any(d.name == name for d in v.dims)]
    stored = sum(map(report.program.local_bytes, having))
    stages = {each.stage for each in report.program.schedules if each.layer == name}
    sends = [group for group in report.collectives if not stages.union([name]).isdisjoint(group.dims)]
    share = sum(group.exposed for group in sends)
    lines = [
        f"{name} = {size}, {split}",
        f"  arguments that have it: {len(having)}, {show_bytes(stored)} on each {report.machine.device}",
        f"  what it sends: {percent(share, report.seconds)} of the step, {seconds(share)} exposed",
    ]
    if sends:
        lines += ["", sent_table(report, sends)]
    return "\n".join([*lines, "", edits_text(edits)])


def binding_text(report: Report) -> str:
    """The limiting resource, as a sentence."""
    if not report.fits:
        return f"bound by memory: {show_bytes(report.peak_bytes - report.limit)} more than a device has"
    share = percent(report.waits.get(report.constraint, 0.0), report.seconds)
    room = percent(report.peak_bytes, report.limit)
    return f"bound by {report.constraint}: {share} of the step waits for it; memory is {room} full"


def to_dict(report: Report, numbers: Sequence[int], edits: Sequence[LayoutEdit]) -> dict[str, Any]:
    """The explanation, as plain values for JSON."""
    lines = [(number, report.sends[number]) for number in numbers]
    return plain(
        {
            "constraint": report.constraint,
            "seconds": report.seconds,
            "peak_bytes": report.peak_bytes,
            "collectives": [
                {
                    **cost.line.to_dict(),
                    "number": number,
                    "dims": dims_of(cost.line),
                    "seconds": cost.seconds,
                    "exposed": cost.exposed,
                    "removed_by": [edit.to_dict() for edit in edits if removes(edit, cost.line)],
                }
                for number, cost in lines
            ],
            "moves": [edit.to_dict() for edit in edits],
        }
    )
