"""Trees of tensors to save, random meshes and layouts, and comparison bit for bit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

DTYPES = ["float32", "bfloat16", "int32", "bool", "float8_e4m3fn", "uint8", "float64", "complex64", "int4"]
SIZES = {"io": 7, "hidden": 12, "heads": 3, "layer": 5, "empty": 0}
MESHES = ["a:1", "a:2", "a:4 b:2", "a:8", "a:3 b:2", "a:2 b:2 c:2", "a:5"]


def bits(values: np.ndarray) -> np.ndarray:
    """The bytes, so that NaN equals itself and -0 differs from 0."""
    values = np.ascontiguousarray(values)
    return values.reshape(-1).view(np.uint8)


def any_bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Values of random bits: NaNs with payloads, infinities and denormals included."""
    kind = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "int4":
        return rng.integers(-8, 8, shape).astype(kind)
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return np.frombuffer(rng.bytes(count), kind).reshape(shape)


def specs(seed: int, count: int = 6) -> dict[str, Any]:
    """A nested tree of specs, with a tensor without dims and an empty one."""
    draw = random.Random(seed)
    flat = {}
    for n in range(count):
        names = draw.sample(list(SIZES)[:-1], draw.randint(0, 3))
        flat[f"w{n}"] = md.spec([md.Dim(name, SIZES[name]) for name in names], draw.choice(DTYPES))
    flat["none"] = md.spec("io:7 empty:0")
    return {"params": flat, "state": (flat["w0"], {"m": flat["w1"], "count": md.spec((), "int32")})}


def values_for(tree: Any, seed: int) -> Any:
    """Random bits for each spec of a tree."""
    numbers = itertools.count(seed)
    return jax.tree_util.tree_map(
        lambda spec: any_bits(tuple(d.size for d in spec.dims), spec.dtype.name, next(numbers)), tree
    )


def random_place(draw: random.Random, devices: int = 8) -> tuple[md.Mesh, md.Layout]:
    """A mesh of at most so many devices, and rules that use each of its axes at most once."""
    mesh = md.Mesh(draw.choice([m for m in MESHES if md.Mesh(m).size <= devices]))
    axes = list(mesh.axes)
    draw.shuffle(axes)
    rules: dict[str, list[str]] = {}
    for axis in axes:
        if draw.random() < 0.8:
            rules.setdefault(draw.choice(list(SIZES)[:-1]), []).append(axis)
    return mesh, md.Layout(rules)


def same(found: Any, values: Any) -> None:
    """Every restored tensor holds the same bits, and its padding nothing of note."""
    for x, wanted in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(values), strict=True):
        assert x.numpy().dtype == wanted.dtype and x.numpy().shape == wanted.shape
        assert np.array_equal(bits(x.numpy()), bits(wanted)), x.type


def tensors(tree: Any, values: Any, mesh: md.Mesh, layout: md.Layout) -> Any:
    """The values as tensors that lie as a compiled function would leave them: with padding that is not zero."""
    return jax.tree_util.tree_map(lambda spec, v: _stored(spec, v, mesh, layout), tree, values)


def _stored(spec: Any, values: np.ndarray, mesh: md.Mesh, layout: md.Layout) -> md.Tensor:
    from meshdsl.train.checkpoint.device_put import targets

    target = targets({"x": spec}, mesh, layout, None)["x"]
    pads = [(0, size - n) for size, n in zip(target.sizes, values.shape, strict=True)]
    fill = np.asarray(1, values.dtype)
    padded = np.pad(values, pads, constant_values=fill) if any(high for _, high in pads) else values
    array = jax.make_array_from_callback(target.sizes, target.sharding, lambda index: padded[index])
    return md.Tensor(spec.dims, spec.dtype, array=array)
