"""Copies of elements along dims: padding by what is there, repeating, resizing, and rearranging by a pattern."""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any

import jax
import numpy as np

from ..dims import Dim, DimLike, find, fresh_dim, show, size_of
from ..errors import ShapeError, whole
from ..trace import Tensor, as_tensor, tensor
from .contraction import dot
from .dtypes import cast, in_wide, mean_dtype
from .indexing import gather
from .joining import concat
from .reductions import broadcast
from .reshape import flatten, rename, reshape, transpose
from .slicing import pad as constant_pad
from .slicing import reverse, slice


def pad(x: Any, dim: DimLike, low: int, high: int, value: Any = 0, *, inner: int = 0, mode: str = "constant") -> Tensor:
    """Add `low` elements of `value` before, `high` after, and `inner` between elements; negative numbers crop.

    >>> import meshdsl as md
    >>> md.pad(md.tensor([1.0, 2.0], "a"), "a", 1, 0)
    tensor(float32[a=3], [0. 1. 2.])
    >>> md.pad(md.tensor([1.0, 2.0, 3.0], "a"), "a", 1, 1, mode="reflect")
    tensor(float32[a=5], [2. 1. 2. 3. 2.])

    With `mode`, the new elements are copies: "edge" of the first and the last, "reflect" of those beyond them in
    reverse order, "wrap" of those at the other end. Raises `ShapeError` for a dim that x lacks, for a negative `inner`,
    and if it would crop more elements than exist or copy more than there are.
    """
    if mode == "constant":
        return constant_pad(x, dim, low, high, value, inner=inner)
    x = as_tensor(x)
    d, low, high = find(dim, x.dims), whole("low", low), whole("high", high)
    if mode not in ("edge", "reflect", "wrap") or inner:
        raise ShapeError(f"mode of md.pad is constant, edge, reflect or wrap, without inner=; got {mode!r}, {inner=}")
    most = {"edge": d.size and max(low, high), "reflect": d.size - 1, "wrap": d.size}[mode]
    if not 0 <= min(low, high) <= max(low, high) <= most:
        raise ShapeError(f"md.pad of {d!r} by low={low} high={high} with mode={mode!r} adds from 0 to {most} elements")
    if mode == "edge":
        before, after = (_stretched(slice(x, d, at, min(n, 1)), d, n) for at, n in ((0, low), (d.size - 1, high)))
    elif mode == "reflect":
        before, after = (reverse(slice(x, d, at, n), d.name) for at, n in ((1, low), (d.size - 1 - high, high)))
    else:
        before, after = slice(x, d, d.size - low, low), slice(x, d, 0, high)
    return concat([before, x, after], d.name)


def _stretched(x: Tensor, dim: Dim, n: int) -> Tensor:
    """n copies of the only element of a dim, along it."""
    if not n:
        return x
    rest = [d for d in x.dims if d.name != dim.name]
    return broadcast(reshape(x, rest), (Dim(dim.name, n), *rest))


def _copies(x: Any, dim: DimLike, n: int, first: bool) -> Tensor:
    x = as_tensor(x)
    d, n = find(dim, x.dims), whole("n", n)
    copy = fresh_dim(Dim("copy", n), x.dims)
    order = (copy, d) if first else (d, copy)
    rest = [e for e in x.dims if e != d]
    merged = flatten(broadcast(x, (*order, *rest)), order, into=fresh_dim(Dim("copied", n * d.size), x.dims))
    return transpose(rename(merged, **{merged.dims[0].name: d.name}), [e.name for e in x.dims])


def repeat(x: Any, dim: DimLike, n: int) -> Tensor:
    """Each element of a dim `n` times in a row.

    >>> import meshdsl as md
    >>> md.repeat(md.iota("a:2"), "a", 2)
    tensor(int32[a=4], [0 0 1 1])

    Raises `ShapeError` for a dim that x lacks.
    """
    return _copies(x, dim, n, first=False)


def tile(x: Any, dim: DimLike, n: int) -> Tensor:
    """All elements of a dim `n` times in a row.

    >>> import meshdsl as md
    >>> md.tile(md.iota("a:2"), "a", 2)
    tensor(int32[a=4], [0 1 0 1])

    Raises `ShapeError` for a dim that x lacks.
    """
    return _copies(x, dim, n, first=True)


def resize(x: Any, dim: DimLike, size: int, method: str = "linear", antialias: bool = True) -> Tensor:
    """x with `size` elements along a dim, resampled as by `jax.image.resize`; `method`: "nearest", "linear", "cubic".

    >>> import meshdsl as md
    >>> md.resize(md.tensor([1.0, 3.0], "a"), "a", 4)
    tensor(float32[a=4], [1.  1.5 2.5 3. ])

    Resize an image along one dim after the other. Without `antialias`, a smaller image skips elements. Integers are
    resampled as floats, but by "nearest". Raises `ShapeError` for a dim that x lacks, and for another method.
    """
    x = as_tensor(x)
    d, size = find(dim, x.dims), whole("size", size)
    if method not in ("nearest", "linear", "cubic") or not d.size:
        raise ShapeError(f"md.resize resamples by nearest, linear or cubic, a dim with elements; got {method!r}, {d!r}")
    new = fresh_dim(Dim("resized", size), x.dims)
    nearest = method == "nearest"
    with jax.ensure_compile_time_eval():
        places, shape = (np.arange(d.size), (size,)) if nearest else (np.eye(d.size), (size, d.size))
        weights = np.asarray(jax.image.resize(places, shape, method, nearest or antialias))
    if nearest:
        y = gather(x, tensor(weights.astype(np.int32), [new]), d)
    else:
        matrix = tensor(weights, [new, d])
        y = in_wide(lambda wide: dot(wide, cast(matrix, wide.dtype), over=d), x, mean_dtype(x.dtype))
    return transpose(rename(y, **{new.name: d.name}), [e.name for e in x.dims])


def rearrange(x: Any, pattern: str, /, **sizes: int) -> Tensor:
    """x with dims split, merged and reordered, as a pattern in the way of einops says, by names.

    >>> import meshdsl as md
    >>> x = md.zeros("batch:2 time:3 model:8")
    >>> md.rearrange(x, "batch time model=(heads io) -> batch heads time io", heads=2).dims
    (batch=2, heads=2, time=3, io=4)
    >>> md.rearrange(x, "batch time model -> rows=(batch time) model").dims
    (rows=6, model=8)

    The left side names every dim of x, in any order; `model=(heads io)` splits it, row-major. All sizes but one of a
    group are given as keywords. On the right, `rows=(batch time)` merges dims. Raises `ShapeError` for a pattern that
    leaves out a dim, names one twice, or does not fit the sizes.
    """
    x = as_tensor(x)
    left, right = _sides(pattern)
    if sorted(name for name, _ in left) != sorted(d.name for d in x.dims):
        raise ShapeError(f"the left side of {pattern!r} names every dim of {show(x.dims)} once")
    table = {name: _parts(find(name, x.dims), parts, sizes) for name, parts in left}
    known = {d.name: d for d in chain.from_iterable(table.values())}
    wanted = [part for _, parts in right for part in parts]
    if sorted(wanted) != sorted(known) or not set(sizes) <= set(known):
        raise ShapeError(f"the right side of {pattern!r} names each of {', '.join(known)} once, and sizes name some")
    x = transpose(reshape(x, [part for d in x.dims for part in table[d.name]]), wanted)
    return reshape(x, [Dim(name, size_of(known[part] for part in parts)) for name, parts in right])


def _sides(pattern: str) -> list[list[tuple[str, list[str]]]]:
    """The terms of each side: a name, and the names in its parentheses, or itself."""
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ShapeError(f"md.rearrange takes 'dims -> dims', got {pattern!r}")
    for side in sides:
        if re.sub(r"\w+=\([\w ]+\)|\w+|\s", "", side):
            raise ShapeError(
                f"md.rearrange reads names and name=(names), got {side.strip()!r} in {pattern!r}\n"
                "  name a group, for example model=(heads io)"
            )
    terms = (re.findall(r"(\w+)(?:=\(([\w ]+)\))?", side) for side in sides)
    return [[(name, group.split() or [name]) for name, group in side] for side in terms]


def _parts(dim: Dim, names: list[str], sizes: dict[str, int]) -> tuple[Dim, ...]:
    """The dims of a group; the size of one of them may follow from the others."""
    given = {name: sizes[name] for name in names if name in sizes}
    rest = [name for name in names if name not in given]
    product = math.prod(given.values())
    if len(rest) > 1 or (rest and (not product or dim.size % product)):
        raise ShapeError(f"{dim!r} into {', '.join(names)}: give sizes that divide it, got {given}")
    given |= dict.fromkeys(rest, dim.size // product)
    return tuple(Dim(name, given[name]) for name in names)
