"""`ATTENTION_TURN` and its gradient: a device attends to the block of keys and values that it has in this turn.

Turn t of a device reads the block t places before its own. The forward turn merges two results of attention to disjoint
sets of keys: each is weighed by the exponential of its logarithm of the sum of exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....backend import Block, Local
from ....backend.attention import Kernel, Span
from ....dims import names
from ....ir import Eqn, Labels, Op, Product, Type
from ....layouts import Sharding
from ....layouts.sharding import Axes
from ....ops.attention.blocks import Canonical, Names
from ....ops.attention.records import MOVING, pairs_seen, products

__all__ = ["ATTENTION_TURN", "ATTENTION_TURN_GRAD", "chunk"]


def chunk(c: Local, device: Any, n: int, half: int) -> Any:
    """The number of one half block of a device in zigzag order: device i has i and 2 n - 1 - i, the even one first."""
    first = device % 2 == half
    return c.xp.where(first, device, 2 * n - 1 - device)


def _spans(c: Local, device: Any, size: int, axes: Axes, zigzag: bool) -> tuple[Span, ...]:
    """The positions of the block that a device has of its own."""
    if not zigzag:
        return (Span(device * size, size),)
    n = c.count(axes)
    return tuple(Span(chunk(c, device, n, half) * (size // 2), size // 2) for half in (0, 1))


def _operands(
    c: Local, ins: Any, turn: Any, how: Names, causal: bool, window: Any, axes: Axes, zigzag: bool, kernel: Any
) -> Any:
    form = Canonical.of(c, how, ins, kernel)
    n, own = c.count(axes), c.xp.asarray(c.index(axes), np.int32)
    size = form.blocks["k"].size(form.keys)
    queries = _spans(c, own, form.blocks["q"].size(form.length), axes, zigzag)
    keys = _spans(c, (own - turn) % n, size, axes, zigzag)
    return form, form.operands(causal, window, queries, keys, n * size)


def _kernel(
    c: Local,
    *ins: Any,
    how: Names,
    causal: bool,
    window: int | None,
    axes: Axes,
    zigzag: bool | None,
    turns: int,
    kernel: Kernel | None = None,
) -> Any:
    *operands, out, lse, turn = ins
    form, arrays = _operands(c, operands, turn, how, causal, window, axes, bool(zigzag), kernel)
    more, lse_more = c.xp.attention(arrays)
    return _merged(c, out, lse, *form.results(more, lse_more, c.outs))


def _merged(c: Local, out: Any, lse: Any, more: Any, lse_more: Any) -> tuple[Any, Any]:
    """The attention to two disjoint sets of keys, from the attention to each of them."""
    top = c.xp.maximum(lse, lse_more)
    top = c.xp.where(top == -np.inf, 0, top)
    a, b = c.xp.exp(lse - top), c.xp.exp(lse_more - top)
    total = a + b
    some = c.xp.where(total == 0, 1, total)
    wide = Block(c.outs[0].shape, c.outs[0].sizes, c.outs[0].axes)
    left, right = (c.align(x / some, c.outs[1], wide) for x in (a, b))
    return out * left + more * right, c.xp.where(total == 0, -np.inf, top + c.xp.log(some))


def _grad_kernel(
    c: Local,
    *ins: Any,
    how: Names,
    causal: bool,
    window: int | None,
    axes: Axes,
    zigzag: bool | None,
    turns: int,
    kernel: Kernel | None = None,
) -> Any:
    n = len(c.outs) + 1
    operands, sums, turn = ins[:-n], ins[-n:-1], ins[-1]
    form, arrays = _operands(c, operands, turn, how, causal, window, axes, bool(zigzag), kernel)
    made = form.cotangents(arrays)
    if len(made) > 3:
        made[3] = form.bias_cotangent(made[3], arrays.keys, form.blocks["k"].size(form.keys) * c.count(axes))
    return tuple(x + y for x, y in zip(sums, made, strict=True))


@dataclass(frozen=True)
class _Work:
    """The pairs of a query and a key that a device computes, on the mean of its turns."""

    shapes: Any
    ins: Any
    how: Names

    def pairs(self, causal: bool, window: int | None, zigzag: bool | None, turns: int, blocks: Any) -> float:
        """Those of the device that computes most: with blocks in order under a causal mask, the last one."""
        queries = dict(zip(names(self.shapes[0]), self.ins[0], strict=True))[self.how.length]
        length = next(d.size for d in self.shapes[0] if d.name == self.how.length)
        memory = next(d.size for d in self.shapes[1] if d.name == self.how.keys)
        if zigzag:
            return pairs_seen(0, length, memory, causal, window, blocks) / turns**2
        return pairs_seen(max(0, length - queries), queries, memory, causal, window, blocks) / turns


def _turn_flops(
    ins: Any,
    outs: Any,
    *,
    shapes: Any,
    how: Names,
    causal: bool,
    window: int | None,
    zigzag: bool | None,
    turns: int,
    blocks: Any = None,
) -> float:
    return _Work(shapes, ins, how).pairs(causal, window, zigzag, turns, blocks) * products(ins, shapes, how, 1, 1)


def _turn_grad_flops(
    ins: Any,
    outs: Any,
    *,
    shapes: Any,
    how: Names,
    causal: bool,
    window: int | None,
    zigzag: bool | None,
    turns: int,
    blocks: Any = None,
) -> float:
    return _Work(shapes, ins, how).pairs(causal, window, zigzag, turns, blocks) * products(ins, shapes, how, 3, 2)


def _turn_type(*types: Type, **_: Any) -> tuple[Type, ...]:
    """The types of the result and its logarithm so far, the last operands but the turn."""
    return types[-3:-1]


def _turn_grad_type(*types: Type, how: Names, **_: Any) -> tuple[Type, ...]:
    """The types of the cotangents so far."""
    return types[-1 - len([role for role in MOVING if role in ("q", "k", "v", *how.extras)]) : -1]


def _labels(types: tuple[Type, ...], outs: int) -> Labels:
    """Dims by name: every operand is this device's block of it."""
    ins: list[dict[str, str | None]] = [{d.name: d.name for d in t.shape} for t in types]
    return Labels(tuple(ins), tuple(ins[-outs - 1 : -1]))


def _turn_rule(*types: Type, **_: Any) -> Labels:
    return _labels(types, 2)


def _turn_grad_rule(*types: Type, how: Names, **_: Any) -> Labels:
    return _labels(types, len(_turn_grad_type(*types, how=how)))


def _shardings(eqn: Eqn) -> list[Sharding]:
    n = len(eqn.outs)
    return [v.sharding for v in eqn.ins[-n - 1 : -1]]  # no label can say that a block is another device's


ATTENTION_TURN = Op(
    "attention_turn",
    type=_turn_type,
    kernel=_kernel,
    flops=_turn_flops,
    rule=_turn_rule,
    shardings=_shardings,
    product=Product.ATTENTION,
)
ATTENTION_TURN_GRAD = Op(
    "attention_turn_grad",
    type=_turn_grad_type,
    kernel=_grad_kernel,
    flops=_turn_grad_flops,
    rule=_turn_grad_rule,
    shardings=_shardings,
    product=Product.ATTENTION,
)
