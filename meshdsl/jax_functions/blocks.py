"""The operation that runs a JAX function on each device's blocks.

Dims in `split` and `contract` may be sharded; the others are gathered. The gradient is the function's own, by
`jax.vjp`, on the same blocks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..backend import Local
from ..dims import Dim, Shape, names, show
from ..errors import ShapeError
from ..ir import Labels, Op, Reduce, Type, only_named
from ..ops.dtypes import kind
from ..ops.reshape import refill
from ..trace import Tensor, bind
from .counting import flops
from .function import JaxFunction
from .map import has_own_gradient


def _sized(types: Sequence[Type]) -> Mapping[str, int]:
    return {d.name: d.size for t in types for d in t.dims}


def _type(*ins: Type, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> tuple[Type, ...]:
    avals = f.traced(ins).out_avals
    for aval, shape in zip(avals, results, strict=True):
        if tuple(aval.shape) != tuple(d.size for d in shape):
            raise ShapeError(
                f"the function of md.local, {f.name}, returned an array of shape {tuple(aval.shape)}, "
                f"and out= asks for {show(shape)}\n"
                f"  its operands were {', '.join(show(t.dims) for t in ins)}; "
                "their dims keep their sizes: on one device, those of a block"
            )
    if tuple(ins) != f.operands:
        f.require(ins)
    return tuple(Type(shape, aval.dtype) for aval, shape in zip(avals, results, strict=True))


def types_of(shapes: Sequence[Shape], sizes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> list[Type]:
    """The types of blocks of these sizes, without padding."""
    return [
        Type(tuple(Dim(d.name, min(n, d.size)) for d, n in zip(shape, own, strict=True)), dtype)
        for shape, own, dtype in zip(shapes, sizes, dtypes, strict=True)
    ]


def without_padding(c: Local, xs: Sequence[Any]) -> tuple[list[Any], list[Type]]:
    """Blocks of operands as a function sees them, and their types: an unsharded dim may be stored with padding."""
    types = types_of([b.dims for b in c.ins], [b.sizes for b in c.ins], [x.dtype for x in xs])
    return [x[tuple(slice(0, d.size) for d in t.dims)] for x, t in zip(xs, types, strict=True)], types


def _kernel(c: Local, *xs: Any, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> list[Any]:
    blocks, types = without_padding(c, xs)
    summed = [
        axis for b in c.ins for d, axes in zip(b.dims, b.axes, strict=True) if d.name in f.contract for axis in axes
    ]
    varying = tuple(tuple(dict.fromkeys([*(axis for axes in b.axes for axis in axes), *summed])) for b in c.outs)
    ys = c.xp.blocks(f.traced(types), blocks, varying)
    return [refill(c, y, block) for y, block in zip(ys, c.outs, strict=True)]


def _rule(*ins: Type, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> Labels:
    cut = {*f.split, *f.contract}
    return Labels(tuple(only_named(t.dims, cut) for t in ins), tuple(only_named(shape, cut) for shape in results))


def _flops(ins: Any, outs: Any, *, shapes: Sequence[Shape], dtypes: Sequence[Any], f: JaxFunction, **_: Any) -> float:
    types = types_of(shapes, ins, dtypes)
    if f.cost is None:
        return flops(f.traced(types))
    whole, own = _sized(f.operands), _sized(types)
    return f.cost * float(np.prod([own[name] / max(whole[name], 1) for name in whole]))


def _vjp(
    cts: Any,
    *ins: Tensor,
    f: JaxFunction,
    results: tuple[Shape, ...],
    key: object,
    unchecked: bool | None,
    check: str | None,
    **_: Any,
) -> list[Tensor | None]:
    """The cotangents, one equation for all operands that lack the same split dims: theirs are sums over those."""
    cts = list(cts) if isinstance(cts, list | tuple) else [cts]
    floats = [k for k, aval in enumerate(f.traced(f.operands).out_avals) if kind(aval.dtype) in "fc"]
    groups: dict[frozenset[str], list[int]] = {}
    cut = {*f.split, *f.contract}
    for i, x in enumerate(ins):
        if kind(x.dtype) in "fc":
            groups.setdefault(frozenset(cut - set(names(x.dims))), []).append(i)
    grads: list[Tensor | None] = [None] * len(ins)
    for missing, members in groups.items():
        operands = (*ins, *(cts[k] for k in floats))
        pulled = _pulled(f, len(ins), members, floats)
        types = tuple(x.type for x in operands)
        shapes = tuple(ins[i].dims for i in members)
        contract = tuple(name for name in (*f.split, *f.contract) if name in missing)
        split = tuple(name for name in (*f.split, *f.contract) if name not in missing)
        checked = f.checked and has_own_gradient(f.traced(f.operands))
        g = JaxFunction(pulled, f"d_{f.name}", types, shapes, split, contract, checked, f.cost and 3 * f.cost)
        g.require()
        options = {"results": shapes, "key": key, "follows": True, "unchecked": unchecked, **g.shown}
        options["check"] = options["check"] or check
        cotangents = bind(JAX_BLOCKS, *operands, f=g, **options)
        for i, grad in zip(members, cotangents, strict=True):
            grads[i] = grad
    return grads


def _pulled(f: JaxFunction, count: int, members: Sequence[int], floats: Sequence[int]) -> Callable[..., Any]:
    """The function of operands and result cotangents that returns the operands' cotangents, by `jax.vjp`."""

    def pulled(*args: Any) -> Any:
        xs, cts = args[:count], args[count:]

        def of(*moving: Any) -> Any:
            values = list(xs)
            for i, x in zip(members, moving, strict=True):
                values[i] = x
            ys = f.flat(*values)
            return [ys[k] for k in floats]

        return list(jax.vjp(of, *(xs[i] for i in members))[1](list(cts)))

    return pulled


def _vmap(*ins: Tensor, new: Dim, f: JaxFunction, results: tuple[Shape, ...], **params: Any) -> Any:
    """The function under `jax.vmap`; the new dim is one more that it maps over."""
    flat = jax.vmap(f.flat, in_axes=tuple(0 if new in x.dims else None for x in ins))
    types = tuple(x.type for x in ins)
    shapes = tuple((new, *shape) for shape in results)
    g = JaxFunction(flat, f.name, types, shapes, (*f.split, new.name), f.contract, f.checked, f.cost)
    return bind(JAX_BLOCKS, *ins, f=g, results=shapes, **{**params, **g.shown, "check": params["check"]})


JAX_BLOCKS = Op("local", type=_type, kernel=_kernel, vjp=_vjp, vmap=_vmap, reduce=Reduce.SUM, rule=_rule, flops=_flops)
