"""A graph as the estimate reads it: one record for each equation, made once for all candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..control import KEEP
from ..dims import Dim
from ..ir import Eqn, Fuses, Graph, Labels, Product, Scan, Var, operations
from ..lowering.labels import labels_of
from ..lowering.partition.expansions import EXPANSIONS
from ..lowering.partition.partition import preferences

BLOCKED = -2  # the label of a dim that an operation needs whole
Numbers = tuple[int, ...]  # of each dim: the number of its label


@dataclass(frozen=True, eq=False)
class EquationWork:
    """One equation: its labels by number, and what it computes on one device that has everything."""

    eqn: Eqn
    ins: tuple[Numbers, ...]
    outs: tuple[Numbers, ...]
    fresh: frozenset[int]  # labels that take the axes of the layout's rules
    vanishing: frozenset[int]  # labels that only operands have
    preferred: frozenset[int]
    contested: tuple[tuple[int, int], ...]  # labels of one result that may not claim one axis
    flops: float
    of_weight: bool  # its result has the dims of a weight's gradient
    from_data: tuple[bool, ...]  # of each operand: it depends on the data, not on the weights alone

    @cached_property
    def new_dims(self) -> list[tuple[Numbers, Dim, int]]:
        """The dims of results whose label takes the layout's axes, with the labels of their result."""
        every = [
            (numbers, d, i)
            for v, numbers in zip(self.eqn.outs, self.outs, strict=True)
            for d, i in zip(v.dims, numbers, strict=True)
        ]
        return [each for each in every if each[2] in self.fresh]

    @cached_property
    def plain(self) -> bool:
        """True if it sends nothing where its operands have an axis along one label."""
        whole = any(BLOCKED in each for each in self.ins)
        return not (whole or self.new_dims or self.vanishing)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for equations that cost the same where their operands are sharded alike."""
        types = [(v.dims, v.dtype) for v in (*self.eqn.ins, *self.eqn.outs)]
        kind = (self.fuses, self.product, self.flops, self.of_weight, self.from_data, self.eqn.backward)
        return (self.ins, self.outs, self.fresh, self.preferred, self.contested, kind, *types)

    @property
    def fuses(self) -> Fuses:
        """How its kernel is fused with others."""
        return self.eqn.operation.fuses

    @property
    def product(self) -> Product:
        """True for a product."""
        return self.eqn.operation.product


@dataclass(frozen=True, eq=False)
class LoopWork:
    """A loop over the slices of stacks, and the digest of its body."""

    eqn: Eqn
    scan: Scan
    body: tuple[EquationWork | LoopWork, ...]


@dataclass(frozen=True, eq=False)
class Digest:
    """The equations of a step up to its gradients; those of the update are estimated from the sizes of the weights.

    `weights` are the inputs that results replace, `state` those of them that belong to the optimizer.
    """

    graph: Graph
    weights: tuple[Var, ...]
    state: tuple[Var, ...]
    works: tuple[EquationWork | LoopWork, ...]
    saved: tuple[Var, ...]  # stacks of loops of the forward pass that the backward pass reads
    loops: frozenset[str]  # dims of loops
    batch: Dim  # that micro-batches divide

    def key_of(self, v: Var) -> frozenset[str]:
        """The dims of a weight inside its loop, which its gradient has too."""
        return names_of(v) - self.loops


def digest(graph: Graph, results: Sequence[str] | None) -> Digest:
    """The records of a graph; `results` are the paths of its results."""
    weights, state = _carried(graph, results or ())
    loops = frozenset(eqn.scan.dim.name for eqn in graph.eqns if eqn.scan is not None)
    keys = {names_of(v) - loops for v in weights}
    data = [v for v in graph.ins if v not in weights and v not in state]
    reader = _Reader(preferences(graph), keys, dict.fromkeys(data, True))
    works = tuple(reader.works(graph, top=True))
    saved = tuple(v for v in _saved(graph) if reader.data.get(v))
    largest = max(data, key=lambda v: math.prod(d.size for d in v.dims), default=None)
    batch = largest.dims[0] if largest is not None and largest.dims else Dim("", 1)
    return Digest(graph, weights, state, works, saved, loops, batch)


def _saved(graph: Graph) -> list[Var]:
    """The stacks of loops of the forward pass that the backward pass reads."""
    stacks = {v for eqn in graph.eqns if not eqn.backward and eqn.scan is not None for v in eqn.outs}
    return [v for v in dict.fromkeys(v for eqn in graph.eqns if eqn.backward for v in _stored(eqn)) if v in stacks]


def _stored(eqn: Eqn) -> list[Var]:
    """The operands of an equation, but for those that a loop only takes to choose between them and recomputing."""
    if eqn.scan is None:
        return list(eqn.ins)
    body = eqn.scan.body
    chosen = {each.ins[0] for each in body.eqns if each.op is KEEP}
    return [v for v, w in zip(eqn.ins, body.ins, strict=True) if w not in chosen]


def _carried(graph: Graph, results: Sequence[str]) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """The weights and the optimizer state: inputs whose path, but for its first name, is that of a result."""
    outs = {(path.partition("/")[2], v.type) for path, v in zip(results, graph.outs, strict=False) if "/" in path}
    carried = [v for v in graph.ins if v.dims and (v.name.partition("/")[2], v.type) in outs]
    root = carried[0].name.partition("/")[0] if carried else ""
    first = tuple(v for v in carried if v.name.partition("/")[0] == root)
    return first, tuple(v for v in carried if v not in first)


@dataclass
class _Reader:
    hints: Mapping[Var, tuple[str, ...]]
    keys: set[frozenset[str]]  # dims of the weights, without those of loops
    data: dict[Var, bool]  # the values so far, and whether they depend on the data
    updated: set[Var] = field(default_factory=set[Var])  # values of the update

    def works(self, graph: Graph, top: bool = False) -> Iterator[EquationWork | LoopWork]:
        """The records of a graph's equations, in order."""
        gradients: set[Var] = set()
        for eqn in graph.eqns:
            self.data.update(dict.fromkeys(eqn.outs, any(self.data.get(v) for v in eqn.ins)))
            if top and not eqn.backward and not gradients.isdisjoint(eqn.ins):
                gradients.update(eqn.outs)
                continue
            if eqn.backward or any(v in gradients for v in eqn.ins):
                gradients.update(eqn.outs)
            if eqn.scan is not None:
                body = eqn.scan.body
                self.data.update((w, bool(self.data.get(v))) for v, w in zip(eqn.ins, body.ins, strict=True))
                yield LoopWork(eqn, eqn.scan, tuple(self.works(body)))
                self.data.update((w, bool(self.data.get(v))) for v, w in zip(body.outs, eqn.outs, strict=True))
            elif eqn.control is None:
                yield self._work(eqn)

    def _work(self, eqn: Eqn) -> EquationWork:
        labels = labels_of(eqn)
        ins, outs, number = _numbered(labels, keeps_all=eqn.op in EXPANSIONS)
        present, made = _every(ins), _every(outs)
        ruled = {number[x] for x in labels.from_layout | labels.from_layout_if_ruled if x in number}
        hint = {outs[0].get(d, BLOCKED) for d in self.hints.get(eqn.outs[0], ())} - {BLOCKED}
        pairs = [pair for pair in _pairs(ins, outs) if hint.isdisjoint(pair)]
        return EquationWork(
            eqn,
            tuple(tuple(each.values()) for each in ins),
            tuple(tuple(each.values()) for each in outs),
            frozenset(made - present | ruled),
            frozenset(present - made),
            frozenset(hint),
            () if eqn.backward else tuple(pairs),
            operations(eqn, lambda v: tuple(d.size for d in v.dims)),
            eqn.backward and not present <= made and names_of(eqn.outs[0]) in self.keys,
            tuple(bool(self.data.get(v)) for v in eqn.ins),
        )


Numbered = list[dict[str, int]]  # by operand or result: the number of the label of each dim


def _numbered(labels: Labels, keeps_all: bool) -> tuple[Numbered, Numbered, dict[str, int]]:
    """Labels as numbers; `keeps_all`: the operation has a lowering of its own along each dim, which stays split."""
    number: dict[str, int] = {}

    def side(names: Sequence[Mapping[str, str | None]]) -> Numbered:
        kept = [{d: x or (d if keeps_all else "") for d, x in each.items()} for each in names]
        return [{d: number.setdefault(x, len(number)) if x else BLOCKED for d, x in each.items()} for each in kept]

    return side(labels.ins), side(labels.outs), number


def _every(side: Numbered) -> set[int]:
    return {i for each in side for i in each.values()} - {BLOCKED}


def names_of(v: Var) -> frozenset[str]:
    """The names of the dims of a value."""
    return frozenset(d.name for d in v.dims)


def _pairs(ins: Sequence[Mapping[str, int]], outs: Sequence[Mapping[str, int]]) -> Iterator[tuple[int, int]]:
    """Pairs of labels of one result that no operand has together."""
    for names in outs:
        known = sorted({i for i in names.values() if any(i in each.values() for each in ins)})
        for j, b in enumerate(known):
            yield from ((a, b) for a in known[:j] if not any({a, b} <= set(each.values()) for each in ins))
