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

from .steps import Block, Step, Value

FEWEST = 3  # layers that are worth a loop


@dataclass(eq=False)
class Layers:
    """The parameters of equal layers: `rows[suffix][i]` is that of layer i."""

    count: int
    rows: list[list[Value]] = field(default_factory=list[list[Value]])


def stack_layers(block: Block) -> None:
    """Make one loop of each chain of equal layers; the inputs of its parameters become one stacked input each."""
    for layers in _candidates(block):
        window = _window(block, layers)
        chain = _chain(block, layers, *window) if window is not None else None
        if chain is not None:
            _replace(block, layers, chain)


def _candidates(block: Block) -> Iterator[Layers]:
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


def _window(block: Block, layers: Layers) -> tuple[int, int] | None:
    """The first step of the first layer, and the number of steps of each."""
    own = {v: i for row in layers.rows for i, v in enumerate(row)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(block.steps):
        for v in step.ins:
            if v in own:
                first.setdefault(own[v], at)
                last[own[v]] = at
    starts = [first.get(i, -1) for i in range(layers.count)]
    period = starts[1] - starts[0]
    if -1 in starts or period < 1 or any(b - a != period for a, b in itertools.pairwise(starts)):
        return None
    kinds = [_kind(step) for step in block.steps]
    start = starts[0]
    while start > 0 and len({kinds[start - 1 + i * period] for i in range(layers.count)}) == 1:
        start -= 1
    if start + layers.count * period > len(kinds) or max(last[i] - i * period for i in last) >= start + period:
        return None
    windows = {tuple(kinds[start + i * period :][:period]) for i in range(layers.count)}
    return (start, period) if len(windows) == 1 else None


def _kind(step: Step) -> Any:
    """Equal for steps that do the same to operands of the same types."""
    params = {
        k: v for k, v in step.params.items() if k not in ("name", "jaxpr", "branches", "jvp_jaxpr_fun", "ctx_mesh")
    }
    if step.bodies:
        params = {k: v for k, v in params.items() if isinstance(v, int | bool | str | tuple)}
    types = tuple((v.shape, str(v.dtype)) for v in (*step.ins, *step.outs))
    return step.primitive, types, str(sorted(params.items())), tuple(map(_kind_of_block, step.bodies))


def _kind_of_block(block: Block) -> Any:
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


@dataclass(eq=False)
class _Chain:
    """Equal layers, and what goes into each step: `inner` values of the layer, `carried` from the one before it, and
    `fixed` values of outside."""

    start: int
    period: int
    carried: dict[tuple[int, int], Value]  # (step of the layer, result): what the first layer reads instead
    fixed: dict[Value, None]
    sources: list[list[Any]]  # of each operand of each step of a layer


def _chain(block: Block, layers: Layers, start: int, period: int) -> _Chain | None:
    """How layers hang together; None if they do not do so alike, or if something else reads what is inside them."""
    steps, n = block.steps, layers.count
    row_of = {v: (k, i) for k, row in enumerate(layers.rows) for i, v in enumerate(row)}
    place = {
        v: (i, j, k) for i in range(n) for j in range(period) for k, v in enumerate(steps[start + i * period + j].outs)
    }
    carried: dict[tuple[int, int], Value] = {}
    fixed: dict[Value, None] = {}
    sources: list[list[Any]] = []

    def source(v: Value, i: int) -> Any:
        if v in place:
            layer, j, k = place[v]
            return ("inner", j, k) if layer == i else ("carried", j, k) if layer == i - 1 else None
        if v in row_of:
            k, layer = row_of[v]
            return ("row", k) if layer == i else None
        if v.const is not None:
            return ("constant", str(v.dtype), v.shape, np.asarray(v.const).tobytes()) if not v.is_key else None
        return ("fixed", v)

    for j in range(period):
        own: list[Any] = []
        for o, first in enumerate(steps[start + j].ins):
            later = {source(steps[start + i * period + j].ins[o], i) for i in range(1, n)}
            at_first = source(first, 0)
            if len(later) != 1 or None in later or at_first is None:
                return None
            (kind,) = later
            if kind[0] == "carried" and at_first[0] in ("fixed", "constant"):
                if source(carried.setdefault(kind[1:], first), 0) != at_first:
                    return None
            elif kind != at_first:
                return None
            elif kind[0] == "fixed":
                fixed[first] = None
            own.append(kind)
        sources.append(own)
    outside = [*steps[:start], *steps[start + n * period :]]
    read = {v for step in outside for v in step.ins} | set(block.outs)
    last = {steps[start + (n - 1) * period + j].outs[k] for j, k in carried}
    if any(v in place and v not in last for v in read) or any(v in row_of for v in read):
        return None
    return _Chain(start, period, carried, fixed, sources)


def _replace(block: Block, layers: Layers, chain: _Chain) -> None:
    """Put a scan in the place of the layers, and stacked inputs in the place of their parameters."""
    steps, n, start, period = block.steps, layers.count, chain.start, chain.period
    inside = steps[start : start + period]
    last = steps[start + (n - 1) * period : start + n * period]
    stacks = [_stacked(row) for row in layers.rows]
    fixed = {v: _copy(v) for v in chain.fixed}
    carried = {key: _copy(v) for key, v in chain.carried.items()}
    rows = [_copy(row[0]) for row in layers.rows]
    for step, sources in zip(inside, chain.sources, strict=True):
        step.ins = [
            fixed[v] if s[0] == "fixed" else carried[s[1:]] if s[0] == "carried" else rows[s[1]] if s[0] == "row" else v
            for v, s in zip(step.ins, sources, strict=True)
        ]
    body = Block([*fixed.values(), *carried.values(), *rows], [inside[j].outs[k] for j, k in carried], inside)
    outs = [_copy(inside[j].outs[k]) for j, k in carried]
    params = {"num_consts": len(fixed), "num_carry": len(carried), "length": n, "reverse": False}
    where = inside[0].where
    loop = Step("scan", [*fixed, *chain.carried.values(), *stacks], outs, params, where, None, [body])
    for out in outs:
        out.maker = loop
    new = {last[j].outs[k]: out for (j, k), out in zip(carried, outs, strict=True)}
    after = steps[start + n * period :]
    for step in after:
        step.ins = [new.get(v, v) for v in step.ins]
    block.outs = [new.get(v, v) for v in block.outs]
    block.steps = [*steps[:start], loop, *after]
    first = {row[0]: stack for row, stack in zip(layers.rows, stacks, strict=True)}
    gone = {v for row in layers.rows for v in row[1:]}
    block.ins = [first.get(v, v) for v in block.ins if v not in gone]


def _copy(v: Value) -> Value:
    return Value(v.shape, v.dtype, where=v.where)


def _stacked(row: Sequence[Value]) -> Value:
    stack = Value((len(row), *row[0].shape), row[0].dtype, where=row[0].where, label=row[0].label)
    stack.places = tuple(v.places[0] for v in row)
    return stack
