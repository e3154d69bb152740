"""Equal layers that the function writes out one after the other, as one loop over stacked parameters.

A Python loop over layers leaves its steps once for each layer. Inputs whose paths differ in one number, such as
`params/layers/0/w`, are the parameters of layers. If the steps between their uses are equal, layer by layer, they
become a scan with a dim `layer`, so that a program does not grow with the number of layers, and a pipeline can split
them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .steps import BodyStep, OpenedJaxpr, Value

FEWEST = 3  # layers that are worth a loop


@dataclass(eq=False)
class Layers:
    """The parameters of equal layers: `rows[suffix][i]` is that of layer i."""

    count: int
    rows: list[list[Value]] = field(default_factory=list[list[Value]])


def stack_layers(block: OpenedJaxpr) -> None:
    """Make one loop of each chain of equal layers; the inputs of its parameters become one stacked input each."""
    for layers in _candidates(block):
        window = _window(block, layers)
        if window is not None and (chain := _Chain(block, layers, *window)).holds():
            chain.replace()


def _candidates(block: OpenedJaxpr) -> Iterator[Layers]:
    """Inputs whose paths differ in one number, all numbers from 0, and which are alike."""
    found: dict[tuple[str, ...], dict[str, dict[int, Value]]] = {}
    for value in block.ins:
        words = value.label.split("/")
        for i, word in enumerate(words):
            if match := re.fullmatch(r"(.*?)(\d+)", word):
                before, after = (*words[:i], match[1]), "/".join(words[i + 1 :])
                found.setdefault(before, {}).setdefault(after, {})[int(match[2])] = value
    for suffixes in found.values():
        counts = {tuple(sorted(each)) for each in suffixes.values()}
        n = len(next(iter(counts)))
        rows = [[each[i] for i in range(n)] for each in suffixes.values()] if counts == {tuple(range(n))} else []
        alike = all(
            v.shape == row[0].shape and v.dtype == row[0].dtype and not v.is_stacked for row in rows for v in row
        )
        if n >= FEWEST and rows and alike:
            yield Layers(n, rows)


def _window(block: OpenedJaxpr, layers: Layers) -> tuple[int, int] | None:
    """The first step of the first layer, and the number of steps of each; None if layers are not equal."""
    first, last = _uses(block, layers)
    starts = [first.get(i, -1) for i in range(layers.count)]
    period = starts[1] - starts[0]
    if -1 in starts or period < 1 or any(b - a != period for a, b in itertools.pairwise(starts)):
        return None
    kinds = [_kind(step) for step in block.steps]
    start = starts[0]
    while start > 0 and len(set(kinds[start - 1 : start - 1 + layers.count * period : period])) == 1:
        start -= 1
    end = start + layers.count * period
    if end > len(kinds) or max(last[i] - i * period for i in last) >= start + period:
        return None
    equal = kinds[start : end - period] == kinds[start + period : end]
    return (start, period) if equal else None


def _uses(block: OpenedJaxpr, layers: Layers) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last step that reads parameters of each layer."""
    own = {v: i for row in layers.rows for i, v in enumerate(row)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(block.steps):
        for v in step.ins:
            if v in own:
                first.setdefault(own[v], at)
                last[own[v]] = at
    return first, last


def _kind(step: BodyStep) -> Any:
    """Equal for steps that do the same to operands of the same types."""
    params = {
        k: v for k, v in step.params.items() if k not in ("name", "jaxpr", "branches", "jvp_jaxpr_fun", "ctx_mesh")
    }
    if step.bodies:
        params = {k: v for k, v in params.items() if isinstance(v, int | bool | str | tuple)}
    types = tuple((v.shape, str(v.dtype)) for v in (*step.ins, *step.outs))
    return step.primitive, types, str(sorted(params.items())), tuple(map(_kind_of_block, step.bodies))


def _kind_of_block(block: OpenedJaxpr) -> Any:
    numbers: dict[Value, int] = {}
    rows: list[Any] = []
    for v in block.ins:
        numbers[v] = len(numbers)
    for step in block.steps:
        ins = [numbers.get(v, v.const if v.const is None else np.asarray(v.const).tobytes()) for v in step.ins]
        rows.append((_kind(step), tuple(ins)))
        for v in step.outs:
            numbers[v] = len(numbers)
    return tuple(rows), tuple(numbers.get(v) for v in block.outs)


class _Chain:
    """Equal layers, and where each operand of a step comes from.

    ("inner", step, result) of the same layer, ("carried", step, result) of the layer before, ("row", k) of the
    parameters, ("fixed", value) of outside, or ("constant", ...).
    """

    def __init__(self, block: OpenedJaxpr, layers: Layers, start: int, period: int) -> None:
        self.block, self.layers, self.start, self.period = block, layers, start, period
        self.end = start + layers.count * period
        self.row_of = {v: (k, i) for k, row in enumerate(layers.rows) for i, v in enumerate(row)}
        self.place = {
            v: (*divmod(at, period), k)
            for at, step in enumerate(block.steps[start : self.end])
            for k, v in enumerate(step.outs)
        }
        self.carried: dict[tuple[int, int], Value] = {}  # (step, result): what the first layer reads instead
        self.fixed: dict[Value, None] = {}
        self.sources: list[list[Any]] = []  # of each operand of each step of a layer

    def source(self, v: Value, layer: int) -> Any:
        """Where layer i finds a value; None if it may not read it."""
        if v in self.place:
            i, step, result = self.place[v]
            return {layer: ("inner", step, result), layer - 1: ("carried", step, result)}.get(i)
        if v in self.row_of:
            k, i = self.row_of[v]
            return ("row", k) if layer == i else None
        if v.const is not None:
            return None if v.is_key else ("constant", str(v.dtype), v.shape, np.asarray(v.const).tobytes())
        return ("fixed", v)

    def holds(self) -> bool:
        """True if all layers hang together alike, and nothing else reads what is inside them."""
        for j in range(self.period):
            same = self.block.steps[self.start + j : self.end : self.period]
            operands = [self.operand(ins) for ins in zip(*(step.ins for step in same), strict=True)]
            if None in operands:
                return False
            self.sources.append(operands)
        steps, place = self.block.steps, self.place
        outside = [*steps[: self.start], *steps[self.end :]]
        read = {v for step in outside for v in step.ins} | set(self.block.outs)
        last = {steps[self.end - self.period + j].outs[k] for j, k in self.carried}
        return not any((v in place and v not in last) or v in self.row_of for v in read)

    def operand(self, values: Sequence[Value]) -> Any:
        """The source of one operand, of which there is a value for each layer; None if layers differ."""
        at_first, *later = (self.source(v, i) for i, v in enumerate(values))
        kind = later[0]
        if kind is None or at_first is None or any(each != kind for each in later):
            return None
        if kind[0] == "carried":
            start = self.carried.setdefault(kind[1:], values[0])
            return kind if at_first[0] in ("fixed", "constant") and self.source(start, 0) == at_first else None
        if kind[0] == "fixed":
            self.fixed[values[0]] = None
        return kind if kind == at_first else None

    def replace(self) -> None:
        """Put a scan in the place of the layers, and stacked inputs in the place of their parameters."""
        block, rows = self.block, self.layers.rows
        stacks = [_stacked(row) for row in rows]
        loop, body = self.loop(stacks)
        last = block.steps[self.end - self.period : self.end]
        new = {last[j].outs[k]: out for (j, k), out in zip(self.carried, loop.outs, strict=True)}
        after = block.steps[self.end :]
        for step in after:
            step.ins = [new.get(v, v) for v in step.ins]
        loop.bodies = [body]
        block.outs = [new.get(v, v) for v in block.outs]
        block.steps = [*block.steps[: self.start], loop, *after]
        first = {row[0]: stack for row, stack in zip(rows, stacks, strict=True)}
        gone = {v for row in rows for v in row[1:]}
        block.ins = [first.get(v, v) for v in block.ins if v not in gone]

    def loop(self, stacks: Sequence[Value]) -> tuple[BodyStep, OpenedJaxpr]:
        """The scan over the layers, and its body: the steps of the first layer, with inputs of their own."""
        inside = self.block.steps[self.start : self.start + self.period]
        fixed = {("fixed", v): _copy(v) for v in self.fixed}
        carried = {("carried", *key): _copy(v) for key, v in self.carried.items()}
        rows = {("row", k): _copy(row[0]) for k, row in enumerate(self.layers.rows)}
        new: dict[Any, Value] = {**fixed, **carried, **rows}
        for step, sources in zip(inside, self.sources, strict=True):
            step.ins = [new.get(s, v) for v, s in zip(step.ins, sources, strict=True)]
        results = [inside[j].outs[k] for j, k in self.carried]
        params = {"num_consts": len(fixed), "num_carry": len(carried), "length": self.layers.count, "reverse": False}
        ins = [*self.fixed, *self.carried.values(), *stacks]
        loop = BodyStep("scan", ins, list(map(_copy, results)), params, inside[0].where)
        for out in loop.outs:
            out.maker = loop
        return loop, OpenedJaxpr(list(new.values()), results, inside)


def _copy(v: Value) -> Value:
    return Value(v.shape, v.dtype, where=v.where)


def _stacked(row: Sequence[Value]) -> Value:
    stack = Value((len(row), *row[0].shape), row[0].dtype, where=row[0].where, label=row[0].label)
    stack.places = tuple(v.places[0] for v in row)
    return stack
