"""The lifetime of each value in one device's memory, from the step that computes it to its last reader.

Arguments and results occupy memory during the whole run, because the caller provides both; a result reuses the buffer
of a donated argument of its type. Values inside a kernel (see `fusion`) occupy none. The model follows two habits of
compilers:

- a step that does not increase the memory in use runs as early as possible;
- a result overwrites an operand of the same size that its kernel reads for the last time.

What differs between compilers (padded layouts, copies of arguments, all_reduces in place, the order of a loop's body)
is asked of the target.

A loop keeps its carry and its stacked results from its first step to its last, and the values of one trip while it
runs: the clock passes through the body once. Each arm of a conditional has its own moments.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..control.host import host_values
from ..errors import NOWHERE, Where
from ..errors.units import show_bytes
from ..ir import Eqn, Graph, Scan, Var, While, scratch_bytes
from ..lowering import Program
from ..targets import MemoryRules
from .combining import combined_sums
from .fusion import Branch, Kernel, LoopStep, Send, Step, Wait, holders, readers_of, steps
from .scores import names

CATEGORIES = (
    "parameters",
    "optimizer state",
    "inputs",
    "results",
    "saved activations",
    "temporaries",
    "collective buffers",
)


@dataclass(frozen=True)
class LiveTensor:
    """One value in one device's memory, from moment `first` to moment `last`, both inclusive."""

    name: str  # of the tensor, otherwise of the operation that makes it
    category: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # stored shape on one device
    bytes: int
    where: Where
    first: int
    last: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "dtype": self.dtype.name, "shape": list(self.shape), "where": str(self.where)}

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes):>10}  {self.name} {self.dtype.name}{list(self.shape)}  # {self.where}"


class Lives:
    """The first and last moment of every stored value, on one clock."""

    def __init__(self, program: Program, donated: frozenset[Var], categories: Mapping[Var, str], rules: MemoryRules):
        self.program, self.rules = program, rules
        self.moments: list[tuple[str, Where, bool]] = [("arguments", NOWHERE, False)]
        self.tensors: list[LiveTensor] = []
        self.offloaded = host_values(program)
        self.padding = rules.padding(program)
        self.in_default_layout = {*program.ins, *program.outs}
        self.first_reads: dict[Var, int] = {}
        self.hold_program(donated, categories)

    def size(self, v: Var) -> int:
        """The bytes of a value in the device's memory."""
        if v in self.offloaded:
            return 0
        stored = self.program.local_bytes(v)
        return stored if v in self.in_default_layout else round(stored * self.padding(v))

    def hold(self, v: Var, category: str, name: str, where: Where, first: int, last: int) -> None:
        n = self.size(v)
        if n and last >= first:
            self.tensors.append(LiveTensor(name, category, v.dtype, self.program.local_shape(v), n, where, first, last))

    def hold_program(self, donated: frozenset[Var], categories: Mapping[Var, str]) -> None:
        """Hold arguments and results for the whole run, and every other value until its last reader."""
        program = self.program
        source = holders(program)
        reused, copies = self._reused(source, donated)
        results = {source.get(v, v) for v in program.outs}
        order = self.reordered(steps(program, self.rules.scores), results | set(program.ins), reused)
        births, deaths = self.hold_graph(program, order, results | set(program.ins))
        end = len(self.moments)
        self.moments.append(("results", NOWHERE, False))
        for v in program.ins:
            self.hold(v, categories.get(v) or _category(v), v.name, NOWHERE, 0, end)
        for v in self.rules.copied(program) & set(program.ins):
            self.in_default_layout.discard(v)  # a kernel reads a copy in its own layout
            self.hold(v, "temporaries", f"copy of {v.name}", NOWHERE, self.first_reads[v], deaths[v])
        producers = program.producers
        for v in copies:
            eqn = producers.get(source.get(v, v))
            self.hold(v, "results", v.name or (_label(eqn) if eqn else "copy"), eqn.where if eqn else NOWHERE, 0, end)
        for v, argument in reused.items():
            if v in births and deaths.get(argument, 0) > births[v]:  # the argument is read later: hold both
                self.hold(v, "temporaries", _label(producers[v]), producers[v].where, births[v], deaths[argument])

    def _reused(self, source: Mapping[Var, Var], donated: frozenset[Var]) -> tuple[dict[Var, Var], list[Var]]:
        """The results that reuse a donated argument's buffer, with it; and those with buffers of their own."""
        local_shape = self.program.local_shape
        free: dict[Any, list[Var]] = defaultdict(list)  # donated arguments that no result reuses yet, by type
        for v in (v for v in self.program.ins if v in donated):
            free[v.dtype, local_shape(v)].append(v)
        reused: dict[Var, Var] = {}
        copies: list[Var] = []
        for v in self.program.outs:
            candidates = free[v.dtype, local_shape(v)]
            if candidates and source.get(v, v) not in reused:
                reused[source.get(v, v)] = candidates.pop(0)
            else:
                copies.append(v)
        return reused, copies

    def hold_graph(
        self, graph: Graph, order: Sequence[Step], placed: set[Var]
    ) -> tuple[dict[Var, int], dict[Var, int]]:
        """Hold the values of one graph, except `placed`; returns when each value is made and last read."""
        source = holders(graph)
        births: dict[Var, int] = {}
        deaths: dict[Var, int] = {}
        makers: dict[Var, Step] = {}
        forward: set[Var] = set()  # values that the forward pass makes
        saved: set[Var] = set()
        communicated: set[Var] = set()
        for step in order:
            first = len(self.moments)
            eqn = _last(step)
            self.moments.append((_label(eqn), eqn.where, eqn.backward))
            carried = self.hold_trip(step, source) if isinstance(step, LoopStep) else set[Var]()
            if isinstance(step, Branch):
                self.hold_arms(step)
            last = len(self.moments) - 1
            for v in step.reads:
                self.first_reads.setdefault(v, first)
                deaths[v] = first - 1 if v in carried else last
                if eqn.backward and v in forward:
                    saved.add(v)
            births.update(dict.fromkeys(step.writes, first))
            makers.update(dict.fromkeys(step.writes, step))
            forward.update(() if eqn.backward else step.writes)
            if isinstance(step, Kernel):
                self.hold_scratch(step, first)
            if isinstance(step, Send):
                communicated.update(step.reads, step.writes)
                self.hold_padded(step.eqn, first)
        overwritten = self.overwritten(order, births, deaths, placed)
        category = dict.fromkeys(communicated, "collective buffers") | dict.fromkeys(saved, "saved activations")
        for v, first in births.items():
            if v not in placed:
                eqn = _last(makers[v])
                last = max(deaths.get(v, first), first) - (v in overwritten)
                self.hold(v, category.get(v, "temporaries"), *_origin(eqn, v), first, last)
        return births, deaths

    def hold_arms(self, step: Branch) -> None:
        """Hold the values of each arm of a conditional, one after the other."""
        for sub, arm in zip(step.eqn.graphs().values(), step.arms, strict=True):
            source = holders(sub)
            self.hold_graph(sub, arm, {*sub.ins, *(source.get(v, v) for v in sub.outs)})

    def hold_scratch(self, step: Kernel, moment: int) -> None:
        """Hold what the kernel needs besides its operands and results."""
        for eqn in step.eqns:
            if n := scratch_bytes(eqn, self.program.local_shape):
                name, kind_of = f"scratch of {_label(eqn)}", np.dtype(np.uint8)
                self.tensors.append(LiveTensor(name, "temporaries", kind_of, (n,), n, eqn.where, moment, moment))

    def hold_padded(self, eqn: Eqn, moment: int) -> None:
        """Hold the operand and the result of a collective as they are sent, if they are longer than stored."""
        for n in self.program.padded_bytes(eqn):
            name, kind = f"padding of {_label(eqn)}", np.dtype(np.uint8)
            self.tensors.append(LiveTensor(name, "collective buffers", kind, (n,), n, eqn.where, moment, moment))

    def reordered(self, order: Sequence[Step], placed: set[Var], reused: Mapping[Var, Var]) -> list[Step]:
        """Reorder the steps: a step that does not increase the memory in use runs as early as it can, as in compilers.

        Such a step stays after the other readers of the values it frees, and of the argument whose buffer it reuses.
        A program with starts and waits keeps its order.
        """
        if any(isinstance(step, Wait) for step in order):
            return list(order)  # the program fixes the order
        order = combined_sums(self.program, order, self.rules.combines)
        readers = readers_of(order)
        times: dict[Step, int] = {}
        births: dict[Var, int] = {}
        for i, step in enumerate(order):
            times[step] = i
            freed = [v for v in step.reads if v in births and v not in placed and readers[v][-1] is step]
            new = [v for v in step.writes if v not in placed]
            if isinstance(step, Kernel | Send) and sum(map(self.size, new)) <= sum(map(self.size, freed)):
                freed_or_reused = [*freed, *(reused[v] for v in step.writes if v in reused)]
                others = [times.get(r, i) for v in freed_or_reused for r in readers[v] if r is not step]
                times[step] = max([births.get(v, -1) for v in step.reads] + others, default=i)
            births.update(dict.fromkeys(step.writes, times[step]))
        return sorted(order, key=lambda step: times[step])

    def hold_trip(self, step: LoopStep, holder_of: Mapping[Var, Var]) -> set[Var]:
        """Hold the values of one trip. Returns operands whose buffers the carry reuses: they end at loop start."""
        loop = step.eqn.control
        assert isinstance(loop, Scan | While)
        body, consts = loop.body, loop.consts
        source = holders(body)
        n = loop.carries if isinstance(loop, Scan) else len(body.outs)
        outs = [source.get(v, v) for v in body.outs]
        read = {v for inner in step.body for v in inner.reads}
        scores = self.rules.scores(cast(Program, body)).dims
        rows = {v for v in outs[n:] if v not in read or names(v) in scores}  # written into the stack, and read there
        begin = len(self.moments)
        inputs = {v for sub in step.eqn.graphs().values() for v in sub.ins}
        placed = inputs | rows | set(outs[:n]) | self.rules.inside(cast(Program, body))
        order = self.rules.body_order(step.eqn, self.reordered(step.body, placed, {}), set(outs[:n]))
        births, deaths = self.hold_graph(body, order, placed)
        end = len(self.moments) - 1
        for carry, v in zip(body.ins[consts : consts + n], outs[:n], strict=True):
            if v in births and deaths.get(carry, begin) > births[v]:  # the old carry is read after the new one is made
                self.hold(v, "temporaries", "carry", step.eqn.where, births[v], end)
        operands = [holder_of.get(v, v) for v in step.eqn.ins]
        return set(operands[consts : consts + n]) - {*operands[:consts], *operands[consts + n :]}

    def overwritten(
        self, order: Sequence[Step], births: Mapping[Var, int], deaths: Mapping[Var, int], placed: set[Var]
    ) -> set[Var]:
        """Values that are overwritten by the result of the kernel that reads them last."""
        overwritten: set[Var] = set()
        readers = Counter(v for step in order for v in step.reads)
        for step in order:
            candidates = [v for v in self._overwritable(step, readers) if v in births and v not in placed]
            for out in (out for out in step.writes if out not in placed):
                for v in candidates:
                    if v not in overwritten and self.size(v) == self.size(out) and deaths[v] == births[out]:
                        overwritten.add(v)
                        break
        return overwritten

    def _overwritable(self, step: Step, readers: Mapping[Var, int]) -> Sequence[Var]:
        """The operands whose memory the results of a step may reuse."""
        if isinstance(step, Kernel):
            return step.overwritable
        effect = step.eqn.effect
        if self.rules.in_place and effect.reduces and not effect.dims:
            return [v for v in step.reads if readers[v] == 1]
        return ()


def _last(step: Step) -> Eqn:
    return step.eqns[-1] if isinstance(step, Kernel) else step.eqn


def _label(eqn: Eqn) -> str:
    return eqn.op.name


def _origin(eqn: Eqn, v: Var) -> tuple[str, Where]:
    """The name of a value, or of the operation that makes it, and its source line; looks inside loops."""
    body = eqn.control.body if isinstance(eqn.control, Scan | While) else None
    if body is not None and v in eqn.outs:
        out = body.outs[eqn.outs.index(v)]
        out = holders(body).get(out, out)
        maker = body.producers.get(out)
        if maker is not None:
            return _origin(maker, out)
    return v.name or _label(eqn), eqn.where


def _category(v: Var) -> str:
    return {"params": "parameters", "state": "optimizer state"}.get(v.name.partition("/")[0], "inputs")
