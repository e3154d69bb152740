"""The text of a report: whether it fits, the time of a step and its parts, and the parts of the memory peak."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import Where
from ...errors.tables import WIDTH, bar, cut, grouped, line_of, table, wrapped
from ...errors.units import number, percent, seconds, show_bytes
from ...passes.pipelines import Schedule
from ..comm_groups import CommGroup
from ..ledger import Line
from ..padding import SHOWN
from ..timeline import Cost
from .report import Report

PART_TITLES = {
    "products": "matrix products, convolutions",
    "elementwise": "elementwise, reductions",
    "moves": "moving data on the device",
    "exposed communication": "communication, exposed",
}


def analysis(report: Report, *, top: int = 8) -> str:
    """All sections of the text about one layout, with at most `top` lines in each list."""
    sections = [summary(report), where_time_goes(report)]
    if report.collectives:
        sections.append(collectives(report, top))
    sections += [memory(report, top), instructions(report, top)]
    return "\n\n".join(sections)


def heading(report: Report) -> str:
    """The title, mesh, machine and layout."""
    n, machine = report.mesh.size, report.machine
    devices = f"{n} {machine.device}{'s' if n != 1 else ''}"
    title = f"{report.title} on " if report.title else ""
    where = f"{report.mesh or 'one device'} ({devices}, {machine.title})"
    lines = [wrapped(where.split(), title, 2)]
    if report.layout is not None:
        rules = str(report.layout).split() or ["nothing is split"]
        lines.append(wrapped(rules, "layout ", 7))
    return "\n".join(lines)


_EAGER = (
    "the times are those of PyTorch, which launches one operation at a time; XLA runs the programs of this library, "
    "and the machine without the mode eager has its times"
)


def summary(report: Report) -> str:
    """The main results, one line each."""
    low, high = report.interval
    device = report.machine.device
    verdict = "fits" if report.fits else "DOES NOT FIT"
    room = f"peak {show_bytes(report.peak_bytes)} of {show_bytes(report.limit)} on each {device}"
    first = next(iter(report.waits), "")
    binding = f"{first}, {percent(report.waits[first], report.seconds)} of the step" if first else "nothing"
    if not report.fits:
        binding = f"memory: {show_bytes(report.peak_bytes - report.limit)} too much; then {binding}"
    work = f"{number(report.flops, 'FLOP')}, {show_bytes(report.hbm_bytes)} of memory traffic"
    most = "at most " if any(record.op.at_most for record in report.program.collectives) else ""
    rows = [
        *([("note", _EAGER)] if report.machine.operation else []),
        ("memory", f"{verdict}: {room}  {_gauge(report.peak_bytes, report.limit)}"),
        (
            "step",
            f"{seconds(report.seconds)} estimated; {seconds(low)} to {seconds(high)} likely, "
            f"at least {seconds(report.lower_bound)}",
        ),
        (
            "work",
            f"{work} on each {device}: {percent(report.utilisation, 1)} of the peak",
        ),
        *(("padding", each.text(report.flops)) for each in report.padding if each.flops >= SHOWN * report.flops),
        *([("rate", _rate(report))] if report.rates else []),
        ("sends", f"{most}{show_bytes(report.wire_bytes)} from each {device}; {_hidden(report)}"),
        *(("bubble", _bubble(each)) for each in report.program.schedules),
        ("bound by", binding),
        *(("note", note) for note in _notes(report)),
    ]
    return heading(report) + "\n\n" + "\n".join(wrapped(text.split(" "), f"  {name:<9} ", 12) for name, text in rows)


def _bubble(schedule: Schedule) -> str:
    """The part of a pipeline's ticks in which a stage computes nothing of use."""
    stages, microbatches, chunks = schedule.stages, schedule.microbatches, schedule.chunks
    share = f"{percent(schedule.bubble, 1)} of the time of the {stages} pipeline stages"
    return f"{share}: {stages - 1} of {microbatches * chunks + stages - 1} ticks, with {microbatches} micro-batches" + (
        f" and {chunks} chunks of each stage" if chunks > 1 else ""
    )


def _rate(report: Report) -> str:
    budget = f"; {report.budget}" if report.budget else ""
    return f"{report.rates}{budget}"


def _notes(report: Report) -> list[str]:
    """Notes on what the figures omit, and on how the mesh is placed."""
    notes = [*report.timeline.placement.notes]
    unknown = sum(line.unbounded for line in report.ledger.lines)
    if unknown:
        notes.append(f"{unknown} instructions are in while loops, whose trip counts are unknown: one trip is counted")
    profile = report.machine.profile
    if profile is not None:
        notes += [str(profile), str(report.coverage)]
        if profile.platform != report.machine.target.name:
            notes.append(f"the profile is of {profile.platform} devices, and {report.machine.name} has others")
    return notes


def _gauge(part: float, whole: float) -> str:
    filled = bar(part, whole, 20)
    return f"[{filled:<20}] {percent(part, whole)}"


def _hidden(report: Report) -> str:
    line = report.timeline
    if not line.communication:
        return "nothing is sent"
    equal = math.isclose(line.communication, line.exposed, rel_tol=1e-9)  # sums of the same times in other orders
    hidden = 0.0 if equal else max(line.communication - line.exposed, 0.0)
    return f"{percent(hidden, line.communication)} of {seconds(line.communication)} hidden behind compute"


def where_time_goes(report: Report) -> str:
    """The step by kind of instruction, and by limiting resource."""
    rows = [
        [PART_TITLES[name], seconds(t), percent(t, report.seconds), bar(t, report.seconds, 40)]
        for name, t in report.parts.items()
    ]
    waits = [[name, seconds(t), percent(t, report.seconds)] for name, t in report.waits.items()]
    return (
        "where the time goes\n"
        + table(["kind", "time", "step", ""], rows, "<>><")
        + "\n\n"
        + table(["waiting for", "time", "step"], waits, "<>>")
    )


def collectives(report: Report, top: int) -> str:
    """Collectives by dims and axes, then the lines of the model that cause them."""
    top_groups = report.collectives[:top]
    rest = report.collectives[top:]
    lines = [f"collectives of one step, on each {report.machine.device}", sent_table(report, top_groups)]
    if rest:
        share = percent(sum(group.exposed for group in rest), report.seconds)
        lines.append(f"  and {len(rest)} more, {share} of the step")
    lines.append("")
    rows = [row for group in top_groups[: max(3, top // 2)] for row in _causes(report, group)]
    lines.append(table(["no.", "asked for by", "pass", "each", "count", "step", "cause"], rows, "><<>>><"))
    return "\n".join(lines)


def sent_table(report: Report, sends: Sequence[CommGroup]) -> str:
    """One row for each group of collectives."""
    rows = [
        [
            group.label,
            ",".join(group.axes),
            group.kind,
            round(group.count, 4),
            group.sizes,
            seconds(group.seconds),
            seconds(group.exposed),
            percent(group.exposed, report.seconds),
        ]
        for group in sends
    ]
    return table(["dim", "axes", "kind", "count", "each", "time", "exposed", "step"], rows, "<<<>>>>>", shrink=0)


def _causes(report: Report, group: CommGroup) -> Iterator[list[object]]:
    """One row for each line of the model and cause, most exposed first, at most three; then one row for the rest."""

    def key(cost: Cost) -> tuple[Where, bool, str, str]:
        line, record = cost.line, cost.line.record
        each = show_bytes(record.bytes) + ("" if record.dtype.itemsize >= 4 else f" {_short(record.dtype)}")
        return line.where, line.backward, str(line.cause), each

    ranked = sorted(grouped(group.costs, key).items(), key=lambda item: -sum(cost.exposed for cost in item[1]))

    def row(costs: Sequence[Cost], cause: str, *words: object) -> list[object]:
        share = percent(sum(cost.exposed for cost in costs), report.seconds)
        return [*words, round(sum(cost.line.trips for cost in costs), 4), share, f"{cause} on {','.join(group.axes)}"]

    for (where, backward, cause, each), costs in ranked[:3]:
        first = report.sends.index(costs[0])
        number = f"{first}+" if len(costs) > 1 else first
        yield row(costs, cause, number, line_of(where), "bwd" if backward else "fwd", each)
    if len(ranked) > 3:
        others = [cost for _, costs in ranked[3:] for cost in costs]
        more = f"and {len(ranked) - 3} more line{'s' if len(ranked) > 4 else ''}"
        yield row(others, group.label, "", more, "", "")


SHORT = {"saved activations": "saved", "optimizer state": "optimizer", "collective buffers": "collective"}


def _short(dtype: np.dtype[Any]) -> str:
    """Short dtype names as in HLO: f32, bf16, s32, pred."""
    if dtype.kind == "b":
        return "pred"
    letters = dtype.name.rstrip("0123456789")
    return {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}.get(letters, letters) + dtype.name[len(letters) :]


def memory(report: Report, top: int) -> str:
    """The composition of the memory peak."""
    usage = report.memory
    where = f" ({line_of(usage.at.where)})" if usage.at.where.file else ""
    rows = [
        [name, show_bytes(n), percent(n, usage.peak), bar(n, usage.peak, 40)]
        for name, n in sorted(usage.by_category.items(), key=lambda item: -item[1])
        if n
    ]
    groups: dict[tuple[str, ...], list[int]] = {}
    for tensor in usage.by_tensor:
        stored = f"{_short(tensor.dtype)}[{'x'.join(map(str, tensor.shape))}]"
        made_by = line_of(tensor.where) or "argument"
        groups.setdefault((tensor.name, stored, SHORT.get(tensor.category, tensor.category), made_by), []).append(
            tensor.bytes
        )
    ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))[:top]
    tensors = [
        [name, len(sizes), stored, show_bytes(sum(sizes)), percent(sum(sizes), usage.peak), category, made_by]
        for (name, stored, category, made_by), sizes in ranked
    ]
    title = f"memory of one {report.machine.device} at the peak, in {usage.at.op}{where}"
    return (
        cut(title, WIDTH)
        + "\n"
        + table(["category", "bytes", "peak", ""], rows, "<>><")
        + "\n\n"
        + table(["tensor", "count", "stored", "bytes", "peak", "category", "made by"], tensors, "<><>><<", shrink=0)
    )


def instructions(report: Report, top: int) -> str:
    """The longest computations; equal instructions of one line of the model are combined."""
    computed = [cost for cost in report.timeline.costs if cost.line.collective is None]
    groups = grouped(computed, lambda cost: (cost.line.op, cost.line.where, cost.line.backward, _sizes(cost.line)))
    ranked = sorted(groups.items(), key=lambda item: -sum(cost.seconds for cost in item[1]))[:top]
    rows = [
        [
            op,
            "bwd" if backward else "fwd",
            line_of(where),
            round(sum(cost.line.trips for cost in costs), 4),
            seconds(sum(cost.seconds for cost in costs)),
            percent(sum(cost.seconds for cost in costs), report.seconds),
            number(sum(cost.line.flops * cost.line.trips for cost in costs)),
            show_bytes(sum(cost.line.hbm_bytes * cost.line.trips for cost in costs)),
            sizes,
        ]
        for (op, where, backward, sizes), costs in ranked
    ]
    header = ["operation", "pass", "line", "count", "time", "step", "FLOP", "traffic", "m.k.n"]
    return "the longest computations\n" + table(header, rows, "<<<>>>>><")


def _sizes(line: Line) -> str:
    """Sizes of `batch` products of [m, k] by [k, n]: "8 x 128.32.128"; "" for other lines."""
    if line.matmul is None:
        return ""
    batch = f"{line.matmul.batch} x " if line.matmul.batch > 1 else ""
    return f"{batch}{line.matmul.m}.{line.matmul.k}.{line.matmul.n}"
