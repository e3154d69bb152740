"""Draws from distributions, in the shape of the given dims: equal to `jax.random`'s, bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...dims import Dim, DimLike, DimsLike, Shape, find, pick
from ...errors import ShapeError, whole
from ...ir import Type
from ...trace import Tensor, as_tensor, current
from ..dtypes import bitcast, cast
from ..elementwise import abs, erf_inv, log, log1p, maximum, minimum, sign, where
from ..extremes import argmax
from ..indexing import find_one, iota, take
from ..ordering import argsort, cumsum, top_k
from ..reductions import broadcast, sum
from ..reshape import rename, transpose
from ..slicing import slice
from ..statistics import searchsorted
from .keys import LOW_32, UNSIGNED, as_key, bits, dtype_of_kind, new_dims, split


@functools.lru_cache(maxsize=1024)
def _fused(function: Callable[..., Tensor], kinds: tuple[Type, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    def run(*arrays: Any) -> Any:
        ins = (Tensor(k.dims, k.dtype, array=a) for k, a in zip(kinds, arrays, strict=True))
        return function(*ins, **dict(options)).stored

    return jax.jit(run)


def _draw(
    function: Callable[..., Tensor], key: Tensor | jax.Array, *others: Tensor, shape: Shape, dtype: Any, name: str
) -> Tensor:
    """Call `function(key, *others, shape=, dtype=)`; outside a trace, as one compiled program.

    XLA rounds once when it fuses a product and a sum. Separately executed operations would differ in the last bit from
    `jax.random` and from the same function under `md.compile`.
    """
    ins = (as_key(key), *others)
    dtype = dtype_of_kind(name, dtype, "f", "floats")
    if current() is not None or any(x._trace is not None for x in ins):
        return function(*ins, shape=shape, dtype=dtype)
    options = (("dtype", dtype), ("shape", shape))
    return Tensor(shape, dtype, array=_fused(function, tuple(x.type for x in ins), options)(*(x.array for x in ins)))


def _uniform(key: Tensor | jax.Array, low: Tensor, high: Tensor, *, shape: Shape, dtype: np.dtype) -> Tensor:
    """Random mantissa bits with the exponent of 1, minus 1, scaled; from 8 random bits if the mantissa has fewer."""
    info = jnp.finfo(dtype)
    width = info.bits if info.nmant >= 8 else 8
    pattern = cast(bits(key, shape, UNSIGNED[width]), UNSIGNED[info.bits])
    one = int(np.ones((), dtype).view(UNSIGNED[info.bits]))
    unit = bitcast(pattern >> (width - info.nmant) | one, dtype) - 1
    return maximum(unit * (high - low) + low, low)


def uniform(
    key: Tensor | jax.Array, dims: DimsLike = (), low: Any = 0, high: Any = 1, dtype: Any = "float32"
) -> Tensor:
    """Draw from the uniform distribution on [low, high).

    >>> import meshdsl as md
    >>> md.random.uniform(md.random.key(7), "a:2")
    tensor(float32[a=2], [0.6741 0.9746])
    """
    kind = dtype_of_kind("uniform", dtype, "f", "floats")
    ends = (cast(x, kind) if isinstance(x, Tensor) else as_tensor(x, kind) for x in (low, high))
    return _draw(_uniform, key, *ends, shape=new_dims(dims), dtype=dtype, name="uniform")


def _normal(key: Tensor | jax.Array, *, shape: Shape, dtype: np.dtype) -> Tensor:
    low = float(np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype))
    return float(np.array(math.sqrt(2), dtype)) * erf_inv(uniform(key, shape, low, 1, dtype))


def normal(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """Draw from the standard normal distribution.

    >>> import meshdsl as md
    >>> md.random.normal(md.random.key(7), "a:2")
    tensor(float32[a=2], [0.4512 1.9535])
    """
    return _draw(_normal, key, shape=new_dims(dims), dtype=dtype, name="normal")


def truncated_normal(
    key: Tensor | jax.Array, low: float, high: float, dims: DimsLike = (), dtype: Any = "float32"
) -> Tensor:
    """Draw from the standard normal distribution truncated to (`low`, `high`), which are numbers.

    >>> import meshdsl as md
    >>> drawn = md.random.truncated_normal(md.random.key(7), -1.0, 1.0, "a:1000")
    >>> (md.max(md.abs(drawn)) <= 1).item()
    True

    The results equal those of `jax.random.truncated_normal`.
    """
    if not low < high:
        raise ShapeError(f"there is no number between {low} and {high}; give low < high")
    dtype = dtype_of_kind("truncated_normal", dtype, "f", "floats")
    root = np.array(math.sqrt(2), dtype)
    with jax.ensure_compile_time_eval():
        erf = jax.jit(lambda x: jax.lax.erf(x / root))
        ends = [float(erf(jnp.asarray(x, dtype))) for x in (low, high)]
    towards = ((low, np.inf), (high, -np.inf))
    inside = [float(np.nextafter(np.array(x, dtype), np.array(to, dtype))) for x, to in towards]
    sample = float(root) * erf_inv(uniform(key, dims, *ends, dtype=dtype))
    return minimum(maximum(sample, inside[0]), inside[1])


def _gumbel(key: Tensor | jax.Array, *, shape: Shape, dtype: np.dtype) -> Tensor:
    return -log(-log(uniform(key, shape, float(jnp.finfo(dtype).tiny), 1, dtype)))


def gumbel(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """Draw from the standard Gumbel distribution, -log(-log(u)).

    With it, `md.argmax(logits + noise, over)` samples categories with probabilities softmax(logits).

    >>> import meshdsl as md
    >>> logits = md.log(md.tensor([0.9, 0.1], "category"))
    >>> noise = md.random.gumbel(md.random.key(7), "draw:1000 category:2")
    >>> (md.argmax(logits + noise, "category") == 0).numpy().sum()
    np.int64(898)
    """
    return _draw(_gumbel, key, shape=new_dims(dims), dtype=dtype, name="gumbel")


def _exponential(key: Tensor | jax.Array, *, shape: Shape, dtype: np.dtype) -> Tensor:
    return -log1p(-uniform(key, shape, dtype=dtype))


def exponential(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """Draw from the exponential distribution with mean 1.

    >>> import meshdsl as md
    >>> md.random.exponential(md.random.key(7), "a:2")
    tensor(float32[a=2], [1.1211 3.6737])
    """
    return _draw(_exponential, key, shape=new_dims(dims), dtype=dtype, name="exponential")


def _laplace(key: Tensor | jax.Array, *, shape: Shape, dtype: np.dtype) -> Tensor:
    u = uniform(key, shape, float(np.asarray(-1.0 + jnp.finfo(dtype).epsneg, dtype)), 1, dtype)
    return sign(u) * log1p(-abs(u))


def laplace(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """Draw from the Laplace distribution with scale 1.

    >>> import meshdsl as md
    >>> md.random.laplace(md.random.key(7), "a:2")
    tensor(float32[a=2], [-0.428  -2.9805])
    """
    return _draw(_laplace, key, shape=new_dims(dims), dtype=dtype, name="laplace")


def rademacher(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "int32") -> Tensor:
    """Draw -1 or 1, each with probability 1/2.

    >>> import meshdsl as md
    >>> md.random.rademacher(md.random.key(7), "a:4")
    tensor(int32[a=4], [-1 -1  1  1])
    """
    return cast(2 * cast(bernoulli(key, 0.5, new_dims(dims)), "int32") - 1, dtype)


def categorical(key: Tensor | jax.Array, logits: Any, over: DimLike, dims: DimsLike = ()) -> Tensor:
    """Draw indices (int32) along `over` with probabilities `md.softmax(logits, over)`; independently for new `dims`.

    >>> import meshdsl as md
    >>> logits = md.log(md.tensor([0.9, 0.1], "class"))
    >>> md.random.categorical(md.random.key(7), logits, "class", "draw:4")
    tensor(int32[draw=4], [1 0 0 0])

    A sharded `over` is not gathered.
    """
    logits = as_tensor(logits)
    noise = gumbel(key, (*new_dims(dims), *logits.dims), dtype=logits.dtype)
    return argmax(noise + broadcast(logits, noise.dims), over)


def choice(key: Tensor | jax.Array, x: Any, over: DimLike, dim: DimLike, p: Any = None, replace: bool = True) -> Tensor:
    """Draw slices of x along `over`, as the new `dim` in its place; with probabilities `p`, which have the dim `over`.

    >>> import meshdsl as md
    >>> md.random.choice(md.random.key(7), md.tensor([10, 20, 30], "a"), "a", "draw:2", replace=False)
    tensor(int32[draw=2], [30 10])

    Without `replace`, no slice is drawn twice. Raises `ShapeError` for a dim that x lacks, and for more draws without
    replacement than there are slices.
    """
    x = as_tensor(x)
    d, (drawn,) = find(over, x.dims), new_dims(dim)
    if (not replace and drawn.size > d.size) or not d.size:
        raise ShapeError(
            f"md.random.choice cannot draw {drawn!r} from {d!r}{'' if replace else ' without replacement'}"
        )
    if p is not None and as_tensor(p).dims != (d,):
        raise ShapeError(f"the probabilities of md.random.choice have the dim {d!r}, got {as_tensor(p).type}")
    if p is None and replace:
        i = randint(key, drawn, 0, d.size, jax.dtypes.canonicalize_dtype(np.int64))  # that of jax.random.choice
    elif p is None:
        i = rename(slice(_shuffled(key, d), d, 0, drawn.size), **{d.name: drawn.name})
    elif replace:
        running = cumsum(as_tensor(p), d)
        i = searchsorted(running, sum(p, d) * (1 - uniform(key, drawn, dtype=as_tensor(p).dtype)), d)
    else:
        i = top_k(gumbel(key, d, dtype=as_tensor(p).dtype) + log(p), d, drawn)[1]
    return transpose(take(x, i, d, drop=True), [drawn if e == d else e for e in x.dims])


def bernoulli(key: Tensor | jax.Array, p: Any = 0.5, dims: DimsLike | None = None) -> Tensor:
    """Draw booleans that are true with probability `p`, a floating number or tensor, over `dims` (default: p's dims).

    >>> import meshdsl as md
    >>> md.random.bernoulli(md.random.key(7), 0.9, "a:2")
    tensor(bool[a=2], [ True False])
    """
    if isinstance(p, int | float) and not 0 <= p <= 1:
        raise ShapeError(f"a probability is from 0 to 1, got {p}")
    p = as_tensor(p)
    return uniform(key, p.dims if dims is None else dims, dtype=p.dtype) < p


def randint(
    key: Tensor | jax.Array, dims: DimsLike, low: Tensor | int, high: Tensor | int, dtype: Any = "int32"
) -> Tensor:
    """Draw uniform integers from `low` (inclusive) to `high` (exclusive).

    >>> import meshdsl as md
    >>> md.random.randint(md.random.key(7), "a:4", 0, 10)
    tensor(int32[a=4], [9 2 0 7])

    Raises `ShapeError` if two numbers leave no integer between them, and for tensors that are not integers. Where
    tensors leave none, the result is `low`.
    """
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, Tensor) and bound.dtype.kind not in "iu":
            raise ShapeError(f"md.random.randint needs integers; {name} is {bound.type}")
        if not isinstance(bound, Tensor):
            whole(name, bound)
    if isinstance(low, int | np.integer) and isinstance(high, int | np.integer) and not low < high:
        raise ShapeError(f"there is no integer from {low} to below {high}; give low < high")
    shape, dtype = new_dims(dims), dtype_of_kind("randint", dtype, "i", "integers")
    sampled = dtype if dtype.itemsize >= 4 else np.dtype(np.int32)
    unsigned, info = np.dtype(UNSIGNED[sampled.itemsize * 8]), np.iinfo(dtype)
    beyond = high > int(np.iinfo(sampled).max)
    least, most = int(info.min), int(info.max) + (dtype != sampled)
    low, high = (_clipped(x, least, most, sampled) for x in (low, high))
    nonempty = high > low
    span = where(nonempty, cast(high - low, unsigned), 1)
    span = where(nonempty & beyond, span + 1, span)  # a span of 0 means all 2**bits integers

    def rest(x: Tensor) -> Tensor:
        return x % span if beyond is False else where(span == 0, x, x % span)

    half = rest(as_tensor(1 << sampled.itemsize * 4, unsigned))
    first, second = (bits(k, shape, unsigned) for k in split(key))
    offset = rest(rest(first) * rest(half * half) + rest(second))
    return cast(low + cast(offset, sampled), dtype)


def _clipped(x: Any, least: int, most: int, dtype: np.dtype) -> Tensor:
    if not isinstance(x, Tensor):
        return as_tensor(max(least, min(most, int(x))), dtype)
    limits = np.iinfo(x.dtype)
    return cast(minimum(maximum(x, max(least, int(limits.min))), min(most, int(limits.max))), dtype)


def permutation(key: Tensor | jax.Array, x: Tensor | DimLike, over: DimLike | None = None) -> Tensor:
    """The slices of `x` along `over` in random order. If `x` is a dim, the dim's indices in random order.

    >>> import meshdsl as md
    >>> md.random.permutation(md.random.key(7), "n:5")
    tensor(int32[n=5], [4 2 3 0 1])
    """
    if not isinstance(x, Tensor):
        return _shuffled(key, find_one(new_dims(x)))
    dim = find_one(x.dims if over is None else pick(over, x.dims))
    return transpose(take(x, _shuffled(key, dim), dim), x.dims)


def _shuffled(key: Tensor | jax.Array, dim: Dim) -> Tensor:
    """The dim's indices sorted by random words, in enough rounds that a tie in all rounds is unlikely."""
    order = iota(dim)
    for _ in range(math.ceil(3 * math.log(max(1, dim.size)) / math.log(LOW_32))):
        key, subkey = split(key)
        order = take(order, argsort(bits(subkey, dim), dim), dim)
    return order
