"""`md.nn.relative_bias`: the buckets of T5, and the same bias in decoding and under every layout."""

from __future__ import annotations

import math

import numpy as np
import pytest

import meshdsl as md
from meshdsl.nn.relative import bucket_numbers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 6), (16, 64), (4, 3)])
def test_buckets_are_those_of_t5(buckets: int, distance: int, causal: bool):
    """By its formula in float64, a hair above so that whole numbers are not rounded down."""

    def bucket(d: int) -> int:
        side, first = (buckets, 0) if causal else (buckets // 2, buckets // 2 if d > 0 else 0)
        d = max(-d, 0) if causal else abs(d)
        exact = side // 2
        if d < exact:
            return first + d
        ranges = math.log(d / exact) / math.log(distance / exact) * (side - exact)
        return first + min(exact + int(ranges + 1e-9), side - 1)

    found = bucket_numbers(buckets, distance, causal).tolist()
    assert found == [bucket(d) for d in range(-distance, distance + 1)]


def test_bias_depends_on_the_distance_only():
    heads, memory, length = md.dims("heads:3 memory:12 length:5")
    options = {"buckets": 8, "distance": 6, "causal": True}
    whole = md.model(lambda: md.nn.relative_bias(heads, memory, length, offset=4, **options))
    one = md.model(lambda at: md.nn.relative_bias(heads, memory, offset=at, **options))
    params = whole.init(md.random.key(0))
    bias = whole(params).numpy()
    for i in range(5):
        np.testing.assert_array_equal(bias[i], one(params, md.tensor(np.int32(i + 4), "")).numpy())
    table, numbers = params["positions"].numpy(), bucket_numbers(8, 6, True)
    apart = np.clip(np.arange(12) - (np.arange(5)[:, None] + 4), -6, 6) + 6
    np.testing.assert_array_equal(bias, table[numbers[apart]])
    for layout in ("heads:a", "memory:a bucket:b", "length:b heads:a memory:a"):
        program = md.compile(whole, "a:2 b:3", layout).program(params)
        np.testing.assert_array_equal(md.simulate(program, *params.values())[0], bias)


@pytest.mark.parametrize(("buckets", "distance"), [(2, 8), (32, 8)])
def test_too_few_buckets_or_distances_are_an_error(buckets: int, distance: int):
    model = md.model(lambda: md.nn.relative_bias(md.Dim("h", 1), "k:3", "q:2", buckets=buckets, distance=distance))
    with pytest.raises(md.ShapeError, match=f"of {buckets} buckets, {buckets // 4} hold one distance each"):
        model.specs()
