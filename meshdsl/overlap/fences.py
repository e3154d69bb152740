"""Fences keep a compiler from changing the planned order of collectives and products.

A compiler moves equations freely between their operands and their readers, so an order survives only as a dependency.
At every start of a collective, its operand is tied to the results of the products before it and to operands of those
after it; at every wait, the result is tied in the same way. No product can change windows then, and windows that follow
each other cannot intersect.

Kernels with products, which windows should hold.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..control.host import FETCH, host_values
from ..cost.fusion import Kernel, holders, steps
from ..dims import size_of
from ..ir import Eqn, Linear, Op, Product, Reduce, Var, computed_from, sources_of
from ..lowering.asynchrony import FENCE, WAIT, Start, pairs
from ..lowering.program import Program


def is_product(eqn: Eqn) -> bool:
    """True if an equation multiplies and sums (a matmul, for example), so that a window should hold its kernel."""
    if not isinstance(eqn.op, Op):
        return False
    return eqn.op.product is not Product.NONE or (eqn.op.reduce is Reduce.SUM and eqn.op.linear is Linear.EACH)


@dataclass(frozen=True, eq=False)
class Kernels:
    """Products of each kernel, by its last equation, and all values that are in memory: others stay inside kernels."""

    products: Mapping[Eqn, tuple[Eqn, ...]]
    stored: Collection[Var]


def windows(program: Program) -> dict[Eqn, tuple[Eqn, ...]]:
    """For every start in the program's body, the equations between it and its wait."""
    place = program.places
    return {start: program.eqns[place[start] + 1 : place[wait]] for start, wait in pairs(program).items()}


def products(program: Program, kernels: Kernels) -> dict[Eqn, tuple[Eqn, ...]]:
    """For every start of a fenced program, the products that run in its window: their kernels end there, they depend on
    the fence before the start, and the fence after the wait depends on them.

    A product that is computed inside a later kernel runs with that kernel, wherever its equation is.
    """
    place = program.places
    waits = pairs(program)
    planned: dict[Eqn, tuple[Eqn, ...]] = {}
    for start, eqns in windows(program).items():
        fences = program.eqns[place[start] - 1], *program.eqns[place[waits[start]] + 1 :][:1]
        follows = computed_from(eqns, (v for v in fences[0].outs if fences[0].op is FENCE))
        needed = sources_of(eqns, {v for eqn in fences[1:] if eqn.op is FENCE for v in eqn.ins})
        ending = (product for eqn in eqns for product in kernels.products.get(eqn, ()))
        planned[start] = tuple(
            product for product in ending if product in needed and not follows.isdisjoint(product.outs)
        )
    return planned


def fence(program: Program, kernels: Kernels) -> Program:
    """Add a fence at every start and wait, so that products stay on their side of it.

    Values, shardings and order do not change.
    """
    fenced = _Fenced(program, kernels)
    following: dict[Eqn, list[Eqn]] = {}  # start or wait -> the equations up to the next one
    segment: list[Eqn] = []
    for eqn in program.eqns:
        if _is_boundary(eqn):
            segment = following[eqn] = []
        else:
            segment.append(eqn)
    for eqn in program.eqns:
        if eqn in following:
            fenced.boundary(eqn, following[eqn])
        else:
            fenced.add(eqn)
    return program.replace(eqns=tuple(fenced.eqns), outs=tuple(fenced.now(v) for v in program.outs))


def _is_boundary(eqn: Eqn) -> bool:
    return isinstance(eqn.op, Start) or eqn.op is WAIT


class _Fenced:
    """The program being built: its equations so far, and for each value its newest copy, the result of a fence."""

    def __init__(self, program: Program, kernels: Kernels):
        fetched = {v for eqn in program.eqns if eqn.op is FETCH for v in eqn.ins}  # of a body, some of its inputs
        self.stored = set(kernels.stored) - host_values(program) - fetched  # a fence is in the device's memory
        self.eqns: list[Eqn] = []
        self.new: dict[Var, Var] = {}  # fenced version for all later readers
        self.operands: dict[tuple[Eqn, Var], Var] = {}  # fenced version for one reader
        self.defined = set(program.ins)
        self.unread = Counter([*(v for eqn in program.eqns for v in eqn.ins), *program.outs])  # readers left, by value
        self.in_flight: dict[Var, Var] = {}  # result of a start -> its operand, which is in memory until the wait
        self.segment: list[Eqn] = []  # since the last start or wait
        self.after: dict[Var, None] = {}  # values of the last fence or wait, and those computed from them

    def now(self, v: Var) -> Var:
        return self.new.get(v, v)

    def add(self, eqn: Eqn) -> None:
        ins = tuple(self.operands.get((eqn, v)) or self.now(v) for v in eqn.ins)
        self.eqns.append(dataclasses.replace(eqn, ins=ins))
        self.defined.update(eqn.outs)
        self.unread.subtract(eqn.ins)
        self.segment.append(eqn)
        follows = any(v in self.after for v in eqn.ins)
        if follows and not isinstance(eqn.op, Start):  # nothing but its wait reads the result of a start
            self.after.update(dict.fromkeys(eqn.outs))

    def boundary(self, eqn: Eqn, following: Sequence[Eqn]) -> None:
        """Tie the operand of a start, or the result of a wait, to the results of the products before it and to one
        operand of each product after it, up to the next start or wait.

        Where no product is before it, it is tied to a value that follows from the start or wait before instead.
        """
        before = self.exits()
        if eqn.op is WAIT:
            self.add(eqn)
            operand = self.in_flight.pop(eqn.ins[0])
            self.unread[operand] -= 1
        moved = (eqn.outs if eqn.op is WAIT else eqn.ins)[0]
        if not before and moved not in self.after:
            stored = (v for v in self.after if self.unread[v] and v in self.stored)
            before = [v for v in (next(stored, None),) if v is not None]
        renewed = dict.fromkeys([moved, *before])
        edges = self.entries(following, renewed)
        values = list(dict.fromkeys([*renewed, *(v for _, v in edges)]))
        if len(values) > 1:
            of = dict(zip(values, self.tie(values, eqn), strict=True))
            self.new.update((v, of[v]) for v in renewed)
            self.operands.update((edge, of[edge[1]]) for edge in edges)
        self.after = dict.fromkeys(values)
        self.segment = []
        if eqn.op is not WAIT:
            self.add(eqn)
            self.in_flight[eqn.outs[0]] = moved
            self.unread[moved] += 1

    def exits(self) -> list[Var]:
        """For each product since the last start or wait, the first stored value that follows from it and is read later.

        O(equations since then).
        """
        first: dict[Var, int] = {}  # value -> number of the first equation that follows from it with such a result
        read: dict[int, list[Var]] = {}
        products: list[int] = []
        for number, eqn in reversed(list(enumerate(self.segment))):
            read[number] = [v for v in eqn.outs if self.unread[v] and v in self.stored]
            following = number if read[number] else min((first[v] for v in eqn.outs if v in first), default=None)
            if following is not None:
                first.update((v, min(following, first.get(v, following))) for v in eqn.ins)
                products += [following] * is_product(eqn)
        return list(dict.fromkeys(v for number in reversed(products) for v in read[number]))

    def tie(self, values: Sequence[Var], eqn: Eqn) -> list[Var]:
        """The fenced versions of these values, behind one new fence."""
        outs = [dataclasses.replace(v) for v in values]
        ins = tuple(self.now(v) for v in values)
        self.eqns.append(Eqn(FENCE, ins, tuple(outs), {}, eqn.where, eqn.backward))
        return outs

    def entries(self, following: Sequence[Eqn], renewed: Collection[Var]) -> list[tuple[Eqn, Var]]:
        """An (equation, value) read for each product, so that the product runs after a fence of these values: the
        largest of those through which it depends on stored values. None for a product that depends on another one, or
        on a `renewed` value.
        """
        producers = {v: other for other in following for v in other.outs}
        chosen: list[tuple[Eqn, Var]] = []
        behind = computed_from(following, renewed)  # results that exist only after the fence
        for product in filter(is_product, following):
            edges = self.reads(product, producers) if behind.isdisjoint(product.outs) else ()
            free = [edge for edge in edges if edge not in self.operands]
            if free:
                chosen.append(max(free, key=lambda edge: size_of(edge[1].dims)))
                behind |= computed_from(following, chosen[-1][0].outs)
        return chosen

    def reads(self, product: Eqn, producers: Mapping[Var, Eqn]) -> Iterator[tuple[Eqn, Var]]:
        """The reads of stored values that are defined, by a product and by the equations that it depends on."""
        left, seen = [product], {product}
        for eqn in left:  # grows
            yield from ((eqn, v) for v in eqn.ins if v in self.defined and v in self.stored)
            sources = (producers[v] for v in eqn.ins if v in producers)
            new = [source for source in dict.fromkeys(sources) if source not in seen]
            seen.update(new)
            left += new


def kernels_with_products(program: Program) -> Kernels:
    """The products of the kernels that a program runs, and the values that are in memory, with their views."""
    launched = steps(program)
    products = {
        step.eqns[-1]: tuple(filter(is_product, step.eqns))
        for step in launched
        if isinstance(step, Kernel) and any(map(is_product, step.eqns))
    }
    stored = {v for step in launched for v in (*step.reads, *step.writes)}
    return Kernels(products, stored | {view for view, v in holders(program).items() if v in stored})
