"""Sums of the bits of tensors: equal for equal values under any layout, and different for others."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

import meshdsl as md
from meshdsl.train.checkpoint.digest import sums
from meshdsl.train.peers import digests
from tests.joined import calls

DTYPES = [np.dtype(t) for t in (bool, "i1", "u2", "i4", "i8", ml_dtypes.bfloat16, "f2", "f4", "f8", "c8")]
LAYOUTS = ["io:rows", "hidden:rows", "io:rows,cols", "io:cols hidden:rows", ""]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_do_not_depend_on_the_layout(dtype: np.dtype):
    values = np.random.default_rng(0).integers(0, 2, (5, 3)).astype(dtype)
    x = md.tensor(values, "io hidden")  # 5 and 3 are padded
    results = calls(*((md.compile(lambda x: x, "rows:2 cols:2", layout), [x]) for layout in LAYOUTS))
    moved = dict(zip(LAYOUTS, results, strict=True))
    assert len({*sums(moved).values()}) == 1 and sums({"": x}) == {"": sums(moved)["io:rows"]}
    changed, swapped = values.copy(), values.copy()
    changed[4, 1] = values[4, 1] == 0
    (row, *_), (column, *_) = np.nonzero(values != values[0, 0])
    swapped[0, 0], swapped[row, column] = values[row, column], values[0, 0]
    others = {"same": values, "changed": changed, "swapped": swapped, "zero": np.zeros_like(values)}
    assert len({*sums({name: md.tensor(v, "io hidden") for name, v in others.items()}).values()}) == 4


def test_digests_show_copies_that_differ_on_the_devices_of_a_process():
    mesh = md.Mesh("all:2").bind()
    copies = [jax.device_put(np.full(3, v, np.float32), d) for v, d in zip((1, 2), mesh.devices, strict=True)]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_single_device_arrays((3,), sharding, copies)
    x = md.Tensor((md.Dim("io", 3),), np.float32, array=array)
    one, other = (sums({"": md.tensor(np.full(3, v, np.float32), "io")})[""] for v in (1, 2))
    assert digests({"w": x}) == {"['w'][0:3]": [one, other]}
    assert digests({"w": md.full("io:3", 1.0)}) == {}
