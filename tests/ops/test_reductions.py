"""Reductions have the dtypes of jax.numpy and round narrow floats once: eagerly, split unevenly, and simulated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import meshdsl as md
from meshdsl.ops.pooling import sum_pool

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
EAGER = ("bool", "int8", "uint8", "bfloat16", "float16", "complex64")  # operations at once compile one by one
SIZES = [301, 8]  # over four devices: uneven, and many enough to need a wide sum; even
WINDOW = 4


def windows(x: Any) -> Any:
    n = x.shape[0] // WINDOW
    return x[: n * WINDOW].reshape(n, WINDOW, *x.shape[1:])


# name: ours, NumPy's in wide numbers, and the function of JAX with the same dtype
REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "sum": (md.sum, np.sum, jnp.sum),
    "prod": (md.prod, np.prod, jnp.prod),
    "mean": (md.mean, np.mean, jnp.mean),
    "var": (md.var, np.var, jnp.var),
    "max": (md.max, np.max, jnp.max),
    "min": (md.min, np.min, jnp.min),
    "any": (md.any, np.any, jnp.any),
    "all": (md.all, np.all, jnp.all),
    "cumsum": (md.cumsum, np.cumsum, jnp.cumsum),
    "cumprod": (md.cumprod, np.cumprod, jnp.cumprod),
    "logsumexp": (md.logsumexp, logsumexp, jax.nn.logsumexp),
    "norm": (md.norm, np.linalg.norm, jnp.linalg.norm),
    "norm 1": (lambda x, d: md.norm(x, d, ord=1), lambda x, axis: np.abs(x).sum(axis), jnp.linalg.norm),
    "norm inf": (lambda x, d: md.norm(x, d, ord=np.inf), lambda x, axis: np.abs(x).max(axis), jnp.linalg.norm),
    "avg_pool": (lambda x, d: md.avg_pool(x, {d: WINDOW}), lambda x, axis: windows(x).mean(1), jnp.mean),
    "sum_pool": (lambda x, d: sum_pool(x, {d: WINDOW}), lambda x, axis: windows(x).sum(1), jnp.sum),
    "einsum": (lambda x, d: md.einsum(x, x, out="b"), lambda x, axis: (x * x).sum(axis), jnp.max),
}  # fmt: skip
REFUSED = {
    (name, f"complex{n}") for name in ("max", "min", "norm", "norm 1", "norm inf", "logsumexp") for n in (64, 128)
}


def operand(dtype: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    if dtype.startswith(("int", "uint")):
        return rng.integers(60, 120, (size, 2)).astype(dtype)  # a few exceed 8 bits in sum
    if dtype.startswith("complex"):
        return (rng.uniform(0.5, 1.5, (size, 2)) + 1j * rng.normal(size=(size, 2))).astype(dtype)
    return (rng.uniform(size=(size, 2)) > 0.3 if dtype == "bool" else rng.uniform(0.5, 1.5, (size, 2))).astype(dtype)


def taken(dtype: str) -> list[str]:
    """The reductions that take the dtype; the others refuse it with a typed error."""
    x = md.tensor(operand(dtype, SIZES[1]), "a b")
    for name in REDUCTIONS:
        if (name, dtype) in REFUSED:
            with pytest.raises(md.ShapeError, match=dtype):
                REDUCTIONS[name][0](x, "a")
    return [name for name in REDUCTIONS if (name, dtype) not in REFUSED]


def expected(name: str, x: np.ndarray) -> np.ndarray:
    """The result in the dtype of JAX's function, computed in float64 or in integers that wrap, and rounded once."""
    _, exact, jax_function = REDUCTIONS[name]
    dtype = np.dtype(jax.eval_shape(jax_function, jax.ShapeDtypeStruct(x.shape[:1], x.dtype)).dtype)
    wide = {"V": np.float64, "f": np.float64}.get(x.dtype.kind, x.dtype)
    if dtype.kind in "iu":
        wide = dtype
    with np.errstate(all="ignore"):
        return np.asarray(exact(x.astype(wide), axis=0)).astype(dtype)


def agree(name: str, ours: Any, x: np.ndarray) -> None:
    want = expected(name, x)
    got = np.asarray(ours)
    assert got.dtype == want.dtype, (name, got.dtype, want.dtype)
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    narrow = want.dtype.itemsize < 4
    rounding = 1.01 * float(jnp.finfo(want.dtype).eps) * (1 if narrow else 4 * len(x))
    if narrow and name == "einsum":
        return  # its partial sums have the dtype that its caller asks for
    got, want = (y.astype(np.complex128 if y.dtype.kind == "c" else np.float64) for y in (got, want))
    np.testing.assert_allclose(got, want, rtol=rounding, atol=1e-30, err_msg=name)


@pytest.mark.usefixtures("at_once_in_jax")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_jnps_under_every_layout(dtype: str, size: int) -> None:
    array, names = operand(dtype, size), taken(dtype)
    x = md.tensor(array, "a b")
    f = md.compile(lambda x: [REDUCTIONS[name][0](x, "a") for name in names], "r:4", "a:r")
    eager = size % 4 == 0 and dtype in EAGER
    run = [REDUCTIONS[name][0](x, "a").numpy() for name in names] if eager else [y.numpy() for y in f(x)]
    for results in (run, md.simulate(f.program(x), x)):
        for name, ours in zip(names, results, strict=True):
            agree(name, ours, array)


def test_dtypes_of_reductions_are_jnps_without_64_bits() -> None:
    with jax.enable_x64(False):
        for dtype in [d for d in DTYPES if not re.search("64$|128$", d) or d == "complex64"]:
            names = [name for name in REDUCTIONS if (name, dtype) not in REFUSED]
            f = lambda x, names=names: [REDUCTIONS[name][0](x, "a") for name in names]  # noqa: E731
            for name, ours in zip(names, md.eval_shape(f, md.spec("a:8 b:2", dtype)), strict=True):
                assert ours.dtype == expected(name, operand(dtype, SIZES[1])).dtype, (name, dtype, ours.dtype)


def test_the_variance_of_complex_numbers_has_the_gradient_of_jax() -> None:
    x = operand("complex128", 5)[:, 0]
    ours = md.grad(md.var)(md.tensor(x, "a")).numpy()
    np.testing.assert_allclose(ours, jax.grad(jnp.var)(x), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_devices_add_narrow_floats_in_float32(dtype: str) -> None:
    program = md.compile(lambda x: (md.sum(x, "a"), md.mean(x, "a")), "r:4", "a:r").program(md.spec("a:8 b:2", dtype))
    assert {str(c.dtype) for c in program.collectives} == {"float32"}
