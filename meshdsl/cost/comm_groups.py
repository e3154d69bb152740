"""What a program sends, by the dims that cause it: the groups that a report lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..lowering.program import CollectiveRecord
from ..units import show_bytes
from .ledger import Line
from .timeline import Cost

__all__ = ["CommGroup", "dims_of", "record_of"]


@dataclass(frozen=True, eq=False)
class CommGroup:
    """The collectives of one kind that one or several dims cause over some mesh axes."""

    kind: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    costs: tuple[Cost, ...]

    @property
    def count(self) -> int:
        """How many run in one step."""
        return sum(cost.line.trips for cost in self.costs)

    @property
    def bytes(self) -> int:
        """The larger of one device's operand and result, summed over all that run."""
        return sum(record_of(cost.line).bytes * cost.line.trips for cost in self.costs)

    @property
    def wire_bytes(self) -> int:
        """What one device sends."""
        return sum(record_of(cost.line).wire_bytes * cost.line.trips for cost in self.costs)

    @property
    def seconds(self) -> float:
        """From start to end, hidden behind compute or not."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def exposed(self) -> float:
        """The part in which nothing is computed."""
        return sum(cost.exposed for cost in self.costs)

    @property
    def label(self) -> str:
        """The dims, or the cause of what no dim causes: "sum carried by the loop"."""
        return " ".join(self.dims) or str(self.costs[0].line.cause)

    @property
    def sizes(self) -> str:
        """The bytes of each: "1.05 MB", or the least and the greatest; "at most" so many of a ragged exchange."""
        each = sorted({(record.bytes, record.size) for record in (record_of(cost.line) for cost in self.costs)})
        return each[0][1] if len(each) == 1 else f"{each[0][1]} to {show_bytes(each[-1][0])}"

    def __str__(self) -> str:
        what = f"{self.count} {self.kind}{'s' if self.count != 1 else ''}"
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
    """The dims that a collective is there for: those of its cause, or else those that it regroups."""
    op = line.eqn.op
    own = [name for name in (getattr(op, "dim", ""), getattr(op, "to", "")) if name]
    return line.cause.about or tuple(dict.fromkeys(own))


def record_of(line: Line) -> CollectiveRecord:
    """What a collective's line sends. Requires that it is one."""
    assert line.collective is not None
    return line.collective
