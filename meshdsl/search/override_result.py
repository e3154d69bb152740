"""The result of an override search: the overrides, the cost of their program, and the error of the predicted sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cost.machine import Machine
from ..cost.report.schema import plain
from ..cost.report.tables import table
from ..errors.markup import titled
from ..errors.units import seconds, show_bytes
from ..layouts.sharding import Axes
from .evaluate import Entry
from .result import heading

__all__ = ["OverrideCounts", "OverrideResult"]


@dataclass(frozen=True)
class OverrideCounts:
    """Counts of the choices and programs in an override search."""

    tensors: int
    choices: int  # of all tensors, besides no override
    left_out: int  # legal choices that were costed alone and then dropped
    illegal: int  # illegal when applied alone
    pairs: int  # pairs of interacting tensors whose choices together don't cost the sum
    width: int  # elimination width
    programs: int  # partitioned and costed

    def __str__(self) -> str:
        left = f", {self.left_out} more left out" if self.left_out else ""
        illegal = f", {self.illegal} illegal" if self.illegal else ""
        return (
            f"{self.choices} choices of {self.tensors} tensors{left}{illegal}; {self.pairs} pairs interact "
            f"(width {self.width}); {self.programs} programs costed"
        )


@dataclass(frozen=True, eq=False)
class OverrideResult:
    """The best overrides of a layout. `print(found)` shows them; pass `best.layout` to `md.compile`.

    `predicted`, `predicted_bytes`, `bound` and `gap` come from the tables: the predicted cost of their best choice, and
    a lower bound for all their choices within the limit. `chosen` is the real cost of that choice's program, None if
    the program is illegal. `best` is the best of all programs that were costed and fit.
    """

    title: str
    machine: Machine
    objective: str
    limit: float
    before: Entry  # the layout as given
    best: Entry
    overrides: Mapping[str, Mapping[str, Axes]]  # the overrides that `best` adds, by pattern
    chosen: Entry | None
    predicted: float
    predicted_bytes: float
    bound: float
    counts: OverrideCounts
    seconds: float  # duration of the search

    @property
    def gap(self) -> float:
        """The largest possible distance from the best choice within the limit, as a fraction of the tables' bound."""
        return (self.predicted - self.bound) / self.bound if self.bound else 0.0

    @property
    def error(self) -> float | None:
        """Error of the predicted sum, as a fraction of the program's cost; None without a legal program."""
        real = None if self.chosen is None else getattr(self.chosen, self.objective)
        return (self.predicted - real) / real if real else None

    @property
    def source(self) -> str:
        """Origin of `best`: "chosen", "measured" (a program of the tables or of a later round), or "kept"."""
        return "kept" if self.best is self.before else "chosen" if self.best is self.chosen else "measured"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain(
            {
                **heading(self),
                "before": self.before.to_dict(),
                "best": self.best.to_dict(),
                "overrides": {p: {d: list(axes) for d, axes in rules.items()} for p, rules in self.overrides.items()},
                "source": self.source,
                "chosen": None if self.chosen is None else self.chosen.to_dict(),
                "predicted": self.predicted,
                "predicted_bytes": self.predicted_bytes,
                "bound": self.bound,
                "gap": self.gap,
                "error": self.error,
                "counts": vars(self.counts),
                "search_seconds": self.seconds,
            }
        )

    def __repr__(self) -> str:
        return f"<{self.title or 'search'} on {self.machine.name}: {len(self.overrides)} overrides, {self.source}>"

    def _repr_html_(self) -> str:
        return titled(str(self), self.before.mesh.axes)

    def __str__(self) -> str:
        before, best = self.before, self.best
        parts = [
            f"{self.title or 'search'} on {self.machine.name}: the best overrides by {self.objective}\n"
            f"  mesh    {before.mesh}\n  layout  {before.layout or '(everything replicated)'}",
            table(
                ("", "time", "", "memory", "sent"),
                [_row("the layout", before, before), _row("with overrides", best, before)],
                "<>>>>",
            ),
            self._rules(),
            f"tables: {self.counts}, {seconds(self.seconds)}\n  {self._sum()}",
        ]
        return "\n\n".join(parts)

    def _rules(self) -> str:
        if not self.overrides:
            return "no override is better: the layout is kept as it is"
        rows = [
            (pattern, " ".join(f"{dim}:{','.join(axes)}" for dim, axes in rules.items()))
            for pattern, rules in self.overrides.items()
        ]
        return table(("override", "rules"), rows, "<<")

    def _sum(self) -> str:
        said = (
            f"exact over the tables: {self._amount(self.predicted)} in {show_bytes(round(self.predicted_bytes))}, "
            f"bound {self._amount(self.bound)}, gap {self.gap:.2%}"
        )
        if self.chosen is None:
            return f"{said}\n  the program of that choice is illegal: overrides that do not meet in pairs clash"
        real = self._amount(getattr(self.chosen, self.objective))
        off = "" if self.error is None else f": the sum was {self.error:+.2%} off"
        over = "" if self.chosen.fits else ", over the limit"
        said += f"\n  its program costs {real} in {show_bytes(self.chosen.peak_bytes)}{over}{off}"
        if self.source == "measured":
            said += "\n  not taken: another program that was costed is better, or fits"
        return said + (
            "\n  not taken: the layout itself is better" if self.best is self.before is not self.chosen else ""
        )

    def _amount(self, n: float) -> str:
        return seconds(n) if self.objective == "seconds" else show_bytes(round(n))


def _row(name: str, entry: Entry, before: Entry) -> tuple[str, ...]:
    change = f"{entry.seconds / before.seconds - 1:+.1%}" if before.seconds and entry is not before else ""
    memory = show_bytes(entry.peak_bytes) + ("" if entry.fits else " !")
    return (name, seconds(entry.seconds), change, memory, show_bytes(entry.wire_bytes))
