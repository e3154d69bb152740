"""The communication of a program, grouped by the dims that cause it; reports list these groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors.units import show_bytes
from .ledger import Line
from .timeline import Cost


@dataclass(frozen=True, eq=False)
class CommGroup:
    """The collectives of one kind, over one set of mesh axes, that the same dims cause."""

    kind: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    costs: tuple[Cost, ...]

    @property
    def count(self) -> float:
        """Number of collectives that run in one step."""
        return sum(cost.line.trips for cost in self.costs)

    @property
    def bytes(self) -> int:
        """Bytes in one step: for each collective, the larger of one device's operand and result."""
        return round(sum(cost.line.record.bytes * cost.line.trips for cost in self.costs))

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one step."""
        return round(sum(cost.line.record.wire_bytes * cost.line.trips for cost in self.costs))

    @property
    def seconds(self) -> float:
        """Seconds from start to end in one step, including the time hidden behind compute."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return sum(cost.exposed for cost in self.costs)

    @property
    def label(self) -> str:
        """The dims; if no dim is the cause, the cause itself: "sum carried by the loop"."""
        return " ".join(self.dims) or str(self.costs[0].line.cause)

    @property
    def sizes(self) -> str:
        """Bytes of each collective: "1.05 MB", or smallest to largest; "at most ..." for a ragged exchange."""
        each = sorted({(record.bytes, record.size) for record in (cost.line.record for cost in self.costs)})
        return each[0][1] if len(each) == 1 else f"{each[0][1]} to {show_bytes(each[-1][0])}"

    def __str__(self) -> str:
        what = f"{round(self.count, 4)} {self.kind}{'s' if self.count != 1 else ''}"
        return f"{self.label} on {','.join(self.axes)}: {what} of {self.sizes}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "dims": list(self.dims),
            "count": self.count,
            "bytes": self.bytes,
            "wire_bytes": self.wire_bytes,
            "seconds": self.seconds,
            "exposed": self.exposed,
            "lines": [cost.line.index for cost in self.costs],
        }


def dims_of(line: Line) -> tuple[str, ...]:
    """The dims that a collective serves: the dims of its cause, or else the dims that its operation names."""
    op = line.eqn.op
    own = [name for name in (getattr(op, "dim", ""), getattr(op, "to", "")) if name]
    return line.cause.about or tuple(dict.fromkeys(own))
