"""What a device launches: kernels, collectives and loops, in the program's order.

A compiler does not store every value. It computes elementwise chains inside the kernel that reads them, and makes
constants and masks wherever they are read. `steps` is a model of that, from each operation's `fuses`: a value between
two equations of one kernel never reaches memory. Memory, traffic and time all read this one account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..ir import Eqn, Graph, Op, Var

__all__ = ["Branch", "Kernel", "Loop", "Send", "Step", "holders", "kind", "steps"]


@dataclass(frozen=True, eq=False)
class Kernel:
    """Equations that run as one. It reads and writes the stored values listed; the others stay in registers."""

    eqns: tuple[Eqn, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Send:
    """One collective."""

    eqn: Eqn
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan, or a while loop: of one whose trips nobody knows, `body` is one trip with its predicate."""

    eqn: Eqn
    body: tuple[Step, ...]
    trips: int
    unbounded: bool
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Branch:
    """A conditional: one of its arms runs."""

    eqn: Eqn
    arms: tuple[tuple[Step, ...], ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]


Step = Kernel | Send | Loop | Branch


def steps(graph: Graph) -> tuple[Step, ...]:
    """What one device launches, in order. Every equation that does something is in exactly one step.

    Values are named by what holds them: a view (`rename`, `reshape` of a block, ...) by the value it is a view of.
    """
    return tuple(_Fusion(graph).steps())


def holders(graph: Graph) -> dict[Var, Var]:
    """Of every view in a graph, the stored value that it is a view of."""
    source: dict[Var, Var] = {}
    for eqn in graph.eqns:
        if kind(eqn) == "view" and eqn.ins:
            source[eqn.outs[0]] = source.get(eqn.ins[0], eqn.ins[0])
    return source


class _Fusion:
    """Which values of one graph are stored, and which live inside the kernel of their reader."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.source = holders(graph)
        self.readers: dict[Var, list[Eqn]] = defaultdict(list)  # through views
        for eqn in graph.eqns:
            ins = dict.fromkeys(self.holder(v) for v in eqn.ins)
            if eqn.outs[0] not in self.source:
                for v in ins:
                    self.readers[v].append(eqn)
        self.results = {self.holder(v) for v in graph.outs}
        self.free: set[Var] = set()  # made of nothing that is stored: every reader makes it for itself
        self.inside: set[Var] = set()  # computed in the kernel of its only reader
        for eqn in graph.eqns:
            for v in eqn.outs:
                if v not in self.source and v not in self.results:
                    self.place(eqn, v)

    def holder(self, v: Var) -> Var:
        return self.source.get(v, v)

    def place(self, eqn: Eqn, v: Var) -> None:
        readers = self.readers[v]
        if kind(eqn) not in ("map", "pick", "view") or not all(takes_inside(r) for r in readers):
            return
        if all(self.holder(x) in self.free for x in eqn.ins):
            self.free.add(v)
        elif len(readers) == 1:
            self.inside.add(v)

    def steps(self) -> Iterator[Step]:
        waiting: dict[Var, list[Eqn]] = {}  # of a value that is not stored: the equations that make it
        for eqn in self.graph.eqns:
            if eqn.outs[0] in self.source:
                continue
            ins = tuple(dict.fromkeys(self.holder(v) for v in eqn.ins))
            parts = [*(part for v in ins for part in waiting.pop(v, [])), eqn]
            if any(v in self.free or v in self.inside for v in eqn.outs):
                waiting[eqn.outs[0]] = parts
            else:
                yield self.step(parts)

    def step(self, parts: list[Eqn]) -> Step:
        eqn = parts[-1]
        ins = dict.fromkeys(self.holder(v) for part in parts for v in part.ins)
        reads = tuple(v for v in ins if v not in self.free and v not in self.inside)
        writes = eqn.outs
        if not isinstance(eqn.op, Op) and eqn.op.name != "slice":
            return Send(eqn, reads, writes)
        if not isinstance(eqn.op, Op) or not eqn.op.control:
            return Kernel(tuple(parts), reads, writes)
        inner = tuple(steps(sub) for _, sub in eqn.graphs())
        if eqn.op.name == "cond":
            return Branch(eqn, inner, reads, writes)
        body = tuple(step for sub in inner for step in sub)
        return Loop(eqn, body, eqn.params.get("trips", 1), eqn.op.name == "while_loop", reads, writes)


def kind(eqn: Eqn) -> str:
    """The operation's `fuses`; a device's own slice of what it holds is a pick, other collectives stand alone."""
    if isinstance(eqn.op, Op):
        return eqn.op.fuses
    return "pick" if eqn.op.name == "slice" else ""


def takes_inside(eqn: Eqn) -> bool:
    """Whether a kernel of this operation computes its operands inside."""
    return kind(eqn) != ""
