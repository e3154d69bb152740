"""`md.associative_scan`: running combinations along a dim, in a logarithmic number of steps.

Along a split dim each device scans its block, the devices exchange one element each, and every device combines those
before its own with its block. The gradient of an elementwise function is again an associative scan, of affine maps in
the other direction; that of another function is a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, Shape, find
from ..errors import ShapeError
from ..ir import Labels, Op, Type, only_named
from ..ops.dtypes import check_ordered, countable, in_wide
from ..ops.elementwise import logaddexp, maximum, minimum
from ..ops.index_map import replaced
from ..ops.ordering import block_edges
from ..ops.reductions import spread
from ..ops.slicing import shift
from ..trace import Tensor, as_tensor, bind, tree
from .affine import cotangents
from .carry import leaves_of
from .combine import Combine, combine_of

Arrays = Sequence[Any]


def _scanned(xp: Any, combine: Callable[[Arrays, Arrays], Arrays], xs: Arrays) -> Arrays:
    """The running combinations along the first axis: of pairs, recursively, then the others (Blelloch, 1990)."""
    n = xs[0].shape[0]
    if n < 2:
        return xs
    odd = _scanned(xp, combine, combine([x[: n - 1 : 2] for x in xs], [x[1::2] for x in xs]))
    even = [x[:1] for x in xs]
    if n > 2:
        rest = combine([y[: (n - 1) // 2] for y in odd], [x[2::2] for x in xs])
        even = [xp.concatenate([a, b], 0) for a, b in zip(even, rest, strict=True)]
    return [_interleaved(xp, a, b, n) for a, b in zip(even, odd, strict=True)]


def _interleaved(xp: Any, even: Any, odd: Any, n: int) -> Any:
    more = even.shape[0] - odd.shape[0]
    odd = xp.concatenate([odd, even[:1]], 0) if more else odd
    return xp.stack([even, odd], 1).reshape((2 * even.shape[0], *even.shape[1:]))[:n]


def _flip(xp: Any, xs: Arrays, reverse: bool) -> Arrays:
    return [xp.flip(x, 0) for x in xs] if reverse else xs


def _scan_arrays(xp: Any, f: Combine, dim: str, shapes: Sequence[Shape], xs: Arrays, reverse: bool, real: Any) -> Any:
    """Scan along the first axis. `real`: None, or which places are not padding; the others are left out."""

    def combine(a: Arrays, b: Arrays) -> Arrays:
        if real is None:
            return f.run(xp, dim, shapes, a, b)
        (one, *a), (two, *b) = a, b
        both = f.run(xp, dim, shapes, a, b)
        chosen = [xp.where(_like(two, y), xp.where(_like(one, y), y, q), p) for p, q, y in zip(a, b, both, strict=True)]
        return [one | two, *chosen]

    xs = _flip(xp, xs if real is None else [real, *xs], reverse)
    ys = _flip(xp, _scanned(xp, combine, xs), reverse)
    return ys if real is None else ys[1:]


def _like(mask: Any, x: Any) -> Any:
    return mask.reshape(mask.shape + (1,) * (x.ndim - 1))


def _rows(c: Local, xs: Arrays, dim: Dim) -> tuple[list[Any], list[Shape]]:
    """The blocks, the scanned axis first, and their other dims, in block sizes."""
    rows, shapes = [], []
    for x, block in zip(xs, c.ins, strict=False):
        sized = tuple(Dim(d.name, n) for d, n in zip(block.dims, x.shape, strict=True))
        axis = block.position(dim)
        rows.append(c.xp.moveaxis(x, axis, 0))
        shapes.append((*sized[:axis], *sized[axis + 1 :]))
    return rows, shapes


def _back(c: Local, rows: Arrays, dim: Dim) -> list[Any]:
    return [c.xp.moveaxis(x, 0, b.position(dim)) for x, b in zip(rows, c.outs, strict=True)]


def _kernel(c: Local, *xs: Any, f: Combine, dim: Dim, reverse: bool) -> list[Any]:
    rows, shapes = _rows(c, xs, dim)
    return _back(c, _scan_arrays(c.xp, f, dim.name, shapes, rows, reverse, None), dim)


def labels(types: Sequence[Type], f: Combine, *along: str) -> Labels:
    """Free dims, and those in `along`, may be split; others are gathered."""
    dims = tuple(only_named(t.dims, {*f.free, *along}) for t in types)
    return Labels(dims, dims)


def _vjp(ct: Any, *xs: Tensor, outs: Sequence[Tensor], f: Combine, dim: Dim, reverse: bool) -> list[Tensor | None]:
    cts = ct if isinstance(ct, list | tuple) else [ct]
    return cotangents(f, dim, reverse, xs, outs, cts, _bound)


def _vmap(*xs: Tensor, new: Dim, f: Combine, dim: Dim, reverse: bool) -> Sequence[Tensor]:
    def flat(*ins: Tensor) -> Sequence[Tensor]:
        block = next(d for x in ins for d in x.dims if d.name == new.name)
        return f.along(block)(*ins)

    mapped = Combine(flat, f.name, f.free | {new.name}, f.elementwise, f.operations)
    return bind(ASSOCIATIVE_SCAN, *spread(xs, new), f=mapped, dim=dim, reverse=reverse)


def _flops(ins: Any, outs: Any, *, f: Combine, **_: Any) -> float:
    return 2.0 * f.operations * max(float(np.prod(n)) for n in outs)


ASSOCIATIVE_SCAN = Op(
    "associative_scan",
    type=lambda *xs, f, dim, reverse: xs,
    kernel=_kernel,
    vjp=_vjp,
    vmap=_vmap,
    rule=lambda *xs, f, dim, reverse: labels(xs, f),
    flops=_flops,
)


def _block_scan(c: Local, *xs: Any, f: Combine, dim: Dim, reverse: bool) -> list[Any]:
    rows, shapes = _rows(c, xs, dim)
    padded = c.ins[0].size(dim) * c.count(c.ins[0].axes[c.ins[0].position(dim)]) > dim.size
    real = c.positions(c.ins[0], dim).reshape(-1) < dim.size if reverse and padded else None
    return _back(c, _scan_arrays(c.xp, f, dim.name, shapes, rows, reverse, real), dim)


BLOCK_SCAN = Op(
    "block_scan",
    type=lambda *xs, f, dim, reverse: xs,
    kernel=_block_scan,
    rule=lambda *xs, f, dim, reverse: labels(xs, f, dim.name),
    flops=_flops,
    inside_blocks=True,
)


def _summary_rule(*xs: Type, f: Combine, dim: Dim, parts: Dim, reverse: bool) -> Labels:
    own = labels(xs, f, dim.name).ins
    ins = tuple({d: parts.name if d == dim.name else label for d, label in names.items()} for names in own)
    outs = tuple({parts.name if d == dim.name else d: label for d, label in names.items()} for names in ins)
    return Labels(ins, outs)


BLOCK_SUMMARY = Op(
    "block_summary",
    type=lambda *xs, f, dim, parts, reverse: tuple(Type(replaced(x.dims, dim, parts), x.dtype) for x in xs),
    kernel=lambda c, *xs, f, dim, parts, reverse: block_edges(c, xs, dim, reverse),
    rule=_summary_rule,
    flops=lambda *_, **__: 0,
    inside_blocks=True,
)


def _join_kernel(
    c: Local, *ins: Any, f: Combine, dim: Dim, parts: Dim, reverse: bool, axes: tuple[str, ...]
) -> list[Any]:
    """Combine the block with the summaries of the blocks before it (after it, if `reverse`)."""
    n = len(ins) // 2
    rows, shapes = _rows(c, ins[:n], dim)
    summaries = [c.xp.moveaxis(x, b.position(parts), 0) for x, b in zip(ins[n:], c.ins[n:], strict=True)]
    # without padding of unsplit dims, as the rows
    summaries = [x[(slice(None), *map(slice, row.shape[1:]))] for x, row in zip(summaries, rows, strict=True)]
    size, me = c.ins[0].size(dim), c.index(axes)
    filled = np.arange(parts.size) * size < dim.size
    running = _scan_arrays(
        c.xp, f, dim.name, shapes, summaries, reverse, c.xp.asarray(filled) if not filled.all() else None
    )
    other = me + 1 if reverse else me - 1
    inside = (other >= 0) & (other < int(filled.sum()))
    other = c.xp.clip(c.xp.asarray(other, np.int32), 0, parts.size - 1)
    before = [c.xp.dynamic_slice(x, other, 1, 0) for x in running]
    before = [c.xp.broadcast_to(x, row.shape) for x, row in zip(before, rows, strict=True)]
    joined = f.run(c.xp, dim.name, shapes, before, rows) if size else rows
    return _back(c, [c.xp.where(inside, y, row) for y, row in zip(joined, rows, strict=True)], dim)


def _join_rule(*ins: Type, f: Combine, dim: Dim, parts: Dim, reverse: bool, axes: tuple[str, ...]) -> Labels:
    n = len(ins) // 2
    own = labels(ins[:n], f, dim.name).ins
    others = tuple(only_named(t.dims, f.free) for t in ins[n:])
    return Labels((*own, *others), own)


JOIN_SUMMARIES = Op(
    "join_summaries",
    type=lambda *ins, f, dim, parts, reverse, axes: ins[: len(ins) // 2],
    kernel=_join_kernel,
    rule=_join_rule,
    flops=_flops,
    inside_blocks=True,
)


def _bound(f: Combine, xs: Sequence[Tensor], dim: Dim, reverse: bool) -> Sequence[Tensor]:
    return bind(ASSOCIATIVE_SCAN, *xs, f=f, dim=dim, reverse=reverse)


def associative_scan(f: Callable[[Any, Any], Any], xs: Any, over: DimLike, *, reverse: bool = False) -> Any:
    """The running combinations `x0, f(x0, x1), f(f(x0, x1), x2), ...` along a dim, for an associative `f`.

    >>> import meshdsl as md
    >>> def then(first, second):  # x -> a x + b
    ...     return first[0] * second[0], second[0] * first[1] + second[1]
    >>> a, b = md.tensor([0.5, 0.5, 0.5], "time"), md.tensor([1.0, 1.0, 1.0], "time")
    >>> md.associative_scan(then, (a, b), over="time")[1]
    tensor(float32[time=3], [1.   1.5  1.75])

    `xs` is a pytree of tensors that have the dim; f sees single elements, without it, and returns one. With `reverse`,
    the scan starts at the end: `f(x2, x1)`. It takes a logarithmic number of steps, in any grouping, so f must be
    associative. If the dim is sharded, one element per device is gathered, not the dim. Other dims that f treats place
    by place may be sharded too; those that it sums over are gathered.

    The gradient of an elementwise f is an associative scan too; that of another f, or of elements with different dims,
    is a loop over the dim. Raises `ShapeError` for a tensor without the dim, and if f returns another type than it
    takes; `TraceError` if f contains a loop or branch, or uses a traced tensor from outside.
    """
    leaves, structure = leaves_of(xs)
    if not leaves:
        raise ShapeError("md.associative_scan needs a tensor; xs has none")
    dim = find(over, leaves[0].dims)
    for x in leaves[1:]:
        find(dim, x.dims)
    types = [Type(tuple(d for d in x.dims if d != dim), x.dtype) for x in leaves]
    return tree.tree_unflatten(structure, _bound(combine_of(f, structure, types), leaves, dim, reverse))


def cumprod(x: Any, over: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The running product along a dim, from the start, or from the end if `reverse`.

    Each element is included in its own product, unless `exclusive`. The gradient is right for zeros too. The dtype
    follows the rule of `md.cumsum`.

    >>> import meshdsl as md
    >>> md.cumprod(md.tensor([1.0, 2.0, 3.0], "a"), "a")
    tensor(float32[a=3], [1. 2. 6.])

    Raises `ShapeError` for a dim that x lacks.
    """
    x = countable(x)
    dim = find(over, x.dims)
    product = in_wide(lambda wide: associative_scan(_times, wide, dim, reverse=reverse), x, x.dtype)
    return shift(product, dim, -1 if reverse else 1, fill=1) if exclusive else product


def _times(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def _running(name: str, f: Callable[[Tensor, Tensor], Tensor], example: str, like: str) -> Callable[..., Tensor]:
    def running(x: Any, over: DimLike, reverse: bool = False) -> Tensor:
        x = as_tensor(x)
        check_ordered(name, x.dtype)
        return associative_scan(f, x, over, reverse=reverse)

    running.__name__ = running.__qualname__ = name
    running.__doc__ = f"""The running {like} along a dim, from the start, or from the end if `reverse`.

    >>> import meshdsl as md
    >>> md.{name}(md.tensor([1.0, 3.0, 2.0], "a"), "a")
    tensor(float32[a=3], {example})

    NaN propagates. Raises `ShapeError` for a dim that x lacks, and for complex numbers.
    """
    return running


cummax = _running("cummax", maximum, "[1. 3. 3.]", "maximum")
cummin = _running("cummin", minimum, "[1. 1. 1.]", "minimum")
cumlogsumexp = _running("cumlogsumexp", logaddexp, "[1.     3.1269 3.4076]", "`md.logsumexp`")
