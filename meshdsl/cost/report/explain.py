"""Explain why a collective is needed, what one dim costs, and which single change of the layout removes either.

A `LayoutEdit` changes the axes of one dim. It is compiled and costed like the layout itself; an illegal one records the
reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...dims import Dim
from ...errors import LayoutError, MeshdslError, nearest
from ...errors.tables import cut, line_of, table, wrapped
from ...errors.units import percent, seconds, show_bytes
from ...ir import walk
from ...layouts import Layout
from ...layouts.sharding import Axes
from ...lowering import Program
from ..comm_groups import dims_of
from ..ledger import Line
from .compare import signed_bytes, signed_percent
from .report import Report
from .schema import plain
from .show import sent_table


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


@dataclass(frozen=True, eq=False, repr=False)
class LayoutEdit:
    """A change of one dim's mesh axes, and the cost of the layout before and after it."""

    dim: str
    before: Axes
    after: Axes
    base: Report
    report: Report | None  # None if the edit is illegal
    reason: str = ""

    def __str__(self) -> str:
        to = ",".join(self.after)
        if not to:
            return f"split {self.dim} no more (now {','.join(self.before)})"
        return f"map {self.dim} to {to}" + (f" instead of {','.join(self.before)}" if self.before else "")

    def __repr__(self) -> str:
        return f"<LayoutEdit: {self}: {self.effect}>"

    @property
    def effect(self) -> str:
        """Effect on time and memory: "-12 % time, +3.00 GB"."""
        if self.report is None:
            return f"illegal: {reason_of(self)}"
        memory = signed_bytes(self.base, self.report)
        fits = "" if self.report.fits else ", does not fit"
        return f"{signed_percent(self.report.seconds, self.base.seconds)} time, {memory}{fits}"

    @property
    def rank(self) -> tuple[int, float, float]:
        """Sort key, best first: edits that fit, by time and memory; then edits that don't fit; then illegal edits."""
        if self.report is None:
            return 2, 0.0, 0.0
        return int(not self.report.fits), self.report.seconds, self.report.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        report = self.report
        figures: dict[str, Any] = {"legal": report is not None, "reason": self.reason}
        if report is not None:
            figures |= {"seconds": report.seconds, "peak_bytes": report.peak_bytes, "fits": report.fits}
        return plain({"dim": self.dim, "before": self.before, "after": self.after, **figures})


def options(report: Report) -> list[Axes]:
    """Axes that a dim may be mapped to: none, or any set of axes with more than one device, in mesh order."""
    axes = [axis for axis, n in report.mesh.axes.items() if n > 1]
    return [subset for n in range(len(axes) + 1) for subset in itertools.combinations(axes, n)]


def dims(report: Report) -> list[str]:
    """The dims that a layout can name, in program order, without private ones and dims of size 1."""
    names = dict.fromkeys(d.name for d in dims_of_values(report) if d.size > 1 and "__" not in d.name)
    rules = report.layout.rules if report.layout is not None else {}
    return list(dict.fromkeys([*rules, *names]))


def dims_of_values(report: Report) -> Iterator[Dim]:
    """The dims of every value, in program order; most several times."""
    values = (v for eqn, _ in walk(report.program) for v in (*eqn.ins, *eqn.outs))
    return (d for v in (*report.program.ins, *values) for d in v.dims)


def layout_edits(
    report: Report,
    recost: Callable[[Layout], Report],
    among: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[LayoutEdit]:
    """Every change of one dim's axes, best first. `recost` returns the report of another layout."""
    layout = report.layout or Layout()
    rules = {dim: axes for dim, axes in layout.on(report.mesh).rules.items() if axes}
    candidates = [
        (dim, after)
        for dim in (dims(report) if among is None else among)
        for after in options(report)
        if after != rules.get(dim, ())
    ]
    edits: list[LayoutEdit] = []
    for done, (dim, after) in enumerate(candidates):
        progress(done, len(candidates))
        changed = Layout({d: axes for d, axes in {**rules, dim: after}.items() if axes}, overrides=layout.overrides)
        try:
            other, reason = recost(changed), ""
        except LayoutError as error:
            other, reason = None, str(error)
        edits.append(LayoutEdit(dim, rules.get(dim, ()), after, report, other, reason))
    progress(len(candidates), len(candidates))
    return sorted(edits, key=lambda edit: edit.rank)


def edits_text(edits: Sequence[LayoutEdit], top: int = 12) -> str:
    """Text of the edits, ranked; illegal edits are listed with their reasons."""
    if not edits:
        return "there is nowhere else to map it"
    base = edits[0].base
    legal = [edit for edit in edits if edit.report is not None]
    idle = [edit for edit in legal if _is_idle(edit)]
    useful = [edit for edit in legal if not _is_idle(edit)]
    illegal = [edit for edit in edits if edit.report is None]
    lines = [f"one dim elsewhere, the rest as it is (now {seconds(base.seconds)}, peak {show_bytes(base.peak_bytes)})"]
    if useful:
        rows = [[str(edit), *_figures(edit)] for edit in useful[:top]]
        lines.append(table(["move", "time", "step", "memory", "peak"], rows, "<>>>>", shrink=0))
    if any(edit.report is not None and not edit.report.fits for edit in useful[:top]):
        lines.append("  ! more than a device has")
    lines += _rest(useful, top)
    if idle:
        lines.append(cut(f"  without effect: {'; '.join(map(str, idle))}", 100))
    if illegal:
        rows = [[str(edit), reason_of(edit)] for edit in illegal[:top]]
        lines.append("\n" + table(["illegal", "why"], rows, "<<"))
    return "\n".join([*lines, *_rest(illegal, top)])


def _rest(edits: Sequence[LayoutEdit], top: int) -> list[str]:
    return [f"  and {len(edits) - top} more"] if edits[top:] else []


def _figures(edit: LayoutEdit) -> list[str]:
    report = edit.report
    assert report is not None
    return [
        signed_percent(report.seconds, edit.base.seconds),
        seconds(report.seconds),
        signed_bytes(edit.base, report),
        show_bytes(report.peak_bytes) + ("" if report.fits else " !"),
    ]


def reason_of(edit: LayoutEdit) -> str:
    """The conflict, shortened from the error text; for any other error, its first line."""
    lines = [line.strip() for line in edit.reason.splitlines() if line.strip()]
    for line in lines:
        what, maps, rest = line.partition("; the layout maps ")
        if maps:
            return f"{rest.partition(',')[0]}, and both are in {what.partition(' has shape ')[0]}"
    return lines[0] if lines else ""


def _is_idle(edit: LayoutEdit) -> bool:
    report = edit.report
    return report is not None and (report.seconds, report.peak_bytes) == (edit.base.seconds, edit.base.peak_bytes)
