"""Grouped products in JAX: each row of x times the matrix that its group selects, without a copy of a matrix per row.

Rows are sorted by group. A loop visits each pair of a block of rows and a group in it, of which there are at most
blocks + groups - 1; where `few` rows have a group, it visits the pairs that exist, a number known when it runs. For
`jax.lax.ragged_dot`, XLA would multiply all rows by all matrices, unless it has a kernel.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's signatures are only partly typed)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .varying import alike, varying, varying_axes

BLOCKS = (128, 1024)  # the smallest and the largest number of rows; outer products read and write a matrix for each


def grouped_dot(
    x: Any, w: Any, group: Any, dtype: Any, product: Callable[..., Any] | None = None, few: bool = False
) -> Any:
    """Row r of x [rows, k] times w [groups, k, n][group[r]], in `dtype`; 0 for a group out of range.

    `product` multiplies the sorted rows, as `dot_blocks` does.
    """
    x, w, group = alike((x, w, group))
    if not (x.size and w.size):
        return _zeros((x.shape[0], w.shape[2]), dtype, x)
    order = jnp.argsort(group)
    sizes = _sizes(group, w.shape[0])
    results = product(x[order], w, sizes, dtype) if product else dot_blocks(x[order], w, sizes, dtype, few)
    return results[jnp.argsort(order)]


def grouped_outer(x: Any, y: Any, group: Any, groups: int, dtype: Any, few: bool = False) -> Any:
    """The sums over the rows of each group of the outer products of x [rows, k] and y [rows, n]: [groups, k, n]."""
    x, y, group = alike((x, y, group))
    if not (x.size and y.size and groups):
        return _zeros((groups, x.shape[1], y.shape[1]), dtype, x)
    order = jnp.argsort(group)
    return outer_blocks(x[order], y[order], _sizes(group, groups), dtype, few)


def dot_blocks(x: Any, w: Any, sizes: Any, dtype: Any, few: bool = False) -> Any:
    """Sorted rows times the matrices of their groups, block by block; 0 for the rows after all groups."""

    def visit(out: Any, start: Any, g: Any, of_group: Any, rows: Callable[[Any], Any]) -> Any:
        matrix = lax.dynamic_index_in_dim(w, g, keepdims=False)
        product = _dot(rows(x), matrix, (((1,), (0,)), ((), ())), _wide(dtype)).astype(dtype)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(of_group, product, rows(out)), start, 0)

    return _visited(visit, _zeros((x.shape[0], w.shape[2]), dtype, x), x.shape[0], sizes, few)


def outer_blocks(x: Any, y: Any, sizes: Any, dtype: Any, few: bool = False) -> Any:
    """The outer products of sorted rows, summed for each group, block by block."""

    def visit(out: Any, start: Any, g: Any, of_group: Any, rows: Callable[[Any], Any]) -> Any:
        left, right = (jnp.where(of_group, rows(a), 0) for a in (x, y))
        product = _dot(left, right, (((0,), (0,)), ((), ())), _wide(dtype))
        group_sum = lax.dynamic_index_in_dim(out, g, keepdims=False) + product
        return lax.dynamic_update_index_in_dim(out, group_sum, g, 0)

    shape = (sizes.shape[0], x.shape[1], y.shape[1])
    return _visited(visit, _zeros(shape, _wide(dtype), x), x.shape[0], sizes, few).astype(dtype)


def _wide(dtype: Any) -> Any:
    """The dtype of sums; a TPU accumulates narrow floats in float32 by itself."""
    return dtype if np.dtype(dtype).itemsize >= 4 else np.dtype(np.float32)


def _dot(x: Any, y: Any, dims: Any, dtype: Any) -> Any:
    return lax.dot_general(x, y, dims, preferred_element_type=dtype)


def _sizes(group: Any, groups: int) -> Any:
    """The number of rows of each group."""
    return (group[:, None] == np.arange(groups, dtype=np.int32)).sum(0, dtype=np.int32)


def _visited(visit: Callable[..., Any], out: Any, rows: int, sizes: Any, few: bool) -> Any:
    """Apply `visit` to each pair of a block of rows and a group with rows in it, and to no rows in trips beyond them.

    The last block ends with the rows, so that it may overlap the one before; `of_group` are the rows of the pair.
    """
    low, high = BLOCKS
    block = min(rows, max(low, min(high, rows // (2 * len(sizes)) // low * low)))  # few rows are visited twice
    ends = jnp.cumsum(sizes, dtype=np.int32)
    starts = ends - sizes
    first = starts // block
    counts = jnp.where(sizes > 0, (ends - 1) // block - first + 1, 0)
    pairs = jnp.cumsum(counts, dtype=np.int32)

    def step(i: Any, out: Any) -> Any:
        g = jnp.minimum((pairs <= i).sum(dtype=np.int32), len(sizes) - 1)
        begin = (first[g] + i - (pairs[g] - counts[g])) * block
        start = jnp.minimum(begin, rows - block)
        at = start + np.arange(block, dtype=np.int32)[:, None]
        of_group = (at >= jnp.maximum(starts[g], begin)) & (at < ends[g]) & (i < pairs[-1])
        return visit(out, start, g, of_group, lambda a: lax.dynamic_slice_in_dim(a, start, block))

    most = min(-(-rows // block) + len(sizes) - 1, rows)
    return lax.fori_loop(0, jnp.minimum(pairs[-1], most) if few else most, step, out)


def _zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Zeros that vary over the mesh axes that `like` varies over."""
    return varying(jnp.zeros(shape, dtype), varying_axes(like))
