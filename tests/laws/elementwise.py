"""Rows of elementwise operations."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ops import elementwise
from meshdsl.ops.dtypes import bitcast, cast_parts

from .operands import INTS, REAL, V, X, size_of
from .row import In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def unaries() -> Iterator[Row]:
    jnn, special = jax.nn, scipy.special
    for name, values, reference, exact in [
        ("exp", "any", np.exp, False),
        ("log", "positive", np.log, False),
        ("log1p", "positive", np.log1p, False),
        ("expm1", "any", np.expm1, False),
        ("sqrt", "positive", np.sqrt, False),
        ("rsqrt", "positive", lambda x: 1 / np.sqrt(x), False),
        ("square", "any", np.square, True),
        ("abs", "any", np.abs, True),
        ("sign", "any", np.sign, True),
        ("reciprocal", "nonzero", lambda x: 1 / x, False),
        ("sin", "any", np.sin, False),
        ("cos", "any", np.cos, False),
        ("tanh", "any", np.tanh, False),
        ("erf", "any", special.erf, False),
        ("sigmoid", "any", special.expit, False),
        ("relu", "any", lambda x: np.maximum(x, 0), True),
        ("gelu", "any", jnn.gelu, False),
        ("silu", "any", jnn.silu, False),
        ("softplus", "any", jnn.softplus, False),
        ("elu", "any", jnn.elu, False),
        ("selu", "any", jnn.selu, False),
        ("leaky_relu", "any", jnn.leaky_relu, False),
        ("floor", "any", np.floor, True),
        ("ceil", "any", np.ceil, True),
        ("round", "any", np.round, True),
        ("tan", "any", np.tan, False),
        ("sinh", "any", np.sinh, False),
        ("cosh", "any", np.cosh, False),
        ("asin", "unit", np.arcsin, False),
        ("acos", "unit", np.arccos, False),
        ("atan", "any", np.arctan, False),
        ("asinh", "any", np.arcsinh, False),
        ("atanh", "unit", np.arctanh, False),
        ("log2", "positive", np.log2, False),
        ("log10", "positive", np.log10, False),
        ("exp2", "any", np.exp2, False),
        ("cbrt", "nonzero", np.cbrt, False),
        ("nan_to_num", "any", np.nan_to_num, True),
    ]:
        yield Row(name, getattr(md, name), (In("a b", values),), reference, exact=exact, smooth=name != "relu", composed=name == "nan_to_num")
    yield Row("acosh", lambda x: md.acosh(x + 2), (In("a b", "positive"),), lambda x: np.arccosh(x + 2), exact=False)
    yield Row("erf_inv", elementwise.erf_inv, (In("a b", "unit"),), special.erfinv, exact=False)
    yield Row("gelu_exact", lambda x: md.gelu(x, approximate=False), (X,), lambda x: jnn.gelu(x, False), exact=False)
    yield Row("negative", lambda x: -x, (X,), np.negative, dtypes=(*REAL, *INTS))
    yield Row("isnan", lambda x: md.isnan(x / x), (X,), lambda x: x == 0, differentiable=False)
    yield Row("isinf", lambda x: md.isinf(1 / x), (X,), lambda x: x == 0, differentiable=False)
    yield Row("isfinite", lambda x: md.isfinite(1 / x), (X,), lambda x: x != 0, differentiable=False)
    yield Row("logical_not", md.logical_not, (In("a b", dtype="bool"),), np.logical_not, differentiable=False)
    yield Row("not", lambda x: ~(x > 0), (X,), lambda x: ~(x > 0), dtypes=(*REAL, *INTS), differentiable=False)
    yield Row("invert", lambda x: ~x, (X,), np.invert, dtypes=INTS, differentiable=False)
    yield Row("stop_gradient", lambda x: md.stop_gradient(x) + x, (X,), lambda x: 2 * x, differentiable=False)
    yield Row("cast_narrow", lambda x: md.cast(x, "bfloat16"), (X,), dtypes=("float32",), differentiable=False)
    yield Row("cast_parts", lambda x: cast_parts(x, "bfloat16"), (X,), dtypes=("float32",), differentiable=False)
    yield Row("cast_reduced", lambda x: md.cast(x, "float32", reduce="bfloat16"), (X,), np.asarray, dtypes=("float32",))
    yield Row("cast_wide", lambda x: md.cast(x, "float64") * 2, (X,), lambda x: 2 * x.astype(np.float64))
    yield Row("cast_int", lambda x: md.cast(x, "int32"), (X,), lambda x: np.trunc(x), differentiable=False)
    yield Row("cast_bool", lambda x: md.cast(x, bool), (X,), lambda x: x != 0, differentiable=False)
    yield Row("cast_float", lambda x: md.cast(x, "float32"), (X,), np.asarray, dtypes=INTS, differentiable=False)
    bits = lambda x: bitcast(x, "uint32")
    yield Row("bitcast", bits, (In("a b", dtype="float32"),), lambda x: x.view(np.uint32), differentiable=False)
    yield Row("full", lambda x: x + 2, (X,), lambda x: x + 2, dtypes=(*REAL, *INTS))
    yield Row("clip", lambda x: md.clip(x, 1, 2), (X,), lambda x: np.clip(x, 1, 2), dtypes=(*REAL, *INTS))
    line = lambda x: x + md.arange(x.dims[1], 5, 3, x.dtype) + md.full(x.dims, 2, x.dtype)
    yield Row("arange", line, (X,), lambda x: x + 7 + 3 * np.arange(x.shape[1]), dtypes=(*REAL, *INTS))
    space = lambda x: x * md.linspace(x.dims[1], -2, 3, dtype=x.dtype)
    yield Row("linspace", space, (X,), lambda x: x * np.linspace(-2, 3, x.shape[1]), exact=False)
    constant = lambda x: x + md.tensor(np.arange(size_of(x, "b")).astype(x.dtype), [Dim("b", size_of(x, "b"))])
    yield Row("constant", constant, (X,), lambda x: x + np.arange(x.shape[1]), dtypes=(*REAL, *INTS))


def binaries() -> Iterator[Row]:
    both = (In("a b", "nonzero"), In("b", "nonzero"))
    plain = (X, V)
    for name, ins, function, dtypes, exact in [
        ("add", plain, lambda x, y: x + y, (*REAL, *INTS), True),
        ("subtract", plain, lambda x, y: x - y, (*REAL, *INTS), True),
        ("multiply", plain, lambda x, y: x * y, (*REAL, *INTS), True),
        ("divide", both, lambda x, y: x / y, REAL, False),
        ("remainder", both, lambda x, y: x % y, ("float32", "int32", "uint8"), True),
        ("atan2", both, lambda x, y: md.atan2(x, y) if isinstance(x, md.Tensor) else np.arctan2(x, y), ("float32",), False),
        ("hypot", both, lambda x, y: md.hypot(x, y) if isinstance(x, md.Tensor) else np.hypot(x, y), ("float32",), False),
        ("logaddexp", plain, lambda x, y: md.logaddexp(x, y) if isinstance(x, md.Tensor) else np.logaddexp(x, y), REAL, False),
        ("power", (In("a b", "positive"), V), lambda x, y: x**y, ("float32",), False),
    ]:
        yield Row(name, function, ins, function, dtypes=dtypes, exact=exact)
        yield Row(f"{name}_swapped", lambda y, x, f=function: f(x, y), ins[::-1], lambda y, x, f=function: f(x, y), dtypes, exact=exact)
        other = tuple(In(i.dims.replace("a ", ""), i.values) if i is ins[0] else In("a b", i.values) for i in ins)
        yield Row(f"{name}_wider", function, other, function, dtypes[:1], exact=exact)
    for name, function in [
        ("floor_divide", lambda x, y: x // y),
        ("equal", lambda x, y: x == y),
        ("not_equal", lambda x, y: x != y),
        ("less", lambda x, y: x < y),
        ("less_equal", lambda x, y: x <= y),
        ("greater", lambda x, y: x > y),
        ("greater_equal", lambda x, y: x >= y),
    ]:
        yield Row(name, function, both, function, dtypes=(*REAL, *INTS), differentiable=False)
    for name, function in [
        ("and", lambda x, y: x & y),
        ("or", lambda x, y: x | y),
        ("xor", lambda x, y: x ^ y),
        ("left_shift", lambda x, y: x << (y & 3)),
        ("right_shift", lambda x, y: x >> (y & 3)),
    ]:
        yield Row(name, function, plain, function, dtypes=INTS, differentiable=False)
    yield Row("and_bool", lambda x, y: x & y, (In("a b", dtype="bool"), In("b", dtype="bool")), np.logical_and, differentiable=False)
    yield Row("maximum", md.maximum, plain, np.maximum, dtypes=(*REAL, *INTS))
    yield Row("minimum", md.minimum, plain, np.minimum, dtypes=(*REAL, *INTS))
    yield Row("maximum_number", lambda x: md.maximum(x, 0), (X,), lambda x: np.maximum(x, 0))
    yield Row("square_power", lambda x: x**2, (X,), lambda x: x**2, dtypes=(*REAL, *INTS))
    yield Row("cube", lambda x: x**3, (X,), lambda x: x**3)
    yield Row("inverse_power", lambda x: x**-2, (In("a b", "nonzero"),), lambda x: x**-2.0, exact=False)
    yield Row("root", lambda x: x**0.5, (In("a b", "positive"),), np.sqrt, exact=False)
    yield Row("power_of_two", lambda x: 2.0**x, (X,), lambda x: 2.0**x, exact=False)
    yield Row("order", lambda x, y: x * y, (X, In("b a")), lambda x, y: x * y.T)
    yield Row("scalar", lambda x, y: x * y + y, (X, In("")), lambda x, y: x * y + y)
    yield Row("chain", lambda x, y, z: x * y + z, (In("a b c"), In("c a"), In("b")), lambda x, y, z: x * y.T[:, None] + z[:, None])
    choose = (In("a", dtype="bool"), X, V)
    yield Row("where", md.where, choose, lambda c, x, y: np.where(c[:, None], x, y), dtypes=(*REAL, *INTS))
    yield Row("where_number", lambda c, x: md.where(c, x, 0), choose[:2], lambda c, x: np.where(c[:, None], x, 0))
    larger = lambda x, y: md.map(lambda u, v: jnp.where(u > v, u * v, u + 2), x, y)
    yield Row("map_exact", larger, plain, lambda x, y: np.where(x > y, x * y, x + 2), ("float32",))
    yield Row("map", lambda x, y: md.map(lambda u, v: jnp.hypot(u, v + 1), x, y), (In("a b", "positive"), In("b", "positive")), lambda x, y: np.hypot(x, y + 1), dtypes=("float32",), exact=False)
