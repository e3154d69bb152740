"""The time of every kernel of a graph under all layouts at once.

What a compiler fuses depends on the equations around a value: those that make it and read it, not farther than the
operations that are kernels of their own. So a graph falls into segments, equations joined by values that may stay
inside a kernel. The rows of a table fall into few classes at each segment; the segment's part of the program is put
together once for each class and costed as a program is, by `ledger` and `roofline`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir import Eqn, Fuses, Op, Var
from ..layouts import Extents, Mesh, Sharding
from ..lowering import Program
from ..ops.masking import MASK
from .body import Body, Loop, Plain
from .classes import Made
from .fusion import Kernel, holders, kind
from .ledger import ledger
from .machine import Machine
from .roofline import roofline

__all__ = ["kernel_seconds"]

READER = Op("reader", type=lambda x: x, kernel=lambda c, x: x, flops=lambda *_, **__: 0)  # stands for what reads
CONSTANT = Op("constant", type=lambda: (), kernel=lambda c: 0, flops=lambda *_, **__: 0, fuses=Fuses.MAP)
WATCHER = dataclasses.replace(READER, name="watcher", fuses=Fuses.MAP)


@dataclass(frozen=True, eq=False)
class Segment:
    """Some steps of a body, those around them included, and the values whose readers are not all there."""

    own: tuple[int, ...]  # the steps whose kernels are counted here
    steps: tuple[int, ...]  # in order, with those that make or read its values
    values: frozenset[Var]  # made by its own steps
    watched: frozenset[Var]  # of them, those read element by element somewhere else
    ends: tuple[int, ...]  # the results of the graph that are among its values
    constants: frozenset[Var]  # numbers that every reader makes for itself
    stored: frozenset[Var]  # of its values, those that are stored for readers elsewhere


Seconds = tuple[np.ndarray, np.ndarray]


def kernel_seconds(body: Body, machine: Machine, known: dict[Any, Any]) -> list[Seconds | None]:
    """For each step of a body, the seconds of the kernels that it ends, by row; None for loops and for nothing.

    First those of the kernels that bring one operand into shape, then those of the ones that make its results.
    `known` keeps what has been costed, for segments that are alike.
    """
    found: list[Seconds | None] = [None] * len(body.steps)
    forms: _Forms = known.setdefault("forms", _Forms(body.classes.mesh))
    for segment in _segments(body):
        points = [plain for i in segment.steps for plain in _points(body.steps[i], segment)]
        columns = [plain.made for plain in points] + [body.ends[i].made for i in segment.ends]
        likeness = _likeness(body, segment)

        def costed(
            *made: Made, segment: Segment = segment, likeness: Any = likeness
        ) -> tuple[tuple[float, float], ...]:
            key = likeness, *forms.of(made)
            if key not in known:
                known[key] = _Wiring(body, segment, made).seconds(machine)
            return known[key]

        together = body.table.map(costed, *columns) if columns else None
        for k, i in enumerate(segment.own):
            if together is not None and any(sum(value[k]) for value in together.values):
                early, late = (together.array(lambda value, k=k, n=n: value[k][n]) for n in range(2))
                found[i] = early, late
    return found


def _stored(body: Body) -> frozenset[Var]:
    """What reductions make for more than one reader, or for one that does not go on element by element: no kernel
    holds two reductions, so it is stored. Not where padding is masked, as readers may share the mask.
    """
    source = holders(body.graph)
    readers: dict[Var, list[Eqn]] = defaultdict(list)
    masked: set[Var] = set()
    for step in body.steps:
        if step.eqn is None:
            continue
        if isinstance(step, Plain) and any(eqn.op is MASK for made in step.made.values for eqn in made.eqns):
            masked.update(source.get(v, v) for v in step.eqn.ins)
        if step.eqn.outs[0] not in source:
            for v in dict.fromkeys(source.get(v, v) for v in step.eqn.ins):
                readers[v].append(step.eqn)
    return frozenset(
        v
        for eqn in body.graph.eqns
        if kind(eqn) is Fuses.REDUCE
        for v in eqn.outs
        if v not in masked and not (len(readers[v]) == 1 and kind(readers[v][0]) is Fuses.MAP)
    )


def _constants(body: Body) -> frozenset[Var]:
    """The numbers made of nothing but constants; an input that is one in some rows counts as one."""
    found = {v for v in body.graph.ins if any(state.lazy is not None for state in body.states[v].values)}
    for step in body.steps:
        eqn = step.eqn
        if eqn is not None and not any(v.shape for v in eqn.outs) and (not eqn.ins or _inner(eqn)):
            found.update(eqn.outs if found.issuperset(eqn.ins) else ())
    return frozenset(v for v in found if not v.shape)


def _likeness(body: Body, segment: Segment) -> Any:
    """Equal for segments that are wired alike; with equal classes they cost the same."""
    number: dict[Var, int] = {}
    parts: list[Any] = []
    for i in segment.steps:
        step = body.steps[i]
        values = _touched(step)
        names = tuple(number.setdefault(v, len(number)) for v in values)
        kind_of = body.classes.signature(step.eqn) if isinstance(step, Plain) and step.eqn is not None else -1
        parts.append((kind_of, names, i in segment.own))
    ends = tuple(number.get(body.ends[i].ins[0], -1) for i in segment.ends)
    known = segment.watched, segment.stored, segment.constants
    outside = (frozenset(number[v] for v in values if v in number) for values in known)
    return tuple(parts), *outside, ends


def _points(step: Plain | Loop, segment: Segment) -> list[Plain]:
    """The equation; or of a loop, what it asks for of the segment's values."""
    if isinstance(step, Plain):
        return [step]
    return [get for get in step.gets if get.ins[0] in segment.values]


def _inner(eqn: Eqn) -> bool:
    """Whether what an equation makes may stay inside a kernel."""
    return isinstance(eqn.op, Op) and kind(eqn) is not Fuses.KERNEL and eqn.control is None


def _touched(step: Plain | Loop) -> tuple[Var, ...]:
    """The values that a step reads and makes; none of a point that is no equation."""
    return () if step.eqn is None else (*step.eqn.ins, *step.eqn.outs)


def _joins(step: Plain | Loop) -> bool:
    """Whether anything that a step is lowered to may share a kernel with what is around it."""
    if not isinstance(step, Plain) or step.eqn is None:
        return False
    made = (eqn for made in step.made.values for eqn in made.eqns)
    return _inner(step.eqn) or any(_inner(eqn) for eqn in made)


def _segments(body: Body) -> list[Segment]:
    steps = body.steps
    inner = [_joins(step) for step in steps]
    parent = list(range(len(steps)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    stored = _stored(body)
    makers: dict[Var, int] = {}
    readers: dict[Var, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        if step.eqn is None:
            continue
        for v in dict.fromkeys(step.eqn.ins):
            readers[v].append(i)
            at = makers.get(v)
            if v.shape and at is not None and v not in stored and inner[at] and inner[i]:
                parent[root(i)] = root(at)
        makers.update((v, i) for v in step.eqn.outs)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        if step.eqn is not None and isinstance(step, Plain):
            groups[root(i)].append(i)
    results: dict[Var, list[int]] = defaultdict(list)
    for i, end in enumerate(body.ends):
        results[end.ins[0]].append(i)
    constants = _constants(body)
    found: list[Segment] = []
    for members in groups.values():
        inside = set(members)
        around: set[int] = set()
        watched: set[Var] = set()
        values = dict.fromkeys(v for i in members for v in _touched(steps[i]))
        for v in values:
            at = makers.get(v)
            if at is None or (at not in inside and inner[at]):
                continue  # an input, or a number from another segment
            if at not in inside:
                continue
            for i in readers[v]:
                if i not in inside:
                    if inner[i]:
                        watched.add(v)  # a number, or stored
                    else:
                        around.add(i)
        mine = frozenset(v for v in values if makers.get(v) in inside)
        ends = tuple(sorted(i for v in mine for i in results[v]))
        here = tuple(sorted(inside | around))
        found.append(
            Segment(tuple(members), here, mine, frozenset(watched - stored), ends, constants, stored & watched)
        )
    return found


def _copy(x: Var) -> Var:
    return Var(x.shape, x.dtype, x.name, x.sharding)


class _Forms:
    """What the time of a segment's kernels depends on, of each class: local sizes, and which versions are the same.

    Layouts that cut a dim by other axes into as many blocks have the same form.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.numbers: dict[Any, int] = {}
        self.shardings: dict[Sharding, int] = {}
        self.known: dict[Made, tuple[int, tuple[int, ...]]] = {}

    def of(self, made: Sequence[Made]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The forms of some classes, and which of their shardings are equal."""
        number: dict[int, int] = {}
        forms: list[int] = []
        equal: list[int] = []
        for one in made:
            form, shardings = self.form(one)
            forms.append(form)
            equal += [number.setdefault(s, len(number)) for s in shardings]
        return tuple(forms), tuple(equal)

    def form(self, made: Made) -> tuple[int, tuple[int, ...]]:
        """A number for the form of a class, and those of the shardings that tell its versions apart."""
        if made not in self.known:
            extents = Extents(made.extents)
            number: dict[Var, int] = {}
            sizes: list[Any] = []

            def see(x: Var) -> int:
                if x not in number:
                    number[x] = len(number)
                    sizes.append((x.dtype, extents.local_shape(x.shape, x.sharding, self.mesh)))
                return number[x]

            before = tuple(tuple(map(see, versions)) for versions in made.before)
            eqns = tuple((_what(eqn), tuple(map(see, eqn.ins)), tuple(map(see, eqn.outs))) for eqn in made.eqns)
            after = tuple(tuple(map(see, versions)) for versions in made.after)
            lazy = tuple(state.lazy for state in made.came)
            key = before, eqns, after, lazy, tuple(sizes), made.wanted is None
            versions = [x.sharding for xs in (*made.before, *made.after) for x in xs]
            versions += [] if made.wanted is None else [made.wanted]
            shardings = tuple(self.shardings.setdefault(s, len(self.shardings)) for s in versions)
            self.known[made] = self.numbers.setdefault(key, len(self.numbers)), shardings
        return self.known[made]


def _what(eqn: Eqn) -> Any:
    """What of an equation, beside its operands, its cost depends on."""
    if not isinstance(eqn.op, Op):
        return eqn.op.name
    key = eqn.op, tuple(sorted((k, v) for k, v in eqn.params.items() if isinstance(v, int | str)))
    rest = tuple(v for _, v in sorted(eqn.params.items()) if not isinstance(v, int | str))
    try:
        hash(rest)
    except TypeError:
        return eqn
    return (*key, rest)


class _Part(Program):
    """A program that knows the local sizes of its values once they have been asked for."""

    def local_shape(self, var: Var) -> tuple[int, ...]:
        """The stored sizes of a value on one device."""
        known = self.__dict__.setdefault("sizes", {})
        if var not in known:
            known[var] = super().local_shape(var)
        return known[var]


class _Wiring:
    """One class of one segment as a program: what each of its equations was lowered to, joined."""

    def __init__(self, body: Body, segment: Segment, made: Sequence[Made]):
        self.classes, self.body, self.segment = body.classes, body, segment
        self.there: dict[Var, dict[Sharding, Var]] = defaultdict(dict)
        self.ins: list[Var] = []
        self.eqns: list[Eqn] = []
        self.owner: dict[Eqn, int] = {}
        self.results: set[Var] = set()  # versions of what the steps make
        self.extents: dict[str, int] = {}
        left = iter(made)
        for i in segment.steps:
            step = body.steps[i]
            for point in _points(step, segment):
                one = next(left)
                if isinstance(step, Loop):
                    self.put(point, one, -1)
                    self.read(self.there[point.ins[0]].get(one.wanted) if one.wanted is not None else None, READER)
                elif step.eqn is None or step.eqn.control is None:
                    self.put(point, one, i)
                else:
                    op = step.eqn.op
                    before = tuple(eqn for eqn in one.eqns if eqn.op is not op)
                    self.put(point, dataclasses.replace(one, eqns=before), -1)
                    for v in step.ins:
                        self.read(next(reversed(self.there[v].values()), None), READER)
        for v in segment.stored:
            self.read(next(iter(self.there[v].values()), None), READER)
        for v in segment.watched:
            self.read(next(iter(self.there[v].values()), None), WATCHER)
        last: dict[Var, Var] = {}
        for i in segment.ends:
            end, one = body.ends[i], next(left)
            self.put(end, one, -1)
            assert one.wanted is not None, "a result is always wanted somehow"
            last[end.ins[0]] = self.there[end.ins[0]][one.wanted]
        self.outs = list(last.values())

    def put(self, step: Plain, made: Made, i: int) -> None:
        """Add what one step was lowered to."""
        actual: dict[Var, Var] = {}
        for v, versions, state in zip(step.ins, made.before, made.came, strict=True):
            for x in versions:
                if x.sharding not in self.there[v]:
                    self.there[v][x.sharding] = self.external(v, x, state.lazy)
                actual[x] = self.there[v][x.sharding]
        for eqn in made.eqns:
            for x in (*eqn.ins, *eqn.outs):
                if x not in actual:
                    actual[x] = _copy(x)
            ins, outs = tuple([actual[x] for x in eqn.ins]), tuple([actual[x] for x in eqn.outs])
            put = Eqn(eqn.op, ins, outs, eqn.params)
            self.eqns.append(put)
            self.owner[put] = i
        for k, (v, versions) in enumerate(zip((*step.ins, *step.outs), made.after, strict=True)):
            for x in versions:
                if x in actual:
                    self.there[v][x.sharding] = actual[x]
                    self.results.update([actual[x]] if k >= len(step.ins) else [])
        self.extents.update(made.extents)

    def external(self, v: Var, x: Var, lazy: Eqn | None) -> Var:
        """A version that something else has made: an input, or born here."""
        made = _copy(x)
        if lazy is not None and not lazy.ins:
            self.eqns.append(dataclasses.replace(lazy, outs=(made,)))
        elif v in self.segment.constants:
            self.eqns.append(Eqn(CONSTANT, (), (made,)))
        else:
            self.ins.append(made)
        return made

    def read(self, x: Var | None, op: Op) -> None:
        """Something else reads a value."""
        if x is not None:
            self.eqns.append(Eqn(op, (x,), (Var((), np.dtype(np.float32), "", Sharding()),)))

    def seconds(self, machine: Machine) -> tuple[tuple[float, float], ...]:
        """Of the kernels that end in each of the segment's own steps: of those on the way, and of its results'."""
        program = _Part(
            tuple(self.ins),
            tuple(self.eqns),
            tuple(self.outs),
            mesh=self.classes.mesh,
            extents=Extents(self.extents),
        )
        total = {i: [0.0, 0.0] for i in self.segment.own}
        costs = ledger(program)
        for step in costs.steps:
            at = self.owner.get(step.eqns[-1], -1) if isinstance(step, Kernel) else -1
            if isinstance(step, Kernel) and at in total:
                total[at][step.eqns[-1].outs[0] in self.results] += roofline(costs.of(step), machine).seconds
        return tuple((early, late) for early, late in total.values())
