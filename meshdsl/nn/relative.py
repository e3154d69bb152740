"""Relative positions as a bias of attention: a learned number for each head and each range of distances."""

from __future__ import annotations

from typing import Any

import numpy as np

import meshdsl as md

from .precision import FLOAT32, DimLike, Precision, new_dim


def relative_bias(
    heads: DimLike,
    keys: DimLike,
    queries: DimLike | None = None,
    *,
    causal: bool = False,
    buckets: int = 32,
    distance: int = 128,
    offset: int | md.Tensor = 0,
    name: str = "positions",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """A learned bias [queries, keys, heads] for `md.attention(bias=)`, which depends on the distance of key and query.

    >>> import meshdsl as md
    >>> model = md.model(lambda: md.nn.relative_bias(md.Dim("heads", 4), "memory:6", "length:6"))
    >>> model.specs(), md.eval_shape(model, model.specs())
    ({'positions': float32[bucket=32 heads=4]}, float32[length=6 memory=6 heads=4])

    (Raffel et al., "T5", 2020, section 2.1.) Half of the `buckets` are for keys after their query, unless `causal`:
    then these have bucket 0. Of the buckets of one side, half hold one distance each, and the others ranges that grow
    exponentially up to `distance`; longer distances share the last. Without `queries`, there is one query, at position
    `offset`; otherwise `offset` is the position of the first. If several dims map to the same mesh axis, `heads` is
    sharded. Raises `ShapeError` if no distance would have a bucket of
    its own, or all of them.
    """
    heads = new_dim(heads, "the heads")
    key, query = new_dim(keys, "the keys"), None if queries is None else new_dim(queries, "the queries")
    numbers = bucket_numbers(buckets, distance, causal)
    dims = [key] if query is None else [query, key]
    bucket = md.fresh_dim(md.Dim("bucket", buckets), dims, [heads])
    place = md.fresh_dim(md.Dim("distance", len(numbers)), dims)
    at = md.cast(offset, "int32") if query is None else md.iota(query) + offset
    apart = md.minimum(md.maximum(md.broadcast(md.iota(key), dims) - at, -distance), distance) + distance
    table = md.param(name, [bucket, heads], init=init or md.init.normal(0.02), dtype=precision.param)
    index = md.take(md.tensor(numbers, [place]), apart, place)
    return md.cast(md.prefer(md.take(table, index, bucket), heads), precision.compute)


def bucket_numbers(buckets: int, distance: int, causal: bool) -> np.ndarray:
    """The bucket of each distance from -distance to distance (int32); positive ones are those of later keys.

    >>> bucket_numbers(8, 6, causal=True).tolist()
    [7, 6, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    """
    side = buckets if causal else buckets // 2
    exact = side // 2
    if exact < 1 or distance <= exact:
        raise md.ShapeError(
            f"md.nn.relative_bias: of {buckets} buckets, {exact} hold one distance each; this must be at least 1, and "
            f"less than the largest distance, {distance}"
        )
    ranges = side - exact
    # distance d >= exact is in range k if (distance/exact)^(k/ranges) <= d/exact, compared in whole numbers
    starts = [[d**ranges >= exact ** (ranges - k) * distance**k for k in range(1, ranges)] for d in range(distance + 1)]
    one = [d if d < exact else exact + sum(starts[d]) for d in range(distance + 1)]
    later = [0 if causal else side + one[d] for d in range(1, distance + 1)]
    return np.asarray([*reversed(one), *later], np.int32)
