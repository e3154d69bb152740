"""Operations that move elements: names, order, sizes and places change, values do not.

Row-major order of the dims as given is the only order there is. A dim whose elements an operation moves among
themselves is worked on whole (`blocked`); the others pass through in whatever layout they have.
"""

from __future__ import annotations

import math
from builtins import slice as builtin_slice
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backend import Block, Local
from ..dims import Dim, DimLike, DimsLike, Shape, check_shape, find, pick, show
from ..errors import ShapeError, at, caller, located
from ..ir import Labels, Op, Type
from ..trace import Tensor, as_tensor, bind1
from .contraction import broadcast
from .elementwise import promote
from .moves import Moves, Piece, replaced

__all__ = [
    "concat", "dynamic_slice", "dynamic_update_slice", "flatten", "pad", "rename", "reshape", "reverse", "roll",
    "shift", "slice", "stack", "transpose", "unflatten", "unstack",
]  # fmt: skip


def trim(c: Local, x: Any, block: Block) -> Any:
    """Without the padding of dims that are whole here."""
    cut = tuple(
        builtin_slice(0, d.size) if not axes else builtin_slice(None)
        for d, axes in zip(block.shape, block.axes, strict=True)
    )
    return x[cut]


def refill(c: Local, x: Any, block: Block) -> Any:
    """Padded at the end of every dim to the stored sizes of a block."""
    pads = [(0, size - there) for size, there in zip(block.sizes, x.shape, strict=True)]
    return c.xp.pad(x, pads) if any(high for _, high in pads) else x


def blocked_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that sees whole dims at their real sizes: padding is trimmed before it and refilled after."""

    def run(c: Local, *xs: Any, **params: Any) -> Any:
        xs = tuple(trim(c, x, block) for x, block in zip(xs, c.ins, strict=True))
        return refill(c, kernel(c, *xs, **params), c.outs[0])

    return run


_RENAME = Op(
    "rename",
    type=lambda x, *, shape: Type(shape, x.dtype),
    kernel=lambda c, x, *, shape: _rename_kernel(c, x),
    vjp=lambda ct, x: (rename(ct, **{new.name: old.name for new, old in zip(ct.dims, x.dims, strict=True)}),),
    linear="joint",
    flops=lambda *_, **__: 0,
    rule=lambda x, *, shape: _rename_rule(x, shape),
)


def _rename_kernel(c: Local, x: Any) -> Any:
    return x if c.ins[0].sizes == c.outs[0].sizes else refill(c, trim(c, x, c.ins[0]), c.outs[0])


def _rename_rule(x: Type, shape: Shape) -> Labels:
    """A renamed dim is born in the layout of its new name, where both names are padded alike; the others pass."""
    new = {d.name: to.name for d, to in zip(x.shape, shape, strict=True)}
    fresh = frozenset(to for old, to in new.items() if old != to)
    return Labels((new,), ({d.name: d.name for d in shape},), fresh=fresh)


def rename(x: Any, **new: str | Dim) -> Tensor:
    """The same tensor with other dim names; a renamed dim takes the layout of its new name.

    >>> import meshdsl as md
    >>> md.rename(md.tensor([1.0, 2.0], "length"), length="memory").dims
    (memory=2,)
    """
    x = as_tensor(x)

    def resolve() -> Shape:
        old = {find(name, x.dims): to for name, to in new.items()}
        for dim, to in old.items():
            if isinstance(to, Dim) and to.size != dim.size:
                raise ShapeError(f"md.rename cannot change a size: {dim!r} to {to!r}; use md.slice or md.pad")
        renamed = [Dim(_name(old[d]), d.size) if d in old else d for d in x.dims]
        return check_shape(renamed, "a renamed tensor")

    shape = located(resolve)
    return x if shape == x.dims else bind1(_RENAME, x, shape=shape)


def _name(dim: str | Dim) -> str:
    return dim.name if isinstance(dim, Dim) else dim


_TRANSPOSE = Op(
    "transpose",
    type=lambda x, *, shape: Type(shape, x.dtype),
    kernel=lambda c, x, *, shape: c.align(x, c.ins[0], c.outs[0]),
    vjp=lambda ct, x: (transpose(ct, x.dims),),
    linear="joint",
    flops=lambda *_, **__: 0,
)


def transpose(x: Any, dims: DimsLike) -> Tensor:
    """The same tensor stored in another order of its dims."""
    x = as_tensor(x)

    def resolve() -> Shape:
        shape = pick(dims, x.dims)
        if set(shape) != set(x.dims):
            raise ShapeError(f"md.transpose names every dim once: {show(shape)} of {show(x.dims)}")
        return shape

    shape = located(resolve)
    return x if shape == x.dims else bind1(_TRANSPOSE, x, shape=shape)


def groups(source: Shape, target: Shape) -> list[tuple[Shape, Shape]]:
    """The finest matching runs of dims with equal numbers of elements, in order.

    >>> from meshdsl.dims import dims
    >>> groups(dims("a:2 b:6 c:5"), dims("a:2 d:3 e:2 c:5"))[1]
    ((b=6,), (d=3, e=2))
    """
    found: list[tuple[Shape, Shape]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = i, j
        a = source[i].size if i < len(source) else 1
        b = target[j].size if j < len(target) else 1
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while a != b:
            if (a < b and i < len(source)) or j >= len(target):
                a *= source[i].size
                i += 1
            else:
                b *= target[j].size
                j += 1
        found.append((source[left:i], target[right:j]))
    return found


def _reshape_type(x: Type, *, shape: Shape) -> Type:
    here, there = math.prod(d.size for d in x.shape), math.prod(d.size for d in shape)
    if here != there:
        raise ShapeError(
            f"md.reshape keeps the number of elements: {show(x.shape)} has {here}, {show(shape)} has {there}"
        )
    return Type(shape, x.dtype)


def _reshape_rule(x: Type, *, shape: Shape) -> Labels:
    """A dim that stays passes; the first dims of a merge or a split share one label while they divide exactly."""
    ins: dict[str, str | None] = {d.name: None for d in x.shape}
    outs: dict[str, str | None] = {d.name: None for d in shape}
    exact = set()
    if math.prod(d.size for d in shape):
        for left, right in groups(x.shape, shape):
            left, right = tuple(d for d in left if d.size > 1), tuple(d for d in right if d.size > 1)
            if left and right:
                ins[left[0].name] = outs[right[0].name] = right[0].name
                if (left, right) != (right, left):
                    exact.add(right[0].name)
    return Labels((ins,), (outs,), frozenset(exact), mapped=frozenset(exact))


_RESHAPE = Op(
    "reshape",
    type=_reshape_type,
    kernel=blocked_kernel(lambda c, x, *, shape: c.xp.reshape(x, _real(c.outs[0]))),
    vjp=lambda ct, x: (reshape(ct, x.dims),),
    linear="joint",
    flops=lambda *_, **__: 0,
    rule=_reshape_rule,
)


def _real(block: Block) -> list[int]:
    return [size if axes else d.size for d, size, axes in zip(block.shape, block.sizes, block.axes, strict=True)]


def reshape(x: Any, dims: DimsLike) -> Tensor:
    """The same elements in row-major order under other dims.

    >>> import meshdsl as md
    >>> md.reshape(md.iota("n:6"), "a:2 b:3").dims
    (a=2, b=3)
    """
    x = as_tensor(x)
    sized = not isinstance(dims, str) or ":" in dims
    shape = located(lambda: pick(dims, (), new=True) if sized else pick(dims, x.dims))
    return x if shape == x.dims else bind1(_RESHAPE, x, shape=shape)


def flatten(x: Any, dims: DimsLike, into: DimLike) -> Tensor:
    """Several dims as one, row-major in the order given, at the place of the first."""
    x = as_tensor(x)

    def resolve() -> tuple[Shape, Shape]:
        merged = pick(dims, x.dims)
        size = math.prod(d.size for d in merged)
        new = pick(Dim(into, size) if isinstance(into, str) and ":" not in into else into, (), new=True)
        rest = [d for d in x.dims if d not in merged]
        at = sum(d not in merged for d in x.dims[: x.dims.index(merged[0])]) if merged else 0
        return (*rest[:at], *merged, *rest[at:]), (*rest[:at], *new, *rest[at:])

    order, shape = located(resolve)
    return reshape(transpose(x, order), shape)


def unflatten(x: Any, dim: DimLike, into: DimsLike) -> Tensor:
    """One dim as several, row-major, in its place.

    >>> import meshdsl as md
    >>> md.unflatten(md.iota("n:6"), "n", "a:2 b:3").dims
    (a=2, b=3)
    """
    x = as_tensor(x)

    def resolve() -> Shape:
        old, new = find(dim, x.dims), pick(into, (), new=True)
        if math.prod(d.size for d in new) != old.size:
            raise ShapeError(f"md.unflatten keeps the number of elements: {old!r} into {show(new)}")
        at = x.dims.index(old)
        return (*x.dims[:at], *new, *x.dims[at + 1 :])

    return reshape(x, located(resolve))


def along(
    name: str,
    infer: Callable[..., Dim],
    kernel: Callable[..., Any],
    vjp: Any,
    *,
    linear: str = "joint",
    pieces: Callable[..., tuple[Piece, ...]] | None = None,
) -> Op:
    """An operation that rearranges one dim, `dim`, and perhaps changes its size; `pieces` says what goes where."""

    def shape_of(x: Type, *more: Type, dim: Dim, **params: Any) -> Type:
        new = infer(dim, **params)
        return Type(tuple(new if d == dim else d for d in x.shape), x.dtype)

    def run(c: Local, x: Any, *more: Any, dim: Dim, **params: Any) -> Any:
        return kernel(c, x, *more, axis=c.ins[0].position(dim), dim=dim, **params)

    def moves(x: Type, *, dim: Dim, value: Any = 0, **params: Any) -> Moves:
        given = {"value": value} if name == "pad" else {}
        out = infer(dim, **params, **given)
        return Moves((dim,), out, pieces(dim, out, **params), value) if pieces else None

    return Op(
        name,
        shape_of,
        blocked_kernel(run),
        vjp,
        linear=linear,
        blocked=lambda x, *more, dim, **_: (dim.name,),
        moves=moves if pieces is not None else None,
        flops=lambda *_, **__: 0,
    )


def _span(start: int, size: int, stride: int, axis: int) -> tuple[Any, ...]:
    stop = start + (size - 1) * stride + 1 if size else start
    return (builtin_slice(None),) * axis + (builtin_slice(start, stop, stride),)


_SLICE = along(
    "slice",
    lambda dim, *, start, size, stride: Dim(dim.name, size),
    lambda c, x, *, axis, dim, start, size, stride: x[_span(start, size, stride, axis)],
    lambda ct, x, dim, start, size, stride: (
        pad(ct, dim.name, start, dim.size - (start + (size - 1) * stride + 1), inner=stride - 1) if size else None,
    ),
    pieces=lambda dim, out, *, start, size, stride: (Piece(0, start, 0, size, step=stride),),
)


def slice(x: Any, dim: DimLike, start: int, size: int, stride: int = 1) -> Tensor:
    """`size` elements of a dim from `start`, every `stride`-th."""
    x = as_tensor(x)

    def resolve() -> Dim:
        d = find(dim, x.dims)
        last = start + (size - 1) * stride
        if start < 0 or size < 0 or stride < 1 or (size and last >= d.size):
            raise ShapeError(
                f"md.slice of {d!r} from {start}, size {size}, stride {stride} reaches outside; "
                f"it needs 0 <= start and start + (size - 1) * stride < {d.size}"
            )
        return d

    return bind1(_SLICE, x, dim=located(resolve), start=int(start), size=int(size), stride=int(stride))


def _pad_size(dim: Dim, *, low: int, high: int, inner: int, value: Any) -> Dim:
    return Dim(dim.name, low + high + dim.size + max(dim.size - 1, 0) * inner)


def _pad_kernel(c: Local, x: Any, *, axis: int, dim: Dim, low: int, high: int, inner: int, value: Any) -> Any:
    x = c.xp.moveaxis(x, axis, 0)
    if inner and x.shape[0]:
        gaps = c.xp.full((x.shape[0], inner, *x.shape[1:]), value, x.dtype)
        x = c.xp.concatenate([x[:, None], gaps], 1).reshape((-1, *x.shape[1:]))[: x.shape[0] * (inner + 1) - inner]
    x = x[max(0, -low) : x.shape[0] - max(0, -high)]
    pads = [(max(0, low), max(0, high))] + [(0, 0)] * (x.ndim - 1)
    return c.xp.moveaxis(c.xp.pad(x, pads, constant_values=value), 0, axis)


def _pad_vjp(ct: Tensor, x: Tensor, dim: Dim, low: int, high: int, inner: int) -> tuple[Tensor]:
    ct = pad(ct, dim.name, max(0, -low), max(0, -high))  # what a negative pad cut off has no gradient
    return (slice(ct, dim.name, max(0, low), dim.size, inner + 1),)


def _pad_pieces(dim: Dim, out: Dim, *, low: int, high: int, inner: int) -> tuple[Piece, ...]:
    every = inner + 1
    first = max(0, -(low // every)) if low < 0 else 0  # the first element that is not cut off
    count = min(dim.size, -(-(out.size - low) // every)) - first
    return (Piece(0, first, low + first * every, count, to_step=every),) if count > 0 else ()


_PAD = along("pad", _pad_size, _pad_kernel, _pad_vjp, linear="padded", pieces=_pad_pieces)


def pad(x: Any, dim: DimLike, low: int, high: int, value: Any = 0, *, inner: int = 0) -> Tensor:
    """`low` and `high` elements of `value` added before and after (cut off where negative), `inner` between."""
    x = as_tensor(x)

    def resolve() -> Dim:
        d = find(dim, x.dims)
        if d.size + max(d.size - 1, 0) * inner + min(low, 0) + min(high, 0) < 0 or inner < 0:
            raise ShapeError(f"md.pad of {d!r} by low={low} high={high} inner={inner} leaves a negative size")
        return d

    return bind1(_PAD, x, dim=located(resolve), low=int(low), high=int(high), inner=int(inner), value=value)


_REVERSE = along(
    "reverse",
    lambda dim: dim,
    lambda c, x, *, axis, dim: c.xp.flip(x, axis),
    lambda ct, x, dim: (reverse(ct, dim),),
    pieces=lambda dim, out: (Piece(0, dim.size - 1, 0, dim.size, step=-1),),
)


def reverse(x: Any, dim: DimLike) -> Tensor:
    """The elements of a dim in the opposite order."""
    x = as_tensor(x)
    return bind1(_REVERSE, x, dim=located(lambda: find(dim, x.dims)))


_ROLL = along(
    "roll",
    lambda dim, *, by: dim,
    lambda c, x, *, axis, dim, by: c.xp.roll(x, by, axis),
    lambda ct, x, dim, by: (roll(ct, dim, -by),),
    pieces=lambda dim, out, *, by: _roll_pieces(dim.size, by),
)


def _roll_pieces(size: int, by: int) -> tuple[Piece, ...]:
    by = by % size if size else 0
    return Piece(0, 0, by, size - by), Piece(0, size - by, 0, by)


def roll(x: Any, dim: DimLike, by: int) -> Tensor:
    """Elements moved `by` places towards higher indices; what leaves at the end comes back at the start."""
    x = as_tensor(x)
    return bind1(_ROLL, x, dim=located(lambda: find(dim, x.dims)), by=int(by))


def shift(x: Any, dim: DimLike, by: int, fill: Any = 0) -> Tensor:
    """Elements moved `by` places towards higher indices; what leaves is lost, and `fill` comes in."""
    x = as_tensor(x)
    d = located(lambda: find(dim, x.dims))
    by = max(-d.size, min(d.size, int(by)))
    return pad(x, d, by, -by, fill)


def _several(name: str, xs: Sequence[Any]) -> tuple[Tensor, ...]:
    if not xs:
        raise at(ShapeError(f"md.{name} needs at least one tensor"), caller())
    return promote(*xs)


def _check_same(name: str, first: Tensor, x: Tensor, but: str = "") -> None:
    here, there = ({d for d in y.dims if d.name != but} for y in (first, x))
    if here != there:
        raise ShapeError(
            f"md.{name} of tensors with different dims: {show(first.dims)} and {show(x.dims)}\n"
            f"  they may differ {f'only in the size of {but!r}' if but else 'in their order alone'}; rename dims with "
            "md.rename, or add those that one lacks with md.broadcast"
        )


def concat(xs: Sequence[Any], over: str | Dim) -> Tensor:
    """Tensors one after another along a dim they all have; its size is the sum of theirs.

    >>> import meshdsl as md
    >>> md.concat([md.iota("n:2"), md.iota("n:3")], "n").dims
    (n=5,)
    """
    xs = _several("concat", xs)
    name = _name(over)

    def resolve() -> list[Tensor]:
        for x in xs:
            find(name, x.dims)
            _check_same("concat", xs[0], x, name)
        parts = [transpose(x, [name if d.name == name else d for d in xs[0].dims]) for x in xs]
        return parts

    parts = located(resolve)
    return bind1(_CONCAT, *parts, name=name)


def _concat_type(*xs: Type, name: str) -> Type:
    total = Dim(name, sum(find(name, x.shape).size for x in xs))
    return Type(tuple(total if d.name == name else d for d in xs[0].shape), xs[0].dtype)


def _concat_vjp(ct: Tensor, *xs: Tensor, name: str) -> tuple[Tensor, ...]:
    starts, at = [], 0
    for x in xs:
        starts.append(at)
        at += find(name, x.dims).size
    return tuple(slice(ct, name, start, find(name, x.dims).size) for x, start in zip(xs, starts, strict=True))


def _concat_moves(*xs: Type, name: str) -> Moves:
    dims = tuple(find(name, x.shape) for x in xs)
    pieces, to = [], 0
    for k, dim in enumerate(dims):
        pieces.append(Piece(k, 0, to, dim.size))
        to += dim.size
    return Moves(dims, Dim(name, to), tuple(pieces))


_CONCAT = Op(
    "concat",
    type=_concat_type,
    kernel=blocked_kernel(lambda c, *xs, name: c.xp.concatenate(xs, c.ins[0].position(name))),
    vjp=_concat_vjp,
    linear="joint",
    moves=_concat_moves,
    flops=lambda *_, **__: 0,
)

_STACK = Op(
    "stack",
    type=lambda *xs, dim: Type((dim, *xs[0].shape), xs[0].dtype),
    kernel=lambda c, *xs, dim: _stack_kernel(c, xs, dim),
    vjp=lambda ct, *xs, dim: tuple(unstack(ct, dim)),
    linear="joint",
    flops=lambda *_, **__: 0,
)


def _stack_kernel(c: Local, xs: Sequence[Any], dim: Dim) -> Any:
    """All of them; where the new dim is cut, this device's run of them."""
    block = c.outs[0]
    stacked = c.xp.stack(xs)
    more = block.size(dim) * c.count(block.axes[0]) - dim.size
    stacked = c.xp.pad(stacked, [(0, more)] + [(0, 0)] * (stacked.ndim - 1)) if more else stacked
    return c.xp.dynamic_slice(stacked, c.start(block, dim), block.size(dim), 0) if block.axes[0] else stacked



def stack(xs: Sequence[Any], dim: str | Dim) -> Tensor:
    """Tensors of equal dims under a new first dim, whose size is their number."""
    xs = _several("stack", xs)

    def resolve() -> list[Tensor]:
        for x in xs:
            _check_same("stack", xs[0], x)
        if isinstance(dim, Dim) and dim.size != len(xs):
            raise ShapeError(f"md.stack of {len(xs)} tensors over {dim!r}; the size is the number of tensors")
        return [transpose(x, xs[0].dims) for x in xs]

    return bind1(_STACK, *located(resolve), dim=Dim(_name(dim), len(xs)))


def _index_kernel(c: Local, x: Any, dim: Dim, at: int) -> Any:
    """The element where it lies; zero on the devices that do not hold it, which add nothing to the sum."""
    axis = c.ins[0].position(dim)
    if not c.ins[0].axes[axis]:
        return x[(builtin_slice(None),) * axis + (at,)]
    here = c.xp.asarray(at, np.int32) - c.start(c.ins[0], dim)
    inside = (here >= 0) & (here < x.shape[axis])
    row = c.xp.take(x, c.xp.where(inside, here, 0), axis=axis)
    return c.xp.where(inside, row, c.xp.zeros((), x.dtype))


_INDEX = Op(
    "index",
    type=lambda x, *, dim, at: Type(tuple(d for d in x.shape if d != dim), x.dtype),
    kernel=lambda c, x, *, dim, at: _index_kernel(c, x, dim, at),
    vjp=lambda ct, x, dim, at: (transpose(pad(stack([ct], dim.name), dim.name, at, dim.size - at - 1), x.dims),),
    linear="joint",
    reduce="sum",
    blocked=lambda x, *, dim, at: (dim.name,) if x.dtype.kind == "b" else (),
    flops=lambda *_, **__: 0,
)


def unstack(x: Any, dim: DimLike) -> list[Tensor]:
    """The tensors under each index of a dim, as a list."""
    x = as_tensor(x)
    d = located(lambda: find(dim, x.dims))
    return [bind1(_INDEX, x, dim=d, at=i) for i in range(d.size)]


def _clipped(c: Local, start: Any, dim: Dim, size: int) -> Any:
    return c.xp.clip(c.xp.asarray(start, np.int32), 0, dim.size - size)


def _picked(c: Local, x: Any, index: Any, axis: int, otherwise: Any) -> Any:
    """Elements at indices along an axis; `otherwise` where an index is outside."""
    inside = (index >= 0) & (index < x.shape[axis])
    taken = c.xp.take(x, c.xp.where(inside, index, 0), axis=axis)
    return c.xp.where(inside.reshape((-1,) + (1,) * (x.ndim - axis - 1)), taken, otherwise)


def _dynamic_slice_kernel(c: Local, x: Any, start: Any, *, dim: Dim, size: int) -> Any:
    """What of it lies here; zero elsewhere, which adds nothing to the sum over devices."""
    axis = c.ins[0].position(dim)
    start = _clipped(c, start, dim, size)
    if not c.ins[0].axes[axis]:
        return refill(c, c.xp.dynamic_slice(x, start, size, axis), c.outs[0])
    index = c.xp.arange(size, dtype=np.int32) + start - c.xp.asarray(c.start(c.ins[0], dim), np.int32)
    return refill(c, _picked(c, x, index, axis, c.xp.zeros((), x.dtype)), c.outs[0])


_DYNAMIC_SLICE = Op(
    "dynamic_slice",
    type=lambda x, start, *, dim, size: Type(replaced(x.shape, dim, Dim(dim.name, size)), x.dtype),
    kernel=_dynamic_slice_kernel,
    vjp=lambda ct, x, start, dim: (dynamic_update_slice(_zeros(x), ct, dim, start), None),
    linear="first",
    reduce="sum",
    rule=lambda x, start, *, dim, size: Labels(
        ({d.name: d.name if d != dim else None if x.dtype.kind == "b" else f"{dim.name}*" for d in x.shape}, {}),
        ({d.name: None if d.name == dim.name else d.name for d in x.shape},),
    ),
    flops=lambda *_, **__: 0,
)


def _zeros(x: Tensor) -> Tensor:
    return broadcast(as_tensor(0, x.dtype), x.dims)


def dynamic_slice(x: Any, dim: DimLike, start: Any, size: int) -> Tensor:
    """`size` elements of a dim from a traced `start`, which is clipped so that they exist."""
    x, start = as_tensor(x), as_tensor(start)

    def resolve() -> Dim:
        d = find(dim, x.dims)
        if not 0 <= size <= d.size:
            raise ShapeError(f"md.dynamic_slice of {size} elements from {d!r}")
        if start.dims or start.dtype.kind not in "iu":
            raise ShapeError(f"the start is an integer without dims, got {start.type}")
        return d

    return bind1(_DYNAMIC_SLICE, x, start, dim=located(resolve), size=int(size))


def _named(x: Type) -> dict[str, str | None]:
    return {d.name: d.name for d in x.shape}


def _dynamic_update_kernel(c: Local, x: Any, update: Any, start: Any, dim: Dim) -> Any:
    """Each device writes the part that lies in its block."""
    axis = c.ins[0].position(dim)
    part = find(dim.name, c.ins[1].shape)
    update = update[(builtin_slice(None),) * axis + (builtin_slice(0, part.size),)]
    start = _clipped(c, start, dim, part.size)
    if not c.ins[0].axes[axis]:
        return c.xp.dynamic_update(x, update, start, axis) if part.size else x
    if not part.size:
        return x
    index = c.xp.arange(x.shape[axis], dtype=np.int32) + c.xp.asarray(c.start(c.ins[0], dim), np.int32) - start
    return _picked(c, update, index, axis, x)


def _update_vjp(ct: Tensor, x: Tensor, update: Tensor, start: Tensor, dim: Dim) -> tuple[Any, ...]:
    part = find(dim.name, update.dims)
    return dynamic_update_slice(ct, _zeros(update), dim, start), dynamic_slice(ct, dim, start, part.size), None


_DYNAMIC_UPDATE = Op(
    "dynamic_update_slice",
    type=lambda x, update, start, *, dim: x,
    kernel=lambda c, x, update, start, *, dim: _dynamic_update_kernel(c, x, update, start, dim),
    vjp=_update_vjp,
    rule=lambda x, update, start, *, dim: Labels(
        (_named(x), {d.name: None if d.name == dim.name else d.name for d in update.shape}, {}), (_named(x),)
    ),
    flops=lambda *_, **__: 0,
)


def dynamic_update_slice(x: Any, update: Any, dim: DimLike, start: Any) -> Tensor:
    """`x` with `update` written along a dim from a traced `start`, which is clipped so that it fits."""
    x, update = promote(x, update)

    def resolve() -> tuple[Dim, Tensor]:
        d = find(dim, x.dims)
        part = find(d.name, update.dims)
        if part.size > d.size or {e for e in update.dims if e != part} != {e for e in x.dims if e != d}:
            raise ShapeError(f"an update {show(update.dims)} does not fit into {show(x.dims)} along {d.name!r}")
        return d, transpose(update, [part if e == d else e for e in x.dims])

    d, update = located(resolve)
    return bind1(_DYNAMIC_UPDATE, x, update, as_tensor(start), dim=d)
