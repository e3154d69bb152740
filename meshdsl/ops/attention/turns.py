"""`ATTENTION_TURN` and its gradient: a device attends to the block of keys and values that it has in this turn.

Turn t of a device reads the block t places before its own. The forward turn merges two results of attention to disjoint
sets of keys: each is weighed by the exponential of its logarithm of the sum of exponentials.

`ATTENTION_PART`: a device attends to its own keys, which are a part of all. `WEIGH_PART` weighs the result in the same
way, so that those of all devices are a pending sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ...backend import Local
from ...dims import Dim, names
from ...ir import Eqn, Fuses, Labels, Op, Product, Type, named
from ...layouts import Sharding
from ...layouts.sharding import Axes
from .arrays import Arrays, Span
from .kernels import AttentionKernel
from .operands import Canonical
from .records import ATTENTION, MOVING, products
from .spec import AttentionSpec


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
    c: Local,
    ins: Any,
    turn: Any,
    *,
    how: AttentionSpec,
    axes: Axes,
    zigzag: bool | None,
    turns: int,
    kernel: AttentionKernel | None = None,
) -> tuple[Canonical, Arrays]:
    """The operands of a turn, and those of its computation."""
    form = Canonical.of(c, how, ins, kernel)
    n, own = c.count(axes), c.xp.asarray(c.index(axes), np.int32)
    size = form.blocks["k"].size(form.keys)
    queries = _spans(c, own, form.blocks["q"].size(form.length), axes, bool(zigzag))
    keys = _spans(c, (own - turn) % n, size, axes, bool(zigzag))
    return form, form.operands(queries, keys)


def _kernel(c: Local, *ins: Any, **params: Any) -> Any:
    *operands, out, lse, turn = ins
    form, arrays = _operands(c, operands, turn, **params)
    return _merged(c, out, lse, *form.results(arrays, c.outs))


def _merged(c: Local, out: Any, lse: Any, more: Any, lse_more: Any) -> tuple[Any, Any]:
    """The attention to two disjoint sets of keys, from the attention to each of them."""
    top = c.xp.maximum(lse, lse_more)
    top = c.xp.where(top == -np.inf, 0, top)
    a, b = c.xp.exp(lse - top), c.xp.exp(lse_more - top)
    total = a + b
    some = c.xp.where(total == 0, 1, total)
    left, right = (c.align(x / some, c.outs[1], c.outs[0]) for x in (a, b))
    return out * left + more * right, c.xp.where(total == 0, -np.inf, top + c.xp.log(some))


def _grad_kernel(c: Local, *ins: Any, **params: Any) -> Any:
    n = len(c.outs) + 1
    operands, sums, turn = ins[:-n], ins[-n:-1], ins[-1]
    form, arrays = _operands(c, operands, turn, **params)
    return tuple(x + y for x, y in zip(sums, form.cotangents(arrays), strict=True))


def _pairs(
    ins: Any,
    shapes: Any,
    how: AttentionSpec,
    zigzag: bool | None,
    turns: int,
    blocks: Any = None,
    **_: Any,
) -> float:
    """The pairs of a query and a key that a device computes, on the mean of its turns.

    With blocks in order under a causal mask, those of the last device, which computes most.
    """
    queries = dict(zip(names(shapes[0]), ins[0], strict=True))[how.length]
    length = next(d.size for d in shapes[0] if d.name == how.length)
    memory = next(d.size for d in shapes[1] if d.name == how.keys)
    if zigzag:
        return how.sees.number(0, length, memory, blocks) / turns**2
    return how.sees.number(max(0, length - queries), queries, memory, blocks) / turns


def _turn(
    name: str, kernel: Callable[..., Any], results: Callable[[AttentionSpec], int], counts: tuple[int, int]
) -> Op:
    """The operation of a turn, whose last operands are its results so far and the number of the turn.

    `results(how)` is the number of results; `counts` are the last arguments of `products`.
    """

    def so_far(*types: Type, how: AttentionSpec, **_: Any) -> tuple[Type, ...]:
        return types[-1 - results(how) : -1]

    def labels(*types: Type, how: AttentionSpec, **_: Any) -> Labels:
        """Dims by name: every operand is this device's block of it."""
        ins = [named(t.dims) for t in types]
        return Labels(tuple(ins), tuple(ins[-1 - results(how) : -1]))

    def shardings(eqn: Eqn) -> list[Sharding]:
        """Those so far: no label can say that a block is another device's."""
        return [v.sharding for v in eqn.ins[-1 - len(eqn.outs) : -1]]

    def flops(ins: Any, outs: Any, *, shapes: Any, how: AttentionSpec, **params: Any) -> float:
        return _pairs(ins, shapes, how, **params) * products(ins, shapes, how, *counts)

    return Op(
        name, type=so_far, kernel=kernel, flops=flops, rule=labels, shardings=shardings, product=Product.ATTENTION
    )


def _cotangents(how: AttentionSpec) -> int:
    return len([role for role in MOVING if role in ("q", "k", "v", *how.extras)])


ATTENTION_TURN = _turn("attention_turn", _kernel, lambda how: 2, (1, 1))
ATTENTION_TURN_GRAD = _turn("attention_turn_grad", _grad_kernel, _cotangents, (3, 2))


def _part_type(*types: Type, how: AttentionSpec, parts: Dim, **_: Any) -> tuple[Type, ...]:
    return tuple(Type((*t.dims, parts), t.dtype) for t in ATTENTION.infer(types, {"how": how}))


def _part_kernel(c: Local, *ins: Any, how: AttentionSpec, parts: Dim, kernel: AttentionKernel | None = None) -> Any:
    """The attention to the device's own keys, as the one element of the dim `parts` that it stores."""
    form = Canonical.of(c, how, ins, kernel)
    blocks = [dataclasses.replace(b, dims=b.dims[:-1], sizes=b.sizes[:-1], axes=b.axes[:-1]) for b in c.outs]
    return tuple(x[..., None] for x in form.results(form.operands(), blocks))


def part_shardings(eqn: Eqn) -> list[Sharding]:
    how, parts = eqn.params["how"], eqn.params["parts"]
    q, k = eqn.ins[:2]
    split = {**dict(q.sharding.split), parts.name: k.sharding.axes(how.keys)}
    return [Sharding.of(split)] * 2


ATTENTION_PART = Op(
    "attention_part",
    type=_part_type,
    kernel=_part_kernel,
    flops=ATTENTION.flops,
    shardings=part_shardings,
    inside_blocks=True,
    product=Product.ATTENTION,
)


def _weigh_kernel(c: Local, out: Any, lse: Any, *, parts: Dim, axes: Axes, dtype: Any) -> Any:
    """The device's result with the weight of its keys among all keys, and the logarithm for all keys."""
    top = lse.max(-1)
    top = c.xp.where(top == -np.inf, 0, top)
    total = c.xp.exp(lse - top[..., None]).sum(-1)
    own = c.xp.dynamic_slice(lse, c.xp.asarray(c.index(axes), np.int32), 1, lse.ndim - 1)[..., 0]
    weight = c.xp.exp(own - top) / c.xp.where(total == 0, 1, total)
    weighed = out[..., 0] * c.align(weight, c.outs[1], c.outs[0])
    return weighed.astype(dtype), c.xp.where(total == 0, -np.inf, c.xp.log(c.xp.where(total == 0, 1, total)) + top)


def _weigh_shardings(eqn: Eqn) -> list[Sharding]:
    out, parts = eqn.ins[0].sharding, eqn.params["parts"]
    split = {d: axes for d, axes in out.split if d != parts.name}
    return [Sharding.of(split, out.axes(parts)), Sharding.of(split)]


def _weigh_type(out: Type, lse: Type, *, parts: Dim, axes: Axes, dtype: Any) -> tuple[Type, ...]:
    return Type(out.dims[:-1], dtype), Type(lse.dims[:-1], lse.dtype)


def _weigh_rule(out: Type, lse: Type, *, parts: Dim, axes: Axes, dtype: Any) -> Labels:
    results = _weigh_type(out, lse, parts=parts, axes=axes, dtype=dtype)
    return Labels((named(out.dims), named(lse.dims, [parts.name])), tuple(named(t.dims) for t in results))


WEIGH_PART = Op(
    "weigh_part",
    type=_weigh_type,
    kernel=_weigh_kernel,
    rule=_weigh_rule,
    shardings=_weigh_shardings,
    fuses=Fuses.MAP,
)
