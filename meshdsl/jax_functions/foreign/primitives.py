"""One primitive on the blocks of all devices: by NumPy where it has the same, else by JAX, mapped over the devices.

Floats have 64 bits whatever the program's dtype; a primitive that is made for one dtype runs in it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ... import jax_functions
from .collectives import Array


def results(eqn: Any, arrays: Sequence[Any], devices: int) -> list[Any]:
    """The results [devices, ...] of a primitive that each device runs for itself."""
    name = eqn.primitive.name
    with np.errstate(all="ignore"):
        if f := _NUMPY.get(name):
            rank = max(x.ndim for x in arrays)  # a literal may be a scalar beside an array
            return [f(*(x.reshape(len(x), *[1] * (rank - x.ndim), *x.shape[1:]) for x in arrays))]
        if f := _BY_PARAMETERS.get(name):
            return [f(eqn, *arrays)]
    if is_narrow(eqn):
        return _bound(eqn, [_as(x, v.aval) for x, v in zip(arrays, eqn.invars, strict=True)], devices, {})
    return _bound(eqn, arrays, devices, {k: _widened(k, v) for k, v in eqn.params.items()})


def is_narrow(eqn: Any) -> bool:
    """True for a primitive that runs in the program's dtypes."""
    name = eqn.primitive.name
    return name in _NARROW or (bool(jax_functions.inner(eqn)) and name not in _FUNCTIONS)


def is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "fc"


def host(x: Any) -> Any:
    """A NumPy array, with floats of 64 bits; keys stay arrays of JAX."""
    if jax.numpy.issubdtype(getattr(x, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        return x
    x = np.asarray(x)
    return x.astype(_wide(x.dtype)) if x.dtype != _wide(x.dtype) else x


def _wide(dtype: Any) -> Any:
    if jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jax.numpy.issubdtype(dtype, jax.numpy.floating) else np.dtype(dtype)


def _as(x: Any, aval: Any) -> Any:
    return x if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key) else x.astype(aval.dtype)


def _widened(name: str, value: Any) -> Any:
    """A parameter of a primitive for floats of 64 bits, on no mesh."""
    if name in ("sharding", "out_sharding"):
        return None
    if (
        name in ("dtype", "new_dtype", "preferred_element_type", "accumulation_type", "index_dtype")
        and value is not None
    ):
        return value if jax.numpy.issubdtype(value, jax.dtypes.prng_key) else _wide(value)
    return value


def _bound(eqn: Any, arrays: Sequence[Any], devices: int, params: dict[str, Any]) -> list[Any]:
    """The results of a primitive on each device's arrays."""
    name, params = eqn.primitive.name, {**eqn.params, **params}
    if name == "pallas_call":
        params["interpret"] = True
    if f := _FUNCTIONS.get(name):
        keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        run: Any = lambda *xs: f(*xs, **{key: params[key] for key in keys})  # noqa: E731
    else:
        run = lambda *xs: eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(params))  # noqa: E731
    if arrays:
        results = jax.vmap(run)(*arrays)
        results = list(results) if eqn.primitive.multiple_results else [results]
        return [host(y) for y in results]
    results = run()
    results = list(results) if eqn.primitive.multiple_results else [results]
    return [np.broadcast_to(y := host(one), (devices, *y.shape)) for one in results]


_NARROW = {"bitcast_convert_type", "pallas_call", "reduce_precision"}
# Primitives whose parameters hold a function for one dtype, by the functions of JAX that make it.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add,
    "scatter-max": lax.scatter_max, "scatter-min": lax.scatter_min, "scatter-mul": lax.scatter_mul,
    "scatter-sub": lax.scatter_sub,
}  # fmt: skip


def _divided(x: Array, y: Array) -> Array:
    return x / y if x.dtype.kind in "fc" else np.trunc(x / np.where(y == 0, 1, y)).astype(x.dtype)


def _product(eqn: Any, x: Array, y: Array) -> Array:
    (over_x, over_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    names = iter(string.ascii_letters[1:])
    of_x, of_y = ([next(names) for _ in a.shape[1:]] for a in (x, y))
    for i, k in zip((*over_x, *batch_x), (*over_y, *batch_y), strict=True):
        of_y[k] = of_x[i]
    batch = [of_x[i] for i in batch_x]
    free = [[n for i, n in enumerate(of) if i not in (*over, *lead)]
            for of, over, lead in ((of_x, over_x, batch_x), (of_y, over_y, batch_y))]  # fmt: skip
    return np.einsum(
        f"a{''.join(of_x)},a{''.join(of_y)}->a{''.join([*batch, *free[0], *free[1]])}", x, y, optimize=True
    )


def _broadcast(eqn: Any, x: Array, *_: Any) -> Array:
    shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for size, i in zip(x.shape[1:], at, strict=True):
        sizes[i] = size
    return np.broadcast_to(x.reshape(len(x), *sizes), (len(x), *shape))


def _slice(eqn: Any, x: Array) -> Array:
    p = eqn.params
    steps = p["strides"] or [1] * len(p["start_indices"])
    places = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    return x[(slice(None), *(slice(a, b, step) for a, b, step in places))]


def _chosen(eqn: Any, which: Array, *cases: Array) -> Array:
    which = which.reshape(len(which), *which.shape[1:], *[1] * (cases[0].ndim - which.ndim)).astype(int)
    return (
        np.choose(np.broadcast_to(which, cases[0].shape), cases)
        if len(cases) != 2
        else np.where(which, cases[1], cases[0])
    )


def _reduced(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda eqn, x: f(x, axis=tuple(1 + a for a in eqn.params["axes"])).astype(_wide(eqn.outvars[0].aval.dtype))


def _converted(eqn: Any, x: Array) -> Array:
    to = _wide(eqn.params["new_dtype"])
    return (x.real if x.dtype.kind == "c" and to.kind != "c" else x).astype(to)


# Primitives that NumPy computes at once; the others run by JAX, one by one.
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "div": _divided,
    "exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "abs": np.abs, "sign": np.sign,
    "max": np.maximum, "min": np.minimum, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "not": np.invert, "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "pow": np.power,
}  # fmt: skip
_BY_PARAMETERS: dict[str, Callable[..., Any]] = {
    "dot_general": _product, "broadcast_in_dim": _broadcast, "slice": _slice, "select_n": _chosen,
    "convert_element_type": _converted,
    "transpose": lambda eqn, x: x.transpose(0, *(1 + i for i in eqn.params["permutation"])),
    "reshape": lambda eqn, x, *_: x.reshape(len(x), *eqn.params["new_sizes"]),
    "squeeze": lambda eqn, x: np.squeeze(x, tuple(1 + i for i in eqn.params["dimensions"])),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, 1 + eqn.params["dimension"]),
    "rev": lambda eqn, x: np.flip(x, tuple(1 + i for i in eqn.params["dimensions"])),
    "integer_pow": lambda eqn, x: x ** float(eqn.params["y"]) if x.dtype.kind == "f" else x ** eqn.params["y"],
    "reduce_sum": _reduced(np.sum), "reduce_max": _reduced(np.max), "reduce_min": _reduced(np.min),
    "reduce_and": _reduced(np.all), "reduce_or": _reduced(np.any),
}  # fmt: skip
