"""A program as the list of what its picture shows: collectives, runs of local operations, loops and branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..ir import Cond, Eqn, Graph, Op, Scan, While
from ..lowering import Program
from ..lowering.program import CollectiveRecord

__all__ = ["Compute", "Enter", "Leave", "Send", "Step", "steps"]

NAMES = 5  # operations that a line of local work names


@dataclass(frozen=True)
class Compute:
    """Operations between two collectives."""

    eqns: tuple[Eqn, ...]
    depth: int

    @property
    def words(self) -> str:
        """The operations that occur most, with their numbers."""
        counts = Counter(str(eqn.op) for eqn in self.eqns)
        most = sorted(counts, key=lambda name: -counts[name])[:NAMES]
        named = [f"{name} ×{counts[name]}" if counts[name] > 1 else name for name in counts if name in most]
        rest = sum(count for name, count in counts.items() if name not in most)
        return ", ".join(named) + (f" and {rest} more" if rest else "")


@dataclass(frozen=True)
class Send:
    """A collective that sends data."""

    eqn: Eqn
    record: CollectiveRecord
    depth: int


@dataclass(frozen=True)
class Enter:
    """The start of a loop's body or of a branch."""

    words: str
    depth: int


@dataclass(frozen=True)
class Leave:
    """The end of a loop's body or of a branch."""

    depth: int


Step = Compute | Send | Enter | Leave


def steps(program: Program, graph: Graph | None = None, depth: int = 0, trips: int = 1) -> Iterator[Step]:
    """The steps in program order; a loop or branch that sends nothing counts as one operation."""
    waiting: list[Eqn] = []
    for eqn in (graph or program).eqns:
        inner = [(key, sub) for key, sub in eqn.graphs().items() if sends(sub)]
        if not eqn.sends and not inner:
            if not (isinstance(eqn.op, Op) and eqn.op.literal):
                waiting.append(eqn)
            continue
        if waiting:
            yield Compute(tuple(waiting), depth)
            waiting = []
        if eqn.sends:
            yield Send(eqn, program.record(eqn, trips), depth)
        for key, sub in inner:
            yield Enter(_title(eqn, key), depth)
            yield from steps(program, sub, depth + 1, trips * eqn.trips)
            yield Leave(depth)
    if waiting:
        yield Compute(tuple(waiting), depth)


def sends(graph: Graph) -> bool:
    """Whether anything in the graph sends data."""
    return any(eqn.sends or any(map(sends, eqn.graphs().values())) for eqn in graph.eqns)


def _title(eqn: Eqn, key: str) -> str:
    match eqn.control:
        case Scan():
            return f"for each of {eqn.control.dim}{', backwards' if eqn.control.reverse else ''}"
        case While():
            return "while" if key == "body" else "test of a while loop"
        case Cond():
            return "if so" if key == "yes" else "otherwise"
        case _:
            return str(eqn.op)
