"""Rename, transpose, merge and split dims.

Merges and splits keep the row-major order of elements, in the order of dims given.
"""

from __future__ import annotations

import math
from builtins import slice as builtin_slice
from collections.abc import Mapping
from typing import Any

from ..backend import Local
from ..dims import Dim, DimLike, DimsLike, Shape, check_shape, find, of_size, pick, show, size_of, split_items
from ..errors import ShapeError
from ..ir import Bounded, Fuses, Labels, Linear, Op, Type, named
from ..trace import Tensor, as_tensor, bind1


def resized(c: Local, x: Any, sizes: Mapping[int, int]) -> Any:
    """A block with other sizes of the axes at these positions: padded with zeros at its end, or cut there."""
    if any(n < x.shape[i] for i, n in sizes.items()):
        x = x[tuple(builtin_slice(0, sizes.get(i, n)) for i, n in enumerate(x.shape))]
    pads = [(0, max(0, sizes.get(i, n) - n)) for i, n in enumerate(x.shape)]
    return c.xp.pad(x, pads) if any(high for _, high in pads) else x


RENAME = Op(
    "rename",
    type=lambda x, *, shape: Type(shape, x.dtype),
    kernel=lambda c, x, *, shape: x,
    vjp=lambda ct, x: (rename(ct, **{new.name: old.name for new, old in zip(ct.dims, x.dims, strict=True)}),),
    vmap=lambda x, *, new, shape: bind1(RENAME, x, shape=(new, *shape)),
    linear=Linear.JOINT,
    rule=lambda x, *, shape: _rename_rule(x, shape),
    fuses=Fuses.VIEW,
    again=True,
    bounded=Bounded.BY_OPERANDS,
)


def _rename_rule(x: Type, shape: Shape) -> Labels:
    """A renamed dim follows the layout's rule for its new name if both names have equal padding; others keep theirs."""
    new = {d.name: to.name for d, to in zip(x.dims, shape, strict=True)}
    fresh = frozenset(to for old, to in new.items() if old != to)
    return Labels((new,), (named(shape),), from_layout=fresh)


def rename(x: Any, /, **new: DimLike) -> Tensor:
    """The same tensor with other dim names; a renamed dim follows the layout's rule for its new name.

    >>> import meshdsl as md
    >>> md.rename(md.tensor([1.0, 2.0], "length"), length="memory").dims
    (memory=2,)

    Raises `ShapeError` for a dim that x lacks, for a name that another dim of x has, and for a new dim with another
    size.
    """
    x = as_tensor(x)

    old = {find(name, x.dims): to for name, to in new.items()}
    rule = "md.rename cannot change the size of {!r}: use md.slice or md.pad"
    renamed = [of_size(old[d], d.size, rule.format(d)) if d in old else d for d in x.dims]
    shape = check_shape(renamed, "a renamed tensor")
    return x if shape == x.dims else bind1(RENAME, x, shape=shape)


TRANSPOSE = Op(
    "transpose",
    type=lambda x, *, shape: Type(shape, x.dtype),
    kernel=lambda c, x, *, shape: c.align(x, c.ins[0], c.outs[0]),
    vjp=lambda ct, x: (transpose(ct, x.dims),),
    vmap=lambda x, *, new, shape: transpose(x, (new, *shape)),
    linear=Linear.JOINT,
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
    bounded=Bounded.BY_OPERANDS,
)


def transpose(x: Any, dims: DimsLike) -> Tensor:
    """The same tensor with its dims in the storage order `dims`.

    >>> import meshdsl as md
    >>> md.transpose(md.tensor([[1, 2]], "a b"), "b a").dims
    (b=2, a=1)

    Raises `ShapeError` unless `dims` names every dim of x once.
    """
    x = as_tensor(x)

    shape = pick(dims, x.dims)
    if set(shape) != set(x.dims):
        raise ShapeError(f"md.transpose names every dim once: {show(shape)} of {show(x.dims)}")

    return x if shape == x.dims else bind1(TRANSPOSE, x, shape=shape)


def groups(source: Shape, target: Shape) -> list[tuple[Shape, Shape]]:
    """Split both shapes into the shortest matching runs of dims with equal numbers of elements, in order.

    >>> from meshdsl.dims import dims
    >>> groups(dims("a:2 b:6 c:5"), dims("a:2 d:3 e:2 c:5"))[1]
    ((b=6,), (d=3, e=2))
    """
    matches: list[tuple[Shape, Shape]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        source_start, target_start = i, j
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
        matches.append((source[source_start:i], target[target_start:j]))
    return matches


def long_groups(source: Shape, target: Shape) -> list[tuple[Shape, Shape]]:
    """The groups with more than one element, without their dims of size 1; none if the target is empty."""
    if not size_of(target):
        return []
    longer = [tuple(tuple(d for d in side if d.size > 1) for side in pair) for pair in groups(source, target)]
    return [(left, right) for left, right in longer if left and right]


def _reshape_type(x: Type, *, shape: Shape) -> Type:
    old_size, new_size = math.prod(d.size for d in x.dims), math.prod(d.size for d in shape)
    if old_size != new_size:
        raise ShapeError(
            f"md.reshape keeps the number of elements: {show(x.dims)} has {old_size}, {show(shape)} has {new_size}"
        )
    return Type(shape, x.dtype)


def _reshape_rule(x: Type, *, shape: Shape) -> Labels:
    """Unchanged dims keep their sharding; the first dims of a merge or split share a label that must divide exactly."""
    ins: dict[str, str | None] = {d.name: None for d in x.dims}
    outs: dict[str, str | None] = {d.name: None for d in shape}
    exact = set()
    for left, right in long_groups(x.dims, shape):
        ins[left[0].name] = outs[right[0].name] = right[0].name
        if left != right:
            exact.add(right[0].name)
    return Labels((ins,), (outs,), frozenset(exact), from_layout_if_ruled=frozenset(exact))


RESHAPE = Op(
    "reshape",
    type=_reshape_type,
    kernel=lambda c, x, *, shape: c.xp.reshape(x, c.outs[0].sizes),
    vjp=lambda ct, x: (reshape(ct, x.dims),),
    vmap=lambda x, *, new, shape: reshape(x, (new, *shape)),
    linear=Linear.JOINT,
    rule=_reshape_rule,
    fuses=Fuses.VIEW,
    again=True,
    bounded=Bounded.BY_OPERANDS,
)


def reshape(x: Any, dims: DimsLike) -> Tensor:
    """The same elements, in row-major order, with other dims; a name without a size has that of x.

    >>> import meshdsl as md
    >>> md.reshape(md.zeros("a:2 b:12"), "a c:3 d:4").dims
    (a=2, c=3, d=4)

    Raises `ShapeError` if the numbers of elements differ, and if dims of x are in another order: their elements would
    be at other places than `md.transpose` leaves them.
    """
    x = as_tensor(x)
    items = [pick(d, x.dims, new=True) if isinstance(d, str) and ":" not in d else (d,) for d in split_items(dims)]
    shape = pick([d for item in items for d in item], (), new=True)
    kept = [d for d in shape if d in x.dims]
    if kept != [d for d in x.dims if d in kept]:
        raise ShapeError(
            f"md.reshape does not move elements: {show(kept)} are dims of {x.type} in another order\n"
            "  reorder them with md.transpose first, or give the new dims other names"
        )
    return x if shape == x.dims else bind1(RESHAPE, x, shape=shape)


def flatten(x: Any, dims: DimsLike, into: DimLike) -> Tensor:
    """Merge several dims into one, row-major in the given order, at the position of the first.

    >>> import meshdsl as md
    >>> md.flatten(md.tensor([[1, 2], [3, 4]], "a b"), "a b", into="c").dims
    (c=4,)

    Raises `ShapeError` for a dim that x lacks, and for a name that another dim of x has.
    """
    x = as_tensor(x)

    merged = pick(dims, x.dims)
    size = math.prod(d.size for d in merged)
    new = pick(Dim(into, size) if isinstance(into, str) and ":" not in into else into, (), new=True)
    rest = [d for d in x.dims if d not in merged]
    position = sum(d not in merged for d in x.dims[: x.dims.index(merged[0])]) if merged else 0
    order, shape = (*rest[:position], *merged, *rest[position:]), (*rest[:position], *new, *rest[position:])
    return reshape(transpose(x, order), shape)


def unflatten(x: Any, dim: DimLike, into: DimsLike) -> Tensor:
    """Split one dim into several, row-major, at its position.

    >>> import meshdsl as md
    >>> md.unflatten(md.iota("n:6"), "n", "a:2 b:3").dims
    (a=2, b=3)

    Raises `ShapeError` for a dim that x lacks, if the numbers of elements differ, and for a name that another dim of x
    has.
    """
    x = as_tensor(x)

    old, new = find(dim, x.dims), pick(into, (), new=True)
    if math.prod(d.size for d in new) != old.size:
        raise ShapeError(f"md.unflatten keeps the number of elements: {old!r} into {show(new)}")
    position = x.dims.index(old)
    return reshape(x, (*x.dims[:position], *new, *x.dims[position + 1 :]))


def squeeze(x: Any, dims: DimsLike) -> Tensor:
    """The same elements without `dims`, whose size is 1.

    >>> import meshdsl as md
    >>> md.squeeze(md.tensor([[1.0, 2.0]], "batch io"), "batch").dims
    (io=2,)

    Raises `ShapeError` for a dim that x lacks, or whose size is not 1.
    """
    x = as_tensor(x)

    removed = pick(dims, x.dims)
    longer = [d for d in removed if d.size != 1]
    if longer:
        raise ShapeError(
            f"md.squeeze removes dims of size 1, not {show(longer)}\n"
            "  reduce it, for example with md.sum, or take one of its slices with md.unstack"
        )
    return reshape(x, tuple(d for d in x.dims if d not in removed))
