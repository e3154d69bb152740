"""Equal layers that the function writes out one after the other, as one loop over stacked parameters.

A Python loop over layers leaves its steps once for each layer. If the steps are equal, layer by layer, and each layer
continues what the one before computed, they become a scan with a dim `layer`, so that a program does not grow with the
number of layers, and a pipeline can split them. What differs between layers is stacked: inputs whose paths differ in
numbers, such as `params/layers/0/w`, random keys, and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .steps import BodyStep, OpenedJaxpr, Value

FEWEST = 3  # layers that are worth a loop
SHALLOW = 6  # steps that layers may have in common without being compared at length


def stack_layers(block: OpenedJaxpr) -> None:
    """Make one loop of each chain of equal layers; the inputs of its parameters become one stacked input each."""
    _slice_early(block)
    while (chain := _longest_chain(block)) is not None:
        chain.replace()


def _slice_early(block: OpenedJaxpr) -> None:
    """Put slices directly after what they cut, so that those of stacked parameters precede all layers."""
    cuts: dict[BodyStep | None, list[BodyStep]] = {}
    for step in block.steps:
        if step.primitive == "slice":
            cuts.setdefault(step.ins[0].maker, []).append(step)

    def run(step: BodyStep) -> Iterator[BodyStep]:
        yield step
        for cut in cuts.get(step, []):
            yield from run(cut)

    others = [step for step in block.steps if step.primitive != "slice"]
    block.steps = [each for step in [*cuts.get(None, []), *others] for each in run(step)]


def _longest_chain(block: OpenedJaxpr) -> _Chain | None:
    """Of the layers that cover most steps, the cut at which the fewest values pass from layer to layer."""
    numbers: dict[Any, int] = {}
    kinds = np.array([numbers.setdefault(_kind(step), len(numbers)) for step in block.steps])
    made = {v: (at, k) for at, step in enumerate(block.steps) for k, v in enumerate(step.outs)}
    for start, period, count, starts in sorted(_repeats(kinds), key=lambda each: (-each[1] * each[2], each[1])):
        chains = [_Chain(block, made, start + i, period, count) for i in range(starts)]
        if found := [chain for chain in chains if chain.holds()]:
            return min(found, key=lambda chain: len(chain.carried))
    return None


def _repeats(kinds: Any) -> Iterator[tuple[int, int, int, int]]:
    """(start, period, count, number of steps at which it may start) of what repeats."""
    for period in range(1, len(kinds) // FEWEST + 1):
        equal = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        ends = np.flatnonzero(equal[1:] != equal[:-1])
        for start, end in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True):
            count = (end - start) // period + 1
            if count >= FEWEST:
                yield start, period, count, (end - start) % period + 1


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

    ("inner", step, result) of the same layer, ("carried", step, result) of the layer before, ("row", values) that
    differ by layer, or ("fixed", value) of outside.
    """

    def __init__(
        self, block: OpenedJaxpr, made: dict[Value, tuple[int, int]], start: int, period: int, count: int
    ) -> None:
        self.block, self.made, self.start, self.period, self.count = block, made, start, period, count
        self.end = start + count * period
        self.carried: dict[tuple[int, int], Value] = {}  # (step, result): what the first layer reads instead
        self.fixed: dict[Any, Value] = {}
        self.rows: dict[tuple[Any, ...], Sequence[Value]] = {}
        self.sources: list[list[Any]] = []  # of each operand of each step of a layer

    def place(self, v: Value) -> tuple[int, int, int] | None:
        """The layer, step and result that make a value; None outside the layers."""
        at, result = self.made.get(v, (-1, 0))
        return (*divmod(at - self.start, self.period), result) if self.start <= at < self.end else None

    def holds(self) -> bool:
        """True if all layers hang together alike, and nothing else reads what is inside them."""
        for j in range(self.period):
            same = self.block.steps[self.start + j : self.end : self.period]
            operands = [self.operand(ins, same[0]) for ins in zip(*(step.ins for step in same), strict=True)]
            if None in operands:
                return False
            self.sources.append(operands)
        inputs = self.inputs()
        steps = [*self.block.steps[: self.start], *self.block.steps[self.end :]]
        read = {v for step in steps for v in step.ins} | set(self.block.outs)
        last = {self.block.steps[self.end - self.period + j].outs[k] for j, k in self.carried}
        stacked = {v for row in inputs for v in row}
        inside = any(v in stacked or (v not in last and self.place(v)) for v in read)
        stored = any(row[0].size > 1 and not row[0].is_key for row in self.rows.values())
        return bool(self.carried) and stored and not inside

    def inputs(self) -> list[Sequence[Value]]:
        """The rows of parameters."""
        return [row for row in self.rows.values() if row[0].places]

    def operand(self, values: Sequence[Value], step: BodyStep) -> Any:
        """The source of one operand, of which there is a value for each layer; None if layers differ."""
        places = [self.place(v) for v in values]
        if places[1] is None:
            return self.outside(values, step) if not any(places) else None
        steps_back = 1 - places[1][0]
        if any(place != (i - steps_back, *places[1][1:]) for i, place in enumerate(places) if i or not steps_back):
            return None
        if steps_back == 0:
            return "inner", *places[1][1:]
        key, start = places[1][1:], values[0]
        same = _identity(self.carried.setdefault(key, start)) == _identity(start)
        return ("carried", *key) if steps_back == 1 and places[0] is None and same else None

    def outside(self, values: Sequence[Value], step: BodyStep) -> Any:
        """The source of an operand that no layer makes."""
        keys = tuple(map(_identity, values))
        if len(set(keys)) == 1 or len({_identity(v, SHALLOW) for v in values}) == 1:
            self.fixed[keys[0]] = values[0]
            return "fixed", keys[0]
        if len(set(keys)) < len(keys) or not _may_be_stacked(values, step):
            return None
        self.rows[keys] = values
        return "row", keys

    def replace(self) -> None:
        """Put a scan in the place of the layers, and stacked inputs in the place of their parameters."""
        block = self.block
        stacks = {keys: _stacked(row) for keys, row in self.rows.items()}
        loop, body = self.loop(list(stacks.values()))
        last = block.steps[self.end - self.period : self.end]
        new = {last[j].outs[k]: out for (j, k), out in zip(self.carried, loop.outs, strict=True)}
        after = block.steps[self.end :]
        for step in after:
            step.ins = [new.get(v, v) for v in step.ins]
        loop.bodies = [body]
        block.outs = [new.get(v, v) for v in block.outs]
        made = [stack.maker for stack in stacks.values() if stack.maker is not None]
        block.steps = [*block.steps[: self.start], *made, loop, *after]
        first = {row[0]: stacks[keys] for keys, row in self.rows.items() if row[0].places}
        gone = {v for row in self.inputs() for v in row[1:]}
        block.ins = [first.get(v, v) for v in block.ins if v not in gone]

    def loop(self, stacks: Sequence[Value]) -> tuple[BodyStep, OpenedJaxpr]:
        """The scan over the layers, and its body: the steps of the first layer, with inputs of their own."""
        inside = self.block.steps[self.start : self.start + self.period]
        fixed = {("fixed", key): _copy(v) for key, v in self.fixed.items() if v.const is None}
        carried = {("carried", *key): _copy(v) for key, v in self.carried.items()}
        rows = {("row", keys): _copy(row[0]) for keys, row in self.rows.items()}
        new: dict[Any, Value] = {**fixed, **carried, **rows}
        for step, sources in zip(inside, self.sources, strict=True):
            step.ins = [new.get(s, v) for v, s in zip(step.ins, sources, strict=True)]
        results = [inside[j].outs[k] for j, k in self.carried]
        params = {"num_consts": len(fixed), "num_carry": len(carried), "length": self.count, "reverse": False}
        ins = [*(v for v in self.fixed.values() if v.const is None), *self.carried.values(), *stacks]
        loop = BodyStep("scan", ins, list(map(_copy, results)), params, inside[0].where)
        for out in loop.outs:
            out.maker = loop
        return loop, OpenedJaxpr(list(new.values()), results, inside)


def _identity(v: Value, depth: int = 0) -> Any:
    """Equal for a value and itself, for equal constants, and for what `depth` equal steps make of these."""
    if v.const is None:
        if depth == 0 or v.maker is None:
            return v
        return _kind(v.maker), v.maker.outs.index(v), tuple(_identity(w, depth - 1) for w in v.maker.ins)
    return str(v.dtype), v.shape, np.asarray(jax.random.key_data(v.const) if v.is_key else v.const).tobytes()


def _may_be_stacked(row: Sequence[Value], step: BodyStep) -> bool:
    """True for parameters whose paths differ in numbers, slices of one, keys, and numbers that do not count."""
    first = row[0]
    if any(v.places for v in row):
        return all(len(v.places) == 1 for v in row) and len({re.sub(r"_?\d+", "", v.label) for v in row}) == 1
    number = first.is_key or (first.size == 1 and (first.is_floating or step.primitive.startswith("random_")))
    return len({v.const is None for v in row}) == 1 and (number or _cut_from(row) is not None)


def _cut_from(row: Sequence[Value]) -> Value | None:
    """The value of which a row has the slices, one after the other, along axis 0."""
    makers = [v.maker for v in row if v.maker is not None and v.maker.primitive == "slice"]
    bases = {step.ins[0] for step in makers}
    if len(makers) != len(row) or len(bases) != 1:
        return None
    (base,) = bases
    starts = [(*step.params["start_indices"], *step.params["limit_indices"]) for step in makers]
    wanted = [(i, *[0] * (len(base.shape) - 1), i + 1, *base.shape[1:]) for i in range(base.shape[0])]
    return base if starts == wanted else None


def _copy(v: Value) -> Value:
    return Value(v.shape, v.dtype, where=v.where)


def _stacked(row: Sequence[Value]) -> Value:
    """One value for those of all layers: an input, a constant, or the result of a step that stacks them."""
    first = row[0]
    stack = Value((len(row), *first.shape), first.dtype, where=first.where, label=first.label)
    stack.places = tuple(place for v in row for place in v.places)
    if first.const is not None:
        stack.const = jax.numpy.stack([v.const for v in row]) if first.is_key else np.stack([v.const for v in row])
    elif (base := _cut_from(row)) is not None:
        params = {"shape": stack.shape, "broadcast_dimensions": (0, *range(2, len(stack.shape))), "sharding": None}
        stack.maker = BodyStep("broadcast_in_dim", [base], [stack], params, first.where)
    elif not first.places:
        stack.maker = BodyStep("stack", list(row), [stack], {"axis": 0}, first.where)
    return stack
