"""The effect of single layout edits: a `LayoutEdit` changes the axes of one dim.

Each edit is compiled and costed like the layout itself; an illegal edit records the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dims import Dim
from ...errors import LayoutError
from ...errors.units import seconds, show_bytes
from ...ir import walk
from ...layouts import Layout
from ...layouts.sharding import Axes
from .differences import signed_bytes, signed_percent
from .report import Report
from .schema import plain
from .tables import cut, table


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
        changed = Layout({**rules, dim: after} if after else _without(rules, dim), overrides=layout.overrides)
        try:
            other, reason = recost(changed), ""
        except LayoutError as error:
            other, reason = None, str(error)
        edits.append(LayoutEdit(dim, rules.get(dim, ()), after, report, other, reason))
    progress(len(candidates), len(candidates))
    return sorted(edits, key=lambda edit: edit.rank)


def _without(rules: Mapping[str, Axes], dim: str) -> dict[str, Axes]:
    return {name: axes for name, axes in rules.items() if name != dim}


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
