"""Operations with indices: create indices, gather and scatter-add by index.

Under every layout, an out-of-range index gathers zero and scatters nothing, unless its value is known to `md.take`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import Block, Local
from ..dims import Dim, DimLike, Shape, find, pick, show
from ..errors import ShapeError
from ..ir import Fuses, Labels, Linear, Op, Reduce, Type, named
from ..trace import Tensor, as_tensor, bind1, known_values
from .dtypes import as_dtype, cast, check_kind
from .elementwise import where
from .index_map import replaced
from .reductions import broadcast, spread
from .reshape import transpose
from .slicing import clipped

IOTA = Op(
    "iota",
    type=lambda *, dim, dtype: Type((dim,), dtype),
    kernel=lambda c, *, dim, dtype: c.positions(c.outs[0], dim).astype(dtype),
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
)


def new_dim(dim: DimLike | str) -> Dim:
    return find_one(pick(dim, (), new=True))


def find_one(shape: Shape) -> Dim:
    """The only dim of a shape."""
    if len(shape) != 1:
        raise ShapeError(f"expected one dim, got {show(shape)}")
    return shape[0]


def iota(dim: DimLike, dtype: Any = "int32") -> Tensor:
    """The indices 0, 1, 2, ... along a dim, of an integer or floating `dtype`.

    >>> import meshdsl as md
    >>> md.iota("n:3").numpy()
    array([0, 1, 2], dtype=int32)

    Raises `ShapeError` for several dims, for a dim without a size, and for an integer dtype too narrow for the indices.
    """
    n = new_dim(dim)

    kind = as_dtype(dtype)
    if kind.kind in "iu" and n.size - 1 > np.iinfo(kind).max:
        raise ShapeError(
            f"md.iota of {n!r} does not fit into {kind.name}, which ends at {np.iinfo(kind).max}\n"
            "  take a wider integer, for example md.iota(dim, 'int32')"
        )
    return bind1(IOTA, dim=n, dtype=kind)


def one_hot(i: Any, dim: DimLike, dtype: Any = "float32") -> Tensor:
    """1 where the index equals the position along `dim`, else 0. `dim` is the last dim of the result, of this `dtype`.

    >>> import meshdsl as md
    >>> md.one_hot(md.tensor([2, 9], "n"), "class:3")
    tensor(float32[n=2 class=3], [[0. 0. 1.]
     [0. 0. 0.]])

    Raises `ShapeError` if the indices have the dim or are no integers, or if the dim has no size.
    """
    i, dim = as_tensor(i), new_dim(dim)
    if i.dtype.kind not in "iub":
        raise ShapeError(f"md.one_hot needs integer indices, got {i.type}; use md.cast(i, 'int32')")
    i = cast(i, "int32") if i.dtype.itemsize < 4 else i  # the dim may be longer than a narrow integer's range
    return cast(broadcast(i, (*i.dims, dim)) == cast(iota(dim), i.dtype), dtype)


def _other_dims(x: Type | Tensor, over: Dim) -> Shape:
    return tuple(d for d in x.dims if d != over)


def _take_type(x: Type, i: Type, *, over: Dim) -> Type:
    if i.dtype.kind not in "iu":
        raise ShapeError(f"md.take needs integer indices, got {i.dtype.name}; md.cast(i, 'int32') makes them")
    return Type((*i.dims, *(d for d in _other_dims(x, over) if d not in i.dims)), x.dtype)


def rows_of(c: Local, block: Any, over: Dim, i: Any) -> Any:
    """The nearest indices in this device's block along `over`, and a mask of those that were inside the block."""
    axes, size = block.axes[block.position(over)], block.size(over)
    if not axes:
        at = clipped(c, i, 0, max(min(size, over.size) - 1, 0))
        return at, c.xp.equal(at, i)
    start = c.xp.asarray(c.start(block, over), np.int32)
    i = clipped(c, i, -1, over.size) - start
    at = c.xp.clip(i, 0, max(size - 1, 0))
    return at, (at == i) & (i < over.size - start)


def index_label(over: Dim, i: Type) -> str:
    """The label of the indexed dim: its name, or a different label if the indices have a dim of that name."""
    return f"{over.name}*" if over.name in {d.name for d in i.dims} else over.name


def _take_rule(x: Type, i: Type, over: Dim) -> Labels:
    table = {d.name: index_label(over, i) if d == over else d.name for d in x.dims}
    return Labels((table, named(i.dims)), (named(_take_type(x, i, over=over).dims),))


def flat_index(c: Local, i: Any, block: Block, paired: Sequence[Dim], rows: int) -> Any:
    """Indices into the rows of all paired tables concatenated."""
    for dim in reversed(paired):
        axis = block.position(dim)
        i = i + rows * c.xp.arange(block.sizes[axis], dtype=np.int32).reshape(
            (-1,) + (1,) * (len(block.sizes) - axis - 1)
        )
        rows *= block.sizes[axis]
    return i


def rows_of_points(c: Local, block: Block, over: Shape, indices: Sequence[Any]) -> tuple[Any, Any]:
    """Each point as one index into the block's rows of the dims `over`, and whether the block has it."""
    flat, inside = rows_of(c, block, over[0], indices[0])
    for dim, i in zip(over[1:], indices[1:], strict=True):
        at, here = rows_of(c, block, dim, i)
        flat, inside = flat * block.size(dim) + at, inside & here
    return flat, inside


def take_kernel(c: Local, x: Any, *indices: Any, over: Shape) -> Any:
    """The elements at points; `over` are the dims of the table that the indices are of."""
    flat, inside = rows_of_points(c, c.ins[0], over, indices)
    paired = [d for d in c.ins[0].dims if d not in over and d in c.ins[1].dims]
    axes = [c.ins[0].position(d) for d in (*paired, *over)]
    x = c.xp.moveaxis(x, axes, range(len(axes)))
    x = x.reshape(math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :])
    if not x.shape[0]:
        return c.xp.zeros((*flat.shape, *x.shape[1:]), x.dtype)
    rows = math.prod(c.ins[0].size(d) for d in over)
    values = c.xp.rows(x, flat_index(c, flat, c.ins[1], paired, rows))
    return c.xp.where(inside.reshape(inside.shape + (1,) * (x.ndim - 1)), values, np.zeros((), x.dtype))


TAKE = Op(
    "take",
    type=_take_type,
    kernel=lambda c, x, i, *, over: take_kernel(c, x, i, over=(over,)),
    vjp=lambda ct, x, i, over, to_dtypes: (
        transpose(_scatter_add(i, cast(ct, to_dtypes[0]), over, x.dims), x.dims),
        None,
    ),
    vmap=lambda x, i, *, new, over: bind1(TAKE, x, i, over=over),  # without repeating the table
    linear=Linear.FIRST,
    reduce=Reduce.SUM,
    rule=lambda x, i, *, over: _take_rule(x, i, over),
    fuses=Fuses.PICK,
)


def gather(x: Tensor, i: Tensor, over: Dim) -> Tensor:
    """`md.take` with `drop`, of operands that fit."""
    return bind1(TAKE, x, i, over=over)


def checked_indices(name: str, i: Any, over: Dim, drop: bool) -> Tensor:
    """The indices; known ones counted from the end where negative. Raises `ShapeError` for known ones out of range."""
    known = None if drop else known_values(i) if isinstance(i, Tensor) else np.asarray(i)
    i, n = as_tensor(i), over.size
    if known is None or known.dtype.kind not in "iu":
        return i
    outside = known[(known < -n) | (known >= n)]
    if outside.size:
        places = f"an index is from 0 to {n - 1}, or from {-n} to -1, from the end" if n else "it has no elements"
        raise ShapeError(
            f"md.{name} at index {outside[0]} of {over!r}: {places}\n"
            "  with drop=True, an index out of range, also a negative one, reads zeros and adds nothing"
        )
    if not (known < 0).any():
        return i
    i = cast(i, "int32") if i.dtype.itemsize < 4 else i  # the dim may be longer than a narrow integer's range
    return where(i < 0, i + n, i)


def take(x: Any, i: Any, over: DimLike, *, drop: bool = False) -> Tensor:
    """Gather the slices of `x` along `over` at indices `i`. The result has i's dims, then x's other dims.

    >>> import meshdsl as md
    >>> md.take(md.tensor([10.0, 20.0], "row"), md.tensor([1, 1, -2], "n"), "row").numpy()
    array([20., 20., 10.], dtype=float32)

    Indices whose values are known when the call is made (numbers, and tensors that are not traced) count from the end
    where they are negative, and raise `ShapeError` out of range. A traced index out of range reads zeros, also a
    negative one; with `drop`, every index does.

    Dims that both have are paired: each index of a paired dim has its own table.

    >>> tables = md.tensor([[10.0, 20.0], [30.0, 40.0]], "group row")
    >>> md.take(tables, md.tensor([[1, 1], [0, 7]], "group n"), "row", drop=True)
    tensor(float32[group=2 n=2], [[20. 20.]
     [30.  0.]])

    If `over` is sharded, each device looks up the rows it stores, and the results are summed over devices; the table
    is not gathered. That sum turns -0.0 into 0.0 and may change the sign and payload of NaN: XLA adds to 0.0. The
    indices may have a dim named `over`: `md.take(x, order, "row")` reorders the rows of x.

    Raises `ShapeError` for a dim that x lacks, and for indices that are not integers.
    """
    x = as_tensor(x)
    dim = find(over, x.dims)
    return gather(x, checked_indices("take", i, dim, drop), dim)


def _scatter_type(i: Type, updates: Type, *, over: Dim, paired: Shape) -> Type:
    if i.dtype.kind not in "iu":
        raise ShapeError(f"md.put_add needs integer indices, got {i.dtype.name}")
    check_can_add(updates)
    return Type((*paired, over, *(d for d in updates.dims if d not in i.dims)), updates.dtype)


def check_can_add(updates: Type) -> None:
    if updates.dtype == np.dtype(bool):
        raise ShapeError("md.put_add does not add booleans; use md.cast(x, 'int32') first")


def _scatter_rule(i: Type, updates: Type, over: Dim, paired: Shape) -> Labels:
    out = _scatter_type(i, updates, over=over, paired=paired).dims
    out_labels = {d.name: index_label(over, i) if d == over else d.name for d in out}
    return Labels((named(i.dims), named(updates.dims)), (out_labels,))


def scatter_operands(c: Local, *ins: Any, over: Shape, paired: Shape) -> tuple[int, Any, Any]:
    """The rows of a device's table, the row of each update in it, or beyond, and the updates; ins: indices, updates."""
    *indices, updates = ins
    out, block, of = c.outs[0], c.ins[-2], c.ins[-1]
    index, inside = rows_of_points(c, out, over, indices)
    order = [of.position(d) for d in block.dims]
    order += [k for k in range(len(of.dims)) if k not in order]
    updates = c.xp.transpose(updates, order)
    updates = updates.reshape((index.size, *updates.shape[index.ndim :]))
    rows = math.prod(out.size(d) for d in over)
    total = rows * math.prod(out.size(d) for d in paired)
    index = c.xp.where(inside, flat_index(c, index, block, paired, rows), total)
    return total, index.reshape(-1), updates


def scatter_add_kernel(c: Local, *ins: Any, over: Shape, paired: Shape) -> Any:
    return c.xp.scatter_add(*scatter_operands(c, *ins, over=over, paired=paired)).reshape(c.outs[0].sizes)


SCATTER_ADD = Op(
    "scatter_add",
    type=_scatter_type,
    kernel=lambda c, i, updates, *, over, paired: scatter_add_kernel(c, i, updates, over=(over,), paired=paired),
    vjp=lambda ct, i, updates, over: (None, transpose(gather(ct, i, over), updates.dims)),
    vmap=lambda i, updates, *, new, over, paired: _scatter_vmap(i, updates, new, over, paired),
    flops=lambda ins, outs, **_: float(math.prod(ins[1])),
    linear=Linear.SECOND,
    reduce=Reduce.SUM,
    mask=0,
    rule=lambda i, updates, *, over, paired: _scatter_rule(i, updates, over, paired),
)


def _scatter_vmap(i: Tensor, updates: Tensor, new: Dim, over: Dim, paired: Shape) -> Tensor:
    """With one index per place of the new dim, it is paired; else it is one more dim of the updates."""
    if new not in i.dims:
        return bind1(SCATTER_ADD, i, updates, over=over, paired=paired)
    return bind1(SCATTER_ADD, i, *spread([updates], new), over=over, paired=(new, *paired))


def _scatter_add(i: Tensor, updates: Tensor, over: Dim, into: Shape) -> Tensor:
    """Zeros plus the updates. The result has the dims `into`, in the order of `SCATTER_ADD`."""
    paired = tuple(d for d in into if d != over and d in i.dims)
    return bind1(SCATTER_ADD, i, updates, over=over, paired=paired)


def put_add(x: Any, i: Any, updates: Any, over: DimLike, *, drop: bool = False) -> Tensor:
    """`x` with `updates` added at indices `i` along `over`. Updates with equal indices are summed.

    >>> import meshdsl as md
    >>> md.put_add(md.tensor([0.0, 0.0], "row"), md.tensor([1, 1], "n"), md.tensor([2.0, 3.0], "n"), "row")
    tensor(float32[row=2], [0. 5.])

    Dims that x and the indices share are paired, and indices are counted and checked, as in `md.take`: an update at a
    traced index out of range, or with `drop` at any, is dropped.

    Raises `ShapeError` for a dim that x lacks, and for updates with a dim that neither x nor the indices have.
    """
    x, updates = as_tensor(x), as_tensor(updates)
    dim = find(over, x.dims)
    i = checked_indices("put_add", i, dim, drop)
    rest = _other_dims(x, dim)
    check_updates("put_add", x.type, i.type, updates.type, rest)
    needed = dict.fromkeys((*i.dims, *rest))
    missing = [d for d in needed if d not in updates.dims]
    updates = broadcast(updates, (*missing, *updates.dims)) if missing else updates
    return x + _scatter_add(i, cast(updates, x.dtype), dim, x.dims)


def check_updates(name: str, x: Type, i: Type, updates: Type, rest: Shape) -> None:
    extra = [d for d in updates.dims if d not in (*i.dims, *rest)]
    if extra:
        raise ShapeError(
            f"md.{name}: the updates {show(updates.dims)} have {show(extra)}, which neither the indices "
            f"{show(i.dims)} nor the tensor {show(x.dims)} has\n  sum them away first, with md.sum"
        )


def _along_labels(x: Shape, i: Shape, over: Dim, to: Dim, scatters: bool) -> Labels:
    """Labels by name, except that the dims `over` and `to` of the operands get a different label from the result's."""
    relabeled = to if scatters else over
    other = {relabeled.name: f"{relabeled.name}*"}
    indices = named(i) | (other if scatters else {})
    return Labels((named(x) | other, indices), (named(replaced(x, relabeled, over if scatters else to)),))


def _take_along_kernel(c: Local, x: Any, i: Any, *, over: Dim, to: Dim) -> Any:
    axis = c.ins[0].position(over)
    i, inside = rows_of(c, c.ins[0], over, c.align(i, c.ins[1], c.outs[0]))
    if not x.shape[axis]:
        return c.xp.zeros(c.outs[0].sizes, x.dtype)
    values = c.xp.take_along_axis(x, i, axis=axis)
    return c.xp.where(inside, values, c.xp.zeros((), x.dtype))


TAKE_ALONG = Op(
    "take_along",
    type=lambda x, i, *, over, to: Type(replaced(x.dims, over, to), x.dtype),
    kernel=_take_along_kernel,
    vjp=lambda ct, x, i, over, to: (put_along(ct, i, to, over), None),
    vmap=lambda *ins, new, over, to: bind1(TAKE_ALONG, *spread(ins, new), over=over, to=to),
    linear=Linear.FIRST,
    reduce=Reduce.SUM,
    rule=lambda x, i, *, over, to: _along_labels(x.dims, i.dims, over, to, scatters=False),
    flops=lambda *_, **__: 0,
    fuses=Fuses.PICK,
)


def _put_along_type(x: Type, i: Type, *, over: Dim, to: Dim) -> Type:
    check_kind("put_along", x.dtype, "fic")
    return Type(replaced(x.dims, to, over), x.dtype)


def _put_along_kernel(c: Local, x: Any, i: Any, *, over: Dim, to: Dim) -> Any:
    axis = c.ins[0].position(to)
    i, inside = rows_of(c, c.outs[0], over, c.align(i, c.ins[1], c.ins[0]))
    rows = c.outs[0].size(over)
    i = c.xp.moveaxis(c.xp.where(inside, i, rows), axis, -1)
    return c.xp.moveaxis(c.xp.scatter_along(rows, i, c.xp.moveaxis(x, axis, -1)), -1, axis)


PUT_ALONG = Op(
    "put_along",
    type=_put_along_type,
    kernel=_put_along_kernel,
    vjp=lambda ct, x, i, over, to: (bind1(TAKE_ALONG, ct, i, over=over, to=to), None),
    vmap=lambda *ins, new, over, to: bind1(PUT_ALONG, *spread(ins, new), over=over, to=to),
    linear=Linear.FIRST,
    reduce=Reduce.SUM,
    mask=0,
    rule=lambda x, i, *, over, to: _along_labels(x.dims, i.dims, over, to, scatters=True),
)


def put_along(x: Tensor, i: Tensor, to: Dim, over: Dim) -> Tensor:
    """Zeros plus the elements of `x`: each element along `to` is added at its index in `i` along `over`."""
    return bind1(PUT_ALONG, x, i, over=over, to=to)
