"""Attention to keys that other axes split than the queries, such as a cache: each device attends to its own keys.

The devices exchange the logarithms of their sums of exponentials. With them, each weighs its result, and the results
are a pending sum.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ....backend import Local
from ....backend.attention import AttentionKernel
from ....dims import Dim, Shape
from ....ir import Because, Cause, Eqn, Fuses, Labels, Op, Product, Type, Var
from ....layouts import Sharding
from ....layouts.sharding import Axes
from ....ops.attention.blocks import Canonical, Names, wide_dtype
from ....ops.attention.records import ATTENTION
from ...collectives import AllGather
from .call import AttentionCall

__all__ = ["merged"]


def _part_type(*types: Type, how: Names, parts: Dim, **params: Any) -> tuple[Type, ...]:
    return tuple(Type((*t.dims, parts), t.dtype) for t in ATTENTION.infer(types, {"how": how, **params}))


def _part_kernel(
    c: Local, *ins: Any, how: Names, causal: bool, window: int | None, parts: Dim, kernel: AttentionKernel | None = None
) -> Any:
    """The attention to the device's own keys, as the one element of the dim `parts` that it stores."""
    form = Canonical.of(c, how, ins, kernel)
    out, lse = c.xp.attention(form.operands(causal, window))
    blocks = [dataclasses.replace(b, dims=b.dims[:-1], sizes=b.sizes[:-1], axes=b.axes[:-1]) for b in c.outs]
    return tuple(x[..., None] for x in form.results(out, lse, blocks))


def _part_shardings(eqn: Eqn) -> list[Sharding]:
    how, parts = eqn.params["how"], eqn.params["parts"]
    q, k = eqn.ins[:2]
    split = {**dict(q.sharding.split), parts.name: k.sharding.axes(how.keys)}
    return [Sharding.of(split)] * 2


ATTENTION_PART = Op(
    "attention_part",
    type=_part_type,
    kernel=_part_kernel,
    flops=ATTENTION.flops,
    shardings=_part_shardings,
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
    def named(shape: Shape, whole: bool = False) -> dict[str, str | None]:
        return {d.name: None if whole and d == parts else d.name for d in shape}

    results = _weigh_type(out, lse, parts=parts, axes=axes, dtype=dtype)
    return Labels((named(out.dims), named(lse.dims, True)), tuple(named(t.dims) for t in results))


WEIGH_PART = Op(
    "weigh_part",
    type=_weigh_type,
    kernel=_weigh_kernel,
    rule=_weigh_rule,
    shardings=_weigh_shardings,
    fuses=Fuses.MAP,
)


def merged(call: AttentionCall) -> None:
    """Add the attention of each device to its own keys, and the sum of the results."""
    eqn, scope = call.eqn, call.scope
    ins, (out, lse) = call.ins(), eqn.outs
    parts = Dim(f"{call.how.keys}__parts", call.count)
    wide = {**eqn.params, "how": dataclasses.replace(call.how, wide=True), "parts": parts}
    types = [Type((*v.dims, parts), wide_dtype(v.dtype)) for v in eqn.outs]
    part_eqn = Eqn(ATTENTION_PART, tuple(ins), (), wide, eqn.where, eqn.backward)
    part, part_lse = (Var(t.dims, t.dtype, "", s) for t, s in zip(types, _part_shardings(part_eqn), strict=True))
    every = Var(part_lse.dims, part_lse.dtype, "", part_lse.sharding.with_split(parts.name, ()))
    split = {d: axes for d, axes in part.sharding.split if d != parts.name}
    results = (scope.define(out, Sharding.of(split, call.keys)), scope.define(lse, Sharding.of(split)))
    summary = Cause(Because.SUMMARY, eqn.operation.name, (call.how.keys,), what="a logarithm of the sum for")
    weigh = {"parts": parts, "axes": call.keys, "dtype": out.dtype}
    scope.eqns += [
        part_eqn.replace(outs=(part, part_lse)),
        Eqn(AllGather(parts.name, call.keys), (part_lse,), (every,), {}, eqn.where, eqn.backward, summary),
        Eqn(WEIGH_PART, (part, every), results, weigh, eqn.where, eqn.backward),
    ]
    cause = Cause(Because.REDUCES, eqn.operation.name, (call.how.keys,), what="sum")
    scope.reasons[out] = (cause, eqn.where, eqn.backward)
