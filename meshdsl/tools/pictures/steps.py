"""A program as the list of what its picture shows: collectives, runs of local operations, loops and branches."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...ir import Cond, Eqn, Graph, Op, Scan, While, walk
from ...lowering import Program
from ...lowering.program import CollectiveRecord

FOLD = 4  # as many alike collectives in a row are drawn as one
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
class SendMark:
    """A collective that sends data."""

    eqn: Eqn
    record: CollectiveRecord
    depth: int
    alike: tuple[CollectiveRecord, ...] = ()  # those that follow and exchange in the same way

    @property
    def key(self) -> tuple[object, ...] | None:
        """Equal keys: drawn as one; None: drawn alone, because the pairs of devices differ."""
        record = self.record
        if record.kind == "permute":
            return None
        return record.kind, record.axes, record.cause.kind, self.eqn.backward, self.depth


@dataclass(frozen=True)
class Enter:
    """The start of a loop's body or of a branch."""

    words: str
    depth: int


@dataclass(frozen=True)
class Leave:
    """The end of a loop's body or of a branch."""

    depth: int


Step = Compute | SendMark | Enter | Leave


def steps(program: Program, graph: Graph | None = None, depth: int = 0, trips: int = 1) -> Iterator[Step]:
    """The steps in program order; a loop or branch that sends nothing counts as one operation."""
    waiting: list[Eqn] = []
    for eqn in (graph or program).eqns:
        inner = [(key, sub) for key, sub in eqn.graphs().items() if any(each.sends for each, _ in walk(sub))]
        if not eqn.sends and not inner:
            if not (isinstance(eqn.op, Op) and eqn.op.literal):
                waiting.append(eqn)
            continue
        if waiting:
            yield Compute(tuple(waiting), depth)
            waiting = []
        if eqn.sends:
            yield SendMark(eqn, program.record(eqn, trips), depth)
        for key, sub in inner:
            yield Enter(program.ticks(eqn) or _title(eqn, key), depth)
            yield from steps(program, sub, depth + 1, trips * eqn.trips)
            yield Leave(depth)
    if waiting:
        yield Compute(tuple(waiting), depth)


def folded(items: list[Step]) -> list[Step]:
    """The same steps; `FOLD` or more alike collectives in a row are one, and the work between them follows it."""
    result: list[Step] = []
    at = 0
    while at < len(items):
        run = _run(items, at)
        members = [step for step in run if isinstance(step, SendMark)]
        if len(members) < FOLD:
            result.append(items[at])
            at += 1
            continue
        first = members[0]
        result.append(dataclasses.replace(first, alike=tuple(step.record for step in members[1:])))
        at += len(run)
        after = items[at : at + 1]
        work = [step for step in [*run, *after] if isinstance(step, Compute)]
        if work:
            result.append(Compute(tuple(eqn for step in work for eqn in step.eqns), first.depth))
        at += sum(isinstance(step, Compute) for step in after)
    return result


def _run(items: list[Step], at: int) -> list[Step]:
    """The longest run from here of alike collectives and the work between them; empty if none starts here."""
    first = items[at]
    if not isinstance(first, SendMark) or first.key is None:
        return []
    end = at + 1
    for i in range(at + 1, len(items)):
        step = items[i]
        if isinstance(step, SendMark) and step.key == first.key:
            end = i + 1
        elif not isinstance(step, Compute):
            break
    return items[at:end]


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
