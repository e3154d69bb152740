"""Grouped products: an index selects the matrix that each vector is multiplied by.

`GROUPED_DOT` is `md.take` of a matrix and a product with it, and `GROUPED_OUTER` is its gradient with respect to the
matrices. Each is a gradient of the other, so derivatives of any order have the same two records. The work is that of
one matrix per vector. Dims of the index may be split; the dim of the matrices is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import Block, Local
from ..dims import Dim, DimLike, Shape, find, names, show
from ..errors import ShapeError
from ..ir import Labels, Op, Product, Reduce, Type, named
from ..trace import Tensor, as_tensor, bind1
from .dtypes import as_dtype, cast, kind, promote
from .elementwise import where
from .indexing import flat_index
from .reductions import broadcast


def _new(w: Shape, i: Shape, by: Dim, over: Dim) -> Dim:
    """The dim of the matrices that the result has."""
    return next(d for d in w if d not in (by, over, *i))


def _paired(w: Shape, i: Shape) -> Shape:
    """Dims of both matrices and index: each place of them has matrices of its own."""
    return tuple(d for d in w if d in i)


def _dot_type(x: Type, w: Type, i: Type, *, by: Dim, over: Dim, dtype: np.dtype) -> Type:
    return Type((*i.dims, _new(w.dims, i.dims, by, over)), dtype)


def _outer_type(
    x: Type, y: Type, i: Type, *, by: Dim, rows: Dim, columns: Dim, dtype: np.dtype, paired: Shape = ()
) -> Type:
    return Type((*paired, by, rows, columns), dtype)


def _groups(c: Local, i: Any, by: Dim, stored: int, paired: Sequence[Dim]) -> Any:
    """The index of each vector among all matrices; their number for an index out of range."""
    outside = (i < 0) | (i >= by.size)
    total = stored * math.prod(c.ins[2].size(d) for d in paired)
    i = flat_index(c, c.xp.where(outside, np.int32(0), i), c.ins[2], paired, stored)
    return c.xp.where(outside, np.int32(total), i).reshape(-1)


def _vectors(c: Local, x: Any, block: Block, index: Block, dim: Dim) -> Any:
    """One vector along `dim` for each index [indices, dim]."""
    axis = block.position(dim)
    target = Block((*index.dims, dim), (*index.sizes, block.sizes[axis]), (*index.axes, block.axes[axis]))
    rows = math.prod(index.sizes)
    return c.xp.broadcast_to(c.align(x, block, target), target.sizes).reshape(rows, block.sizes[axis])


def _dot_kernel(c: Local, x: Any, w: Any, i: Any, *, by: Dim, over: Dim, dtype: np.dtype) -> Any:
    block, index = c.ins[1], c.ins[2]
    new, paired = _new(block.dims, index.dims, by, over), _paired(block.dims, index.dims)
    w = c.xp.transpose(w, [block.position(d) for d in (*paired, by, over, new)])
    w = w.reshape(math.prod(w.shape[:-2]), *w.shape[-2:]) if paired else w  # any size may be 0
    groups = _groups(c, i, by, block.size(by), paired)
    y = c.xp.grouped_dot(_vectors(c, x, c.ins[0], index, over), w, groups, dtype)
    return y.reshape(*c.ins[2].sizes, block.size(new))


def _outer_kernel(
    c: Local, x: Any, y: Any, i: Any, *, by: Dim, rows: Dim, columns: Dim, dtype: np.dtype, paired: Shape = ()
) -> Any:
    left, right = (_vectors(c, a, b, c.ins[2], d) for a, b, d in zip((x, y), c.ins, (rows, columns), strict=False))
    stored = c.outs[0].size(by)
    total = stored * math.prod(c.outs[0].size(d) for d in paired)
    out = c.xp.grouped_outer(left, right, _groups(c, i, by, stored, paired), total, dtype)
    return out.reshape(c.outs[0].sizes) if paired else out


def _dot_rule(x: Type, w: Type, i: Type, *, by: Dim, **params: Any) -> Labels:
    out = _dot_type(x, w, i, by=by, **params)
    return Labels((named(x.dims), named(w.dims, [by.name]), named(i.dims)), (named(out.dims),))


def _outer_rule(x: Type, y: Type, i: Type, *, by: Dim, **params: Any) -> Labels:
    out = _outer_type(x, y, i, by=by, **params)
    return Labels((named(x.dims), named(y.dims), named(i.dims)), (named(out.dims, [by.name]),))


def _dot_vjp(
    ct: Tensor, x: Tensor, w: Tensor, i: Tensor, *, by: Dim, over: Dim, to_dtypes: Sequence[np.dtype]
) -> tuple[Any, ...]:
    new, paired = _new(w.dims, i.dims, by, over), _paired(w.dims, i.dims)
    to_x = bind1(GROUPED_DOT, *promote(ct, w), i, by=by, over=new, dtype=to_dtypes[0])
    to_w = bind1(GROUPED_OUTER, *promote(x, ct), i, by=by, rows=over, columns=new, dtype=to_dtypes[1], paired=paired)
    return to_x, to_w, None


def _outer_vjp(ct: Tensor, x: Tensor, y: Tensor, i: Tensor, *, by: Dim, rows: Dim, columns: Dim) -> tuple[Any, ...]:
    to_x = bind1(GROUPED_DOT, *promote(y, ct), i, by=by, over=columns, dtype=x.dtype)
    to_y = bind1(GROUPED_DOT, *promote(x, ct), i, by=by, over=rows, dtype=y.dtype)
    return to_x, to_y, None


def _dot_vmap(x: Tensor, w: Tensor, i: Tensor, *, new: Dim, by: Dim, over: Dim, dtype: np.dtype) -> Tensor:
    i = i if new in i.dims else broadcast(i, (new, *i.dims))
    return bind1(GROUPED_DOT, x, w, i, by=by, over=over, dtype=dtype)


def _outer_vmap(
    x: Tensor, y: Tensor, i: Tensor, *, new: Dim, by: Dim, rows: Dim, columns: Dim, dtype: np.dtype, paired: Shape = ()
) -> Tensor:
    i = i if new in i.dims else broadcast(i, (new, *i.dims))
    params = {"by": by, "rows": rows, "columns": columns, "dtype": dtype, "paired": (new, *paired)}
    return bind1(GROUPED_OUTER, x, y, i, **params)


def _int32(i: Tensor, by: Dim) -> Tensor:
    """The index in int32; out of range where it was."""
    i = cast(i, "int32") if i.dtype.itemsize < 4 else i
    return i if i.dtype == np.dtype("int32") else cast(where((i >= 0) & (i < by.size), i, by.size), "int32")


def _dot_flops(ins: Any, outs: Any, *, shapes: Sequence[Shape], over: Dim, **_: Any) -> float:
    sizes = dict(zip(names(shapes[1]), ins[1], strict=True))
    return 2.0 * math.prod(outs[0]) * sizes[over.name]


def _outer_flops(ins: Any, outs: Any, **_: Any) -> float:
    return 2.0 * math.prod(ins[2]) * math.prod(outs[0][-2:])


def _dot_scratch(
    ins: Any, outs: Any, *, shapes: Sequence[Shape], dtypes: Sequence[np.dtype], over: Dim, dtype: np.dtype
) -> float:
    """Sorted vectors and sorted results: the smaller of the two takes the place of the result until that is written."""
    sizes = dict(zip(names(shapes[1]), ins[1], strict=True))
    vectors = math.prod(ins[2]) * sizes[over.name] * dtypes[0].itemsize
    return max(vectors, math.prod(outs[0]) * dtype.itemsize)


def _outer_scratch(ins: Any, outs: Any, *, dtype: np.dtype) -> float:
    """Bytes beside operands and result: those of sums in float32. Sorted vectors are where operands and result are."""
    return math.prod(outs[0]) * max(4 - dtype.itemsize, 0)


GROUPED_DOT = Op(
    "grouped_dot",
    type=_dot_type,
    kernel=_dot_kernel,
    vjp=_dot_vjp,
    vmap=_dot_vmap,
    flops=_dot_flops,
    scratch=_dot_scratch,
    rule=_dot_rule,
    reduce=Reduce.SUM,
    product=Product.MATMUL,
    mask=0,
)
GROUPED_OUTER = Op(
    "grouped_outer",
    type=_outer_type,
    kernel=_outer_kernel,
    vjp=_outer_vjp,
    vmap=_outer_vmap,
    flops=_outer_flops,
    scratch=_outer_scratch,
    rule=_outer_rule,
    reduce=Reduce.SUM,
    product=Product.MATMUL,
    mask=-1,  # the index there is out of range, so that no padding is read
)


def grouped_dot(x: Any, w: Any, i: Any, *, by: DimLike, over: DimLike, dtype: Any = None) -> Tensor:
    """Multiply each vector of x by the matrix of w that its index selects: a product with `md.take(w, i, by)`.

    >>> import meshdsl as md
    >>> x = md.tensor([[1.0, 2.0], [3.0, 4.0]], "token io")
    >>> w = md.tensor([[[1.0], [1.0]], [[0.0], [1.0]]], "expert io out")
    >>> md.grouped_dot(x, w, md.tensor([1, 0], "token"), by="expert", over="io")
    tensor(float32[token=2 out=1], [[2.]
     [7.]])

    w is [by, over, another dim] in any order, and i an integer tensor with the other dims of x, and more if the vectors
    of x are shared. The result has the dims of i, then that of w. An index out of range gives zeros. The work is one
    matrix for each index, as in a mixture of experts without slots (MegaBlocks, Gale et al., 2022), in blocks of
    sorted vectors; on TPUs it is `jax.lax.ragged_dot`. `dtype` is that of the result and of partial sums (default: the
    operands'); sums on a device have at least float32.

    Dims of i may be split, and `over` (the result is a partial sum) and the other dim of w; `by` is gathered.

    Raises `ShapeError` for other dims, for indices that are no integers, and for operands that are not floating.
    """
    x, w = promote(as_tensor(x), as_tensor(w))
    i = as_tensor(i)

    matrices, contracted = find(by, w.dims, "dim of w to select by"), find(over, w.dims, "dim of w to sum over")
    find(contracted, x.dims, "dim of x to sum over")
    if kind(x.dtype) != "f":
        raise ShapeError(f"md.grouped_dot multiplies floats, got {x.dtype.name}; use md.cast(x, 'float32')")
    if i.dtype.kind not in "iu":
        raise ShapeError(f"md.grouped_dot needs integer indices, got {i.type}; use md.cast(i, 'int32')")
    if len(w.dims) != 3 or matrices == contracted:
        raise ShapeError(f"md.grouped_dot: w {show(w.dims)} needs three dims: {matrices!r}, {contracted!r}, another")
    new, own = _new(w.dims, (), matrices, contracted), names(i.dims)
    strange = [d for d in x.dims if d != contracted and d not in i.dims]
    if strange:
        raise ShapeError(
            f"md.grouped_dot: x {show(x.dims)} has {show(strange)}, which i {show(i.dims)} lacks\n"
            "  each vector of x needs an index; repeat the indices with md.broadcast"
        )
    if clash := [d for d in (matrices, contracted, new) if d.name in own] or [d for d in (new,) if d in x.dims]:
        raise ShapeError(f"md.grouped_dot: {show(clash)} of w is also a dim of x or i; use md.rename")

    return bind1(
        GROUPED_DOT,
        x,
        w,
        _int32(i, matrices),
        by=matrices,
        over=contracted,
        dtype=as_dtype(dtype or x.dtype),
    )
