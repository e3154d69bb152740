"""Fusion model: the kernels, collectives and loops that one device launches, in the program's order.

A compiler does not store every value. It computes elementwise chains inside the kernel that reads them, and it
recomputes constants and masks in each reader. `steps` models this from each operation's `fuses`: a value between two
equations of one kernel never reaches memory, and of a value that it picks from, a kernel reads what it picks. Memory,
traffic and time all use this model; they differ in which scores of a softmax are stored, and in what products recompute
(see `scores`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from ..control import BARRIER
from ..ir import Cond, Eqn, Fuses, Graph, Var, While
from ..lowering import Program
from ..lowering.asynchrony import FENCE, WAIT, Start
from ..ops.reshape import TRANSPOSE
from .scores import Scores, is_matmul, is_product, kind, long_scores, names


@dataclass(frozen=True, eq=False)
class Kernel:
    """Equations that run as one kernel. It reads and writes the listed stored values; others stay in registers."""

    eqns: tuple[Eqn, ...]
    reads: tuple[Var, ...]
    read_bytes: tuple[int, ...]  # of each value that it reads; of one that it picks from, at most what it picks
    writes: tuple[Var, ...]
    overwritable: tuple[Var, ...] = ()  # reads of elementwise equations only: the result may overwrite them


@dataclass(frozen=True, eq=False)
class Send:
    """One collective."""

    eqn: Eqn
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which it sends."""
        assert self.eqn.collective is not None
        return self.eqn.collective.axes


@dataclass(frozen=True, eq=False)
class Wait:
    """The wait for a started collective. The collective reads its operand until this step."""

    eqn: Eqn
    reads: tuple[Var, ...]
    writes: tuple[Var, ...] = ()


@dataclass(frozen=True, eq=False)
class LoopStep:
    """A scan or a while loop. A while loop's trip count is unknown: `body` is one trip with its predicate."""

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


Step = Kernel | Send | Wait | LoopStep | Branch
Reads = dict[tuple[Var, Var], int]  # bytes by stored value and by what is picked from it, or the value itself
REMADE = 1.25  # recompute a value in each reader if that reads at most this many times the value's elements


def steps(program: Program, scores_of: Callable[[Program], Scores] = long_scores) -> tuple[Step, ...]:
    """Steps that one device launches, in order. Every equation with an effect is in exactly one step.

    Views (`rename`, `reshape` of a block, ...) are replaced by the stored value that they are a view of. `scores_of`
    decides which scores are stored.
    """
    # every part of the cost model asks for them
    known: dict[Callable[[Program], Scores], tuple[Step, ...]] = program.__dict__.setdefault("_steps", {})
    if scores_of not in known:
        known[scores_of] = tuple(_Fusion(program, scores_of).steps())
    return known[scores_of]


def readers_of(order: Iterable[Step]) -> Mapping[Var, Sequence[Step]]:
    """The steps that read each value, in their order; none for what nothing reads."""
    readers: dict[Var, list[Step]] = defaultdict(list)
    for step in order:
        for v in step.reads:
            readers[v].append(step)
    return readers


def holders(graph: Graph) -> dict[Var, Var]:
    """Map each view in a graph to the stored value that it is a view of."""
    source: dict[Var, Var] = {}
    for eqn in graph.eqns:
        if kind(eqn) is Fuses.VIEW or (eqn.op is TRANSPOSE and _keeps_order(cast(Program, graph), eqn)):
            source.update((out, source.get(v, v)) for out, v in zip(eqn.outs, eqn.ins, strict=False))
    return source


def _keeps_order(program: Program, transpose: Eqn) -> bool:
    """True if a transpose moves dims of local size 1 alone: its result has the bytes of its operand."""
    (x,), (out,) = transpose.ins, transpose.outs
    sizes = dict(zip(x.dims, program.local_shape(x), strict=True))
    return [d for d in x.dims if sizes[d] > 1] == [d for d in out.dims if sizes[d] > 1]


class _Chain(NamedTuple):
    """Consecutive equations inside one kernel."""

    smallest: Var | None  # the value to store if the chain is cut; None if recomputing is cheap
    after: tuple[tuple[Eqn, Var], ...]  # the equation that makes `smallest`, and the later ones
    reduces: bool  # a reduction is in the chain or directly before it


class _Fusion:
    """Decide which values of one program are stored and which stay inside the kernels of their readers."""

    def __init__(self, program: Program, scores_of: Callable[[Program], Scores]):
        self.program = program
        self.source = holders(program)
        self.readers: dict[Var, list[Eqn]] = defaultdict(list)  # by stored value, including reads through views
        self.makers: dict[Var, Eqn] = {}
        for eqn in program.eqns:
            self.makers.update(dict.fromkeys(eqn.outs, eqn))
            if eqn.outs[0] not in self.source:
                for v in dict.fromkeys(self.holder(v) for v in eqn.ins):
                    self.readers[v].append(eqn)
        self.results = {self.holder(v) for v in program.outs}  # always stored
        self.started = {eqn.outs[0]: eqn for eqn in program.eqns if isinstance(eqn.op, Start)}
        for eqn in program.eqns:
            if eqn.op is FENCE or eqn.op is BARRIER:
                self.results.update(map(self.holder, eqn.ins))
        self.scores, self.scores_of = scores_of(program), scores_of
        self.roots: dict[Var, Reads] = {}  # value that is not stored -> what is read instead
        self.chains: dict[Var, _Chain] = {}  # for each value that is not stored
        self.ending: set[Eqn] = set()  # elementwise equations that run in the kernel of a reduction
        for eqn in program.eqns:
            for v in eqn.outs:
                if v not in self.source and v not in self.results:
                    self.place(eqn, v)

    def holder(self, v: Var) -> Var:
        return self.source.get(v, v)

    def place(self, eqn: Eqn, v: Var) -> None:
        """Decide whether a value stays inside its readers' kernels or is stored; or store the smallest value before it.

        An elementwise value stays inside its only reader. With several readers, each of them recomputes it if that
        reads little more than the value. A reduction stays inside its only reader if that reader is elementwise, and so
        does the reader's result. A kernel contains at most one reduction. Where such a chain ends, its smallest value
        is stored.
        """
        if not self.fits_kernel(eqn, v):
            return
        readers = self.readers[v]
        roots = self.reads(eqn)
        chain = self.chain(eqn, v, roots)
        reader = readers[0] if len(readers) == 1 else None
        if chain.reduces:
            if reader is not None and self.finishes(reader, v):
                self.ending.add(reader)
                self.roots[v], self.chains[v] = roots, chain
                return
            if chain.smallest is v:
                return
        if chain.smallest not in (None, v) and (chain.reduces or reader is None):
            self.cut(chain)
            roots = self.reads(eqn)
            chain = self.chain(eqn, v, roots)
        if reader is not None or self.cheap(v, roots) or self.for_products(v, readers):
            self.roots[v], self.chains[v] = roots, chain

    def fits_kernel(self, eqn: Eqn, v: Var) -> bool:
        """True if the kernels of its readers can compute a value."""
        readers = self.readers[v]
        fuses = kind(eqn) is not Fuses.UPDATE and self.fuses(eqn) and len(eqn.outs) == 1
        return fuses and bool(readers) and all(map(self.fuses, readers)) and not self.stored_for_reduction(v)

    def fuses(self, eqn: Eqn) -> bool:
        """True if an equation may share a kernel with those that make its operands and with those that read it."""
        return takes_inside(eqn) and not (self.scores.products_alone and is_product(eqn))

    def gathers(self, pick: Eqn) -> bool:
        """True if an operation picks at several indices."""
        return any(self.bytes(v) > v.dtype.itemsize for v in pick.ins[1:])

    def for_products(self, v: Var, readers: Sequence[Eqn]) -> bool:
        """True for a value, not of scores, that only products read: each computes it again, whatever that reads."""
        return self.scores.recomputed_by_products and names(v) not in self.scores.dims and all(map(is_matmul, readers))

    def cheap(self, v: Var, roots: Reads) -> bool:
        """True if recomputing a value reads little more than reading it; of attention scores, no more bytes.

        Rows at several indices are gathered once.
        """
        if any(via is not root and self.gathers(self.makers[via]) for root, via in roots):
            return False
        if names(v) in self.scores.dims:
            return sum(roots.values()) <= self.bytes(v)
        return sum(n // root.dtype.itemsize for (root, _), n in roots.items()) <= REMADE * self.size(v)

    def stored_for_reduction(self, v: Var) -> bool:
        """True for stored scores that a reduction reads. The kernel that stores it reduces too, not in place."""
        return v in self.scores.stored

    def finishes(self, eqn: Eqn, v: Var) -> bool:
        """True if an equation is elementwise and can run in the kernel that makes its operand `v`."""
        return kind(eqn) is Fuses.MAP and eqn not in self.ending and self.size(eqn.outs[0]) == self.size(v)

    def chain(self, eqn: Eqn, v: Var, roots: Reads) -> _Chain:
        """The chain of equations of the same size that makes a value, from what they read, inside one kernel."""
        operands = [self.holder(x) for x in eqn.ins if self.size(x) == self.size(v)]
        before = [self.chains[x] for x in operands if x in self.chains and len(self.readers[x]) == 1]
        before.sort(key=lambda chain: not chain.reduces)
        if kind(eqn) is Fuses.REDUCE or not before:
            first = _Chain(None, (), kind(eqn) is Fuses.REDUCE)
        else:
            (first, *_) = before
        if first.smallest is not None and self.bytes(first.smallest) < self.bytes(v):
            return _Chain(first.smallest, (*first.after, (eqn, v)), first.reduces)
        cheap = not first.reduces and self.cheap(v, roots)
        return _Chain(None, (), False) if cheap else _Chain(v, ((eqn, v),), first.reduces)

    def cut(self, chain: _Chain) -> None:
        """Store the smallest value of a chain; later equations read the stored value."""
        (_, v), *after = chain.after
        del self.roots[v], self.chains[v]
        for eqn, v in after[:-1]:
            roots = self.reads(eqn)
            self.roots[v], self.chains[v] = roots, self.chain(eqn, v, roots)

    def reads(self, eqn: Eqn) -> Reads:
        """The bytes that an equation reads from memory, directly or through values that its kernel computes."""
        found: Reads = {}
        for v in map(self.holder, eqn.ins):
            found |= self.roots.get(v, {(v, v): self.bytes(v)})
        if kind(eqn) is Fuses.PICK:
            most = sum(map(self.bytes, eqn.outs))
            return {(root, eqn.outs[0]): min(n, most) for (root, _), n in found.items()}
        if kind(eqn) is Fuses.UPDATE:
            return {read: 0 if self.writes_twice(eqn, read[0]) else n for read, n in found.items()}
        return found

    def writes_twice(self, update: Eqn, v: Var) -> bool:
        """True if the kernel that makes `v` also writes it where an update does."""
        maker, written = self.makers.get(v), self.holder(update.ins[1])
        alone = [*self.roots.get(written, {(written, written): 0})] == [(v, v)]
        return alone and maker is not None and takes_inside(maker)

    def bytes(self, v: Var) -> int:
        return self.program.local_bytes(v)

    def size(self, v: Var) -> int:
        return self.bytes(v) // v.dtype.itemsize

    def steps(self) -> Iterator[Step]:
        waiting: dict[Var, list[Eqn]] = {}  # for each value that is not stored: the equations that make it
        for eqn in self.program.eqns:
            if eqn.op is WAIT:
                yield Wait(eqn, (eqn.ins[0], *map(self.holder, self.started[eqn.ins[0]].ins)))
            if eqn.outs[0] in self.source:
                continue
            ins = dict.fromkeys(self.holder(v) for v in eqn.ins)
            parts = [*(part for v in ins for part in waiting.pop(v, [])), eqn]  # run in the first reader
            if any(v in self.roots for v in eqn.outs):
                waiting[eqn.outs[0]] = parts
            else:
                yield self.step(parts)

    def step(self, parts: list[Eqn]) -> Step:
        eqn = parts[-1]
        read = Counter[Var]()
        for (root, _), n in self.reads(eqn).items():
            read[root] += n
        reads, writes = tuple(read), eqn.outs
        if eqn.sends:
            return Send(eqn, reads, writes)
        if eqn.control is None:
            read_bytes = tuple(min(n, self.bytes(v)) for v, n in read.items())
            return Kernel(tuple(parts), reads, read_bytes, writes, self.overwritable(parts, reads))
        inner = tuple(steps(cast(Program, sub), self.scores_of) for sub in eqn.graphs().values())
        if isinstance(eqn.control, Cond):
            return Branch(eqn, inner, reads, writes)
        body = tuple(step for sub in inner for step in sub)
        return LoopStep(eqn, body, eqn.trips, isinstance(eqn.control, While), reads, writes)

    def overwritable(self, parts: Sequence[Eqn], reads: Sequence[Var]) -> tuple[Var, ...]:
        """The values that only the elementwise equations of a kernel read, if it does not also reduce its result."""
        if any(map(self.stored_for_reduction, parts[-1].outs)):
            return ()
        not_elementwise = {v for part in parts if kind(part) is not Fuses.MAP for v, _ in self.reads(part)}
        return tuple(v for v in reads if v not in not_elementwise)


def takes_inside(eqn: Eqn) -> bool:
    """True if a kernel of this operation can compute its operands inside."""
    return kind(eqn) is not Fuses.KERNEL
