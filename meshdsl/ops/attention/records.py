"""The records of attention and of its gradient.

Attention has two results: the weighted values, and the logarithm of the sum of exponentials of each query's scores,
from which its gradient computes the weights again. `lowering.partition.attention` handles split positions of keys.

Attention over all places of one more dim, for `md.vmap`.

A dim that only queries have shares keys and values, so queries alone may be mapped. A mapped offset puts the queries of
each place at other positions; positions are not arrays with places, so the causal mask and the window become a mask.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...backend import Local
from ...dims import Dim, Shape, fresh_dim, names
from ...ir import Eqn, Labels, Op, Product, Reduce, Type
from ...layouts import Sharding
from ...trace import Tensor, bind
from ..indexing import iota
from ..reductions import broadcast, spread
from .kernels import AttentionKernel
from .operands import Canonical
from .plain import plain_gradient
from .sees import EVERY_KEY
from .spec import RESIDUALS, AttentionSpec, value_dim, wide_dtype

MOVING = ("q", "k", "v", "bias")  # the operands that have a gradient


def _type(*types: Type, how: AttentionSpec, **_: Any) -> tuple[Type, ...]:
    q, k, v = types[:3]
    value = value_dim(k.dims, v.dims, how)
    out = tuple(value if d.name == how.over else d for d in q.dims)
    return Type(out, how.dtype(v.dtype)), Type(tuple(d for d in q.dims if d.name != how.over), wide_dtype(v.dtype))


def _grad_type(*types: Type, how: AttentionSpec, **_: Any) -> tuple[Type, ...]:
    roles = how.roles(types)
    return tuple(Type(roles[r].dims, how.dtype(roles[r].dtype)) for r in MOVING if r in roles)


def _kernel(c: Local, *ins: Any, how: AttentionSpec, kernel: AttentionKernel | None = None) -> Any:
    form = Canonical.of(c, how, ins, kernel)
    out, lse = form.results(form.operands(), c.outs)
    return out.astype(how.dtype(ins[2].dtype)), lse


def _grad_kernel(c: Local, *ins: Any, how: AttentionSpec, kernel: AttentionKernel | None = None) -> Any:
    form = Canonical.of(c, how, ins, kernel)
    gradients = form.cotangents(form.operands())
    dtypes = [form.arrays[role].dtype for role in MOVING if role in form.arrays]
    return tuple(y.astype(how.dtype(dtype)) for y, dtype in zip(gradients, dtypes, strict=True))


def products(ins: Any, shapes: Sequence[Shape], how: AttentionSpec, heads: int, values: int) -> float:
    """FLOPs for each pair of a query and a key: `heads` products over the contracted dim, `values` over the values'."""
    q, v = (dict(zip(names(shapes[i]), ins[i], strict=True)) for i in (0, 2))
    rest = math.prod(n for d, n in q.items() if d not in (how.length, how.over))
    return 2.0 * rest * (heads * q[how.over] + values * v[value_dim(shapes[1], shapes[2], how).name])


def _pairs(ins: Any, shapes: Sequence[Shape], how: AttentionSpec, blocks: Any) -> float:
    """Query-key pairs computed by the device with the last queries, the most on any device."""
    q, k = (dict(zip(names(shape), n, strict=True)) for shape, n in zip(shapes[:2], ins[:2], strict=True))
    queries, keys = q.get(how.length, 1), k[how.keys]
    length = next((d.size for d in shapes[0] if d.name == how.length), keys)
    return how.sees.number(max(0, length - queries), queries, keys, blocks)


def _counted(heads: int, values: int) -> Callable[..., float]:
    """The FLOPs of so many products (see `products`), of the pairs that are seen."""

    def flops(ins: Any, outs: Any, *, shapes: Any, how: AttentionSpec, blocks: Any = None) -> float:
        return _pairs(ins, shapes, how, blocks) * products(ins, shapes, how, heads, values)

    return flops


def attention_labels(
    ins: Sequence[Shape], outs: Sequence[Shape], how: AttentionSpec, keys: str | None, gradient: bool
) -> Labels:
    """Dims by name; the contracted dim and that of the values must be replicated.

    The positions of keys and values have the label `keys`; those of bias and mask must be replicated.
    """
    kept = (*names((*how.batch(ins[1]), *how.group(ins[0], ins[1]))), how.length)

    def labels(role: str, shape: Shape) -> dict[str, str | None]:
        own = role in ("k", "v", "memory_segments")
        return {d.name: keys if own and d.name == how.keys else d.name if d.name in kept else None for d in shape}

    roles = ("q", "k", "v", *how.extras, *RESIDUALS)
    results = [r for r in MOVING if r in roles[: 3 + len(how.extras)]] if gradient else ["out", "lse"]
    return Labels(
        tuple(labels(role, shape) for role, shape in zip(roles, ins, strict=False)),
        tuple(labels(role, shape) for role, shape in zip(results, outs, strict=True)),
    )


def _rule(*types: Type, how: AttentionSpec, **_: Any) -> Labels:
    outs = [t.dims for t in _type(*types, how=how)]
    return attention_labels([t.dims for t in types], outs, how, None, gradient=False)


def _grad_rule(*types: Type, how: AttentionSpec, **_: Any) -> Labels:
    outs = [t.dims for t in _grad_type(*types, how=how)]
    return attention_labels([t.dims for t in types], outs, how, None, gradient=True)


def own_shardings(eqn: Eqn) -> list[Sharding]:
    """Each cotangent is split like its operand, and a partial sum over the other axes that split an operand."""
    every = dict.fromkeys(axis for v in eqn.ins for axis in v.sharding.split_axes)
    roles = eqn.params["how"].roles(eqn.ins)
    splits = [roles[r].sharding for r in MOVING if r in roles]
    return [Sharding.of(dict(s.split), [axis for axis in every if axis not in s.split_axes]) for s in splits]


def _fwd(*ins: Tensor, active: Sequence[bool], read: Sequence[bool], **params: Any) -> Any:
    outs = bind(ATTENTION, *ins, **params)
    return outs, (ins, outs)


def _vjp(cts: Sequence[Tensor | None], residuals: Any, *, how: AttentionSpec, **params: Any) -> list[Tensor | None]:
    ins, (out, lse) = residuals
    ct, lse_ct = cts
    more = [] if lse_ct is None else [lse_ct]
    gradients = bind(ATTENTION_GRAD, *ins, out, lse, out * 0 if ct is None else ct, *more, how=how, **params)
    of = dict(zip([r for r in MOVING if r in how.roles(ins)], gradients, strict=True))
    return [of.get(role) for role in how.roles(ins)]


ATTENTION_GRAD = Op(
    "attention_grad",
    type=_grad_type,
    kernel=_grad_kernel,
    plain=plain_gradient,
    vmap=lambda *ins, new, **params: vectorised(ATTENTION_GRAD, ins, new, **params),
    flops=_counted(3, 2),  # the scores again, their cotangents, and those of q, k and v
    rule=_grad_rule,
    shardings=own_shardings,
    reduce=Reduce.SUM,
    product=Product.ATTENTION,
)
ATTENTION = Op(
    "attention",
    type=_type,
    kernel=_kernel,
    fwd=_fwd,
    vjp=_vjp,
    vmap=lambda *ins, new, **params: vectorised(ATTENTION, ins, new, **params),
    flops=_counted(1, 1),  # queries with keys, weights with values
    rule=_rule,
    product=Product.ATTENTION,
)


def vectorised(op: Op, ins: Sequence[Tensor], new: Dim, how: AttentionSpec) -> tuple[Tensor, ...]:
    """The results of attention, or of its gradient, on operands some of which have the dim `new`, first."""
    roles = how.roles(ins)
    together = {"k", "v"} if new in (*roles["k"].dims, *roles["v"].dims) else set[str]()
    if "ct" in roles:  # the cotangent of an operand that all places share differs by place
        together = {"k", "v", "bias", *RESIDUALS}
    for role in ("q", *(r for r in roles if r in together)):
        roles[role] = spread([roles[role]], new)[0]
    if "offset" in roles and new in roles["offset"].dims:
        roles, how = _masked(roles, how)
    return bind(op, *roles.values(), how=how)


def _masked(roles: dict[str, Tensor], how: AttentionSpec) -> tuple[dict[str, Tensor], AttentionSpec]:
    """The operands with a mask in the place of the offset."""
    keys = next(d for d in roles["k"].dims if d.name == how.keys)
    memory = Dim(how.memory, keys.size)
    if how.memory == how.length:
        memory = fresh_dim(Dim(f"{how.memory}__keys", keys.size), *(x.dims for x in roles.values()))
    length = tuple(d for d in roles["q"].dims if d.name == how.length)
    start = roles["offset"]
    pair = (*start.dims, *length, memory)
    at = broadcast(start, pair)
    at = at + broadcast(iota(length[0], start.dtype), pair) if length else at
    key = broadcast(iota(memory, start.dtype), pair)
    conditions = how.sees.limits(at, at, key, key)
    if "mask" in roles:
        conditions.append(roles["mask"])
    every = [d for d in (*roles["q"].dims, memory) if any(d in c.dims for c in conditions)]
    mask = broadcast(conditions[0], every)
    for condition in conditions[1:]:
        mask = mask & broadcast(condition, every)
    order = ("q", "k", "v", "bias", "mask", "segments", "memory_segments", *RESIDUALS)
    batched_roles = {**roles, "mask": mask}
    extras = tuple(role for role in order[3:7] if role in batched_roles)
    return {r: batched_roles[r] for r in order if r in batched_roles}, dataclasses.replace(
        how, extras=extras, memory=memory.name, sees=EVERY_KEY
    )
