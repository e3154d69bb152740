"""The operation that runs a JAX function on each device's blocks.

Dims in `split` and `contract` may be sharded; the others are gathered. The gradient is the function's own, by
`jax.vjp`, on the same blocks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..backend import Local
from ..dims import Dim, Shape, names, show
from ..errors import ShapeError
from ..ir import Labels, Op, Reduce, Type, only_named
from ..ops.dtypes import kind
from ..ops.elementwise import add
from ..ops.reshape import resized
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


def elements_of_blocks(size: int, stored: int, count: int) -> list[int]:
    """The number of elements in each of `count` blocks of a dim, of which each stores `stored`.

    >>> elements_of_blocks(5, 2, 4)
    [2, 2, 1, 0]
    """
    return [min(max(size - i * stored, 0), stored) for i in range(count)]


def without_padding(c: Local, xs: Sequence[Any], run: Callable[[Sequence[Any], list[Type]], Sequence[Any]]) -> Any:
    """The results of `run(blocks, types)` on blocks without padding, as the device stores them.

    If a split dim does not divide, the function is compiled for each size of a block, and a device runs its own. On a
    device without elements, the part of a sum is zero.
    """
    own = {d.name: n for b in c.ins for d, n in zip(b.dims, b.sizes, strict=True)}
    uneven, which = _uneven(c, own)
    summed = {d for d in uneven if all(d not in b.dims for b in c.outs)}

    def of_size(sizes: Sequence[int]) -> Callable[..., list[Any]]:
        lengths = dict(zip(uneven, sizes, strict=True))
        block = own | {d.name: n for d, n in lengths.items() if n}
        types = types_of([b.dims for b in c.ins], [[block[d.name] for d in b.dims] for b in c.ins], dtypes)
        nothing = any(not lengths[d] for d in summed)
        return functools.partial(_of_block, c, run, types, nothing)

    dtypes = [x.dtype for x in xs]
    branches = [of_size(sizes) for sizes in itertools.product(*uneven.values())]
    return c.xp.switch(which, branches, *xs) if uneven else branches[0](*xs)


def _of_block(c: Local, run: Callable[..., Sequence[Any]], types: list[Type], nothing: bool, *xs: Any) -> list[Any]:
    """The results of a function of the elements that blocks of these types have; zeros if it has `nothing` to sum."""
    ys = run([x[tuple(slice(0, d.size) for d in t.dims)] for x, t in zip(xs, types, strict=True)], types)
    ys = [resized(c, y, dict(enumerate(block.sizes))) for y, block in zip(ys, c.outs, strict=True)]
    return [c.xp.where(np.zeros(y.shape, bool), y, c.xp.zeros_like(y)) for y in ys] if nothing else ys


def _uneven(c: Local, own: Mapping[str, int]) -> tuple[dict[Dim, list[int]], Any]:
    """The sizes of blocks, largest first, of each split dim that does not divide; and which product of them the
    device's blocks have."""
    uneven, which = dict[Dim, list[int]](), 0
    for d, axes in {d: axes for b in c.ins for d, axes in zip(b.dims, b.axes, strict=True) if axes}.items():
        lengths = elements_of_blocks(d.size, own[d.name], c.count(axes))
        sizes = sorted(set(lengths), reverse=True)
        if len(sizes) > 1:
            uneven[d] = sizes
            which = which * len(sizes) + c.xp.asarray([sizes.index(n) for n in lengths])[c.index(axes)]
    return uneven, which


def _kernel(c: Local, *xs: Any, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> list[Any]:
    summed = [
        axis for b in c.ins for d, axes in zip(b.dims, b.axes, strict=True) if d.name in f.contract for axis in axes
    ]
    varying = tuple(tuple(dict.fromkeys([*(axis for axes in b.axes for axis in axes), *summed])) for b in c.outs)
    return without_padding(c, xs, lambda blocks, types: c.xp.blocks(f.traced(types), blocks, varying))


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
    """The cotangents, one equation for all operands that lack the same split dims: theirs are sums over those.

    What a result without such a dim adds to them is not: every device has all of it.
    """
    cts = list(cts) if isinstance(cts, list | tuple) else [cts]
    cut = (*f.split, *f.contract)
    grads: list[Tensor | None] = [None] * len(ins)
    checked = f.checked and has_own_gradient(f.traced(f.operands))
    for (missing, shared), (members, read) in _groups(f, ins, results).items():
        operands = (*ins, *(cts[k] for k in read))
        types, shapes = tuple(x.type for x in operands), tuple(ins[i].dims for i in members)
        contract = tuple(name for name in cut if name in missing - shared)
        split = tuple(name for name in cut if name not in missing)
        pulled, cost = _pulled(f, len(ins), members, read), f.cost and 3 * f.cost
        g = JaxFunction(pulled, f"d_{f.name}", types, shapes, split, contract, checked, cost)
        g.require()
        options = {"results": shapes, "key": key, "follows": True, "unchecked": unchecked, **g.stated}
        options["check"] = options["check"] or check
        for i, grad in zip(members, bind(JAX_BLOCKS, *operands, f=g, **options), strict=True):
            known = grads[i]
            grads[i] = grad if known is None else add(known, grad)
    return grads


Groups = dict[tuple[frozenset[str], frozenset[str]], tuple[list[int], list[int]]]


def _groups(f: JaxFunction, ins: Sequence[Tensor], results: Sequence[Shape]) -> Groups:
    """The operands and the results that share an equation, by number, for the split dims that the operands lack and
    those of them that the results lack too."""
    floats, groups = [i for i, x in enumerate(ins) if kind(x.dtype) in "fc"], Groups()
    for i, (k, aval) in itertools.product(floats, enumerate(f.traced(f.operands).out_avals)):
        if kind(aval.dtype) in "fc":
            missing = frozenset((*f.split, *f.contract)) - {*names(ins[i].dims)}
            shared = missing.intersection(f.split) - {*names(results[k])}
            members, read = groups.setdefault((missing, shared), ([], []))
            members += [] if i in members else [i]
            read += [] if k in read else [k]
    return groups


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
    return bind(JAX_BLOCKS, *ins, f=g, results=shapes, **{**params, **g.stated, "check": params["check"]})


JAX_BLOCKS = Op("local", type=_type, kernel=_kernel, vjp=_vjp, vmap=_vmap, reduce=Reduce.SUM, rule=_rule, flops=_flops)
