"""Random numbers that depend only on the key and on an element's global index, so they are equal under every layout.

The bits of element i, in row-major order of the given dims, are Threefry-2x32 of the key and i (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011). Each device generates its own block from its offsets. All
numbers equal those of `jax.random` with `jax.random.key(seed)`, bit for bit, for the same sizes and dtype. A key is
an ordinary uint32 tensor with the single dim key_word=2: it can be passed, stacked and scanned over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..backend import Block, Local
from ..dims import Dim, DimLike, DimsLike, Shape, pick, size_of
from ..errors import ShapeError, at, caller, located
from ..ir import Fuses, Op, Type
from ..trace import KEY_WORD, Tensor, as_tensor, bind1, current, tensor
from .dtypes import as_dtype, bitcast, cast, kind
from .elementwise import erf_inv, log, maximum, minimum, where
from .indexing import find_one, iota, take
from .joining import stack, unstack
from .ordering import argsort
from .reductions import spread
from .reshape import refill, transpose

__all__ = [
    "bernoulli", "bits", "fold_in", "gumbel", "key", "normal", "permutation", "randint", "split", "truncated_normal",
    "uniform",
]  # fmt: skip

WORD = KEY_WORD
_LOW_32 = 0xFFFFFFFF
_LOW_16 = np.uint32(0xFFFF)
_UNSIGNED = {8: "uint8", 16: "uint16", 32: "uint32", 64: "uint64"}
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, on uint32 arrays of NumPy or JAX; sums wrap around."""
    ks = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + k0, x1 + k1
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(by)) | (x1 >> np.uint32(32 - by))) ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3], x1 + ks[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


def _wide_product(p: Any, stride: int) -> tuple[Any, Any]:
    """The high and low words of the product (modulo 2**64) of a uint32 array and a 64-bit number, in 16-bit digits."""
    s0, s1 = np.uint32(stride & 0xFFFF), np.uint32(stride >> 16 & 0xFFFF)
    p0, p1 = p & _LOW_16, p >> np.uint32(16)
    middle = p1 * s0 + (p0 * s0 >> np.uint32(16))
    carry = p0 * s1 + (middle & _LOW_16)
    high = p1 * s1 + (middle >> np.uint32(16)) + (carry >> np.uint32(16)) + p * np.uint32(stride >> 32 & _LOW_32)
    return high, p * np.uint32(stride & _LOW_32)


def _element_index(c: Local, block: Block) -> tuple[Any, Any]:
    """The global row-major index of each element of a block, as a high and a low uint32 word."""
    high = low = c.xp.zeros((1,), np.uint32)
    narrow = size_of(block.shape) <= 1 << 32
    for i, dim in enumerate(block.shape):
        stride = size_of(block.shape[i + 1 :])
        index = c.xp.arange(block.sizes[i], dtype=np.uint32) + c.xp.asarray(c.start(block, dim), np.uint32)
        index = index.reshape((-1,) + (1,) * (len(block.sizes) - i - 1))
        if narrow:
            low = low + index * np.uint32(stride & _LOW_32)
            continue
        more_high, more_low = _wide_product(index, stride)
        low = low + more_low
        high = high + more_high + (low < more_low).astype(np.uint32)
    return high, low


def _words(c: Local, key: Any, rank: int, high: Any, low: Any) -> tuple[Any, Any]:
    """The words of each element, of `rank` axes, for each key; never of scalars, since NumPy's warn on overflow."""
    k0, k1 = (key[..., i].reshape(key.shape[:-1] + (1,) * rank) for i in (0, 1))
    return c.xp.outline(threefry)(k0, k1, high, low)


def _key(key: Any) -> Tensor:
    """Return the user's key; raise `ShapeError` if it is not a tensor. `_check_key` checks its type."""
    if isinstance(key, Tensor):
        return key
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.shape:
        return tensor(key)
    what = repr(key) if isinstance(key, int) else type(key).__name__
    error = ShapeError(f"a random key is a uint32[{WORD}] tensor, got {what}\n  make one with md.random.key(seed)")
    raise at(error, caller())


def _check_key(key: Type, batch: Shape) -> None:
    """Raise `ShapeError` unless the type is that of a key, or of one key for each place of `batch`."""
    if key.shape != (*batch, WORD) or key.dtype != np.uint32:
        raise ShapeError(f"a random key is a uint32[{WORD}] tensor, got {key}\n  make one with md.random.key(seed)")


def _bits_type(key: Type, *, shape: Shape, dtype: np.dtype, batch: Shape = ()) -> Type:
    _check_key(key, batch)
    if dtype.name not in _UNSIGNED.values():
        raise ShapeError(f"random bits are {', '.join(_UNSIGNED.values())}, not {dtype.name}")
    return Type((*batch, *shape), dtype)


def _bits_kernel(c: Local, key: Any, *, shape: Shape, dtype: np.dtype, batch: Shape = ()) -> Any:
    out, n = c.outs[0], len(batch)
    drawn = Block(out.shape[n:], out.sizes[n:], out.axes[n:])  # the numbers of one key depend on these dims only
    a, b = _words(c, key, max(1, len(shape)), *_element_index(c, drawn))
    if dtype.itemsize == 8:
        word = (a.astype(dtype) << np.uint64(32)) | b.astype(dtype)
    else:
        word = (a ^ b).astype(dtype)
    return word.reshape(c.outs[0].sizes)


_BITS = Op(
    "bits",
    type=_bits_type,
    kernel=_bits_kernel,
    vmap=lambda key, *, new, batch=(), **params: bind1(_BITS, key, batch=(new, *batch), **params),
    blocked=lambda key, **_: (WORD.name,),
    flops=lambda ins, outs, **_: 115.0 * math.prod(outs[0]),  # integer operations in 20 rounds and 5 key injections
    fuses=Fuses.MAP,
)


def _fold_in_type(key: Type, i: Type, *, batch: Shape = ()) -> Type:
    _check_key(key, batch)
    if i.dtype != np.uint32:
        raise ShapeError(f"md.random.fold_in takes an integer, got {i}")
    return Type((*i.shape, WORD), np.dtype(np.uint32))


def _fold_in_kernel(c: Local, key: Any, i: Any, *, batch: Shape = ()) -> Any:
    i = i.reshape((*i.shape, 1))
    a, b = _words(c, key, i.ndim - len(batch), c.xp.zeros((1,), np.uint32), i)
    words = c.xp.stack([a, b], -1)
    return refill(c, words.reshape((*c.outs[0].sizes[:-1], 2)), c.outs[0])


def _fold_in_vmap(key: Tensor, i: Tensor, *, new: Dim, batch: Shape = ()) -> Tensor:
    if new not in key.dims:
        return bind1(_FOLD_IN, key, transpose(i, (*batch, *(d for d in i.dims if d not in batch))), batch=batch)
    return bind1(_FOLD_IN, key, *spread([i], new), batch=(new, *batch))


_FOLD_IN = Op(
    "fold_in",
    type=_fold_in_type,
    kernel=_fold_in_kernel,
    vmap=_fold_in_vmap,
    blocked=lambda key, i, **_: (WORD.name,),
    flops=lambda ins, outs, **_: 60.0 * math.prod(outs[0]),
    fuses=Fuses.MAP,
)


@functools.lru_cache(maxsize=1024)
def _fused(function: Callable[..., Tensor], kinds: tuple[Type, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    def run(*arrays: Any) -> Any:
        ins = (Tensor(k.shape, k.dtype, array=a) for k, a in zip(kinds, arrays, strict=True))
        return function(*ins, **dict(options)).stored

    return jax.jit(run)


def _draw(
    function: Callable[..., Tensor], key: Tensor | jax.Array, *others: Tensor, shape: Shape, dtype: Any, name: str
) -> Tensor:
    """Call `function(key, *others, shape=, dtype=)`; outside a trace, as one compiled program.

    XLA rounds once when it fuses a product and a sum. Separately executed operations would differ in the last bit from
    `jax.random` and from the same function under `md.compile`.
    """
    ins = (_key(key), *others)
    dtype = located(lambda: _float(name, dtype))
    if current() is not None or any(x._trace is not None for x in ins):
        return function(*ins, shape=shape, dtype=dtype)
    options = (("dtype", dtype), ("shape", shape))
    return Tensor(shape, dtype, array=_fused(function, tuple(x.type for x in ins), options)(*(x.array for x in ins)))


def _float(name: str, dtype: Any) -> np.dtype:
    return _dtype_of_kind(name, dtype, "f", "floats")


def _dtype_of_kind(name: str, dtype: Any, required_kind: str, words: str) -> np.dtype:
    """Convert to a NumPy dtype; raise `ShapeError` if its kind is not `required_kind`."""
    dtype = as_dtype(dtype)
    if kind(dtype) != required_kind:
        raise ShapeError(f"md.random.{name} draws {words}, not {dtype.name}")
    return dtype


def _dims(dims: DimsLike) -> Shape:
    return located(lambda: pick(dims, (), new=True))


def key(seed: Any) -> Tensor:
    """Create a random key, equal to `jax.random.key(seed)`. The seed is an integer or a traced integer.

    >>> import meshdsl as md
    >>> md.random.key(7)
    tensor(uint32[key_word=2], [0 7])
    """
    has_int64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64  # else `jax.random.key` drops the high word
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        if not -(1 << 63) <= seed < 1 << 64:
            raise at(ShapeError(f"the seed of a random key has at most 64 bits, got {seed}"), caller())
        return tensor(
            np.array([int(seed) >> 32 & _LOW_32 if has_int64 else 0, int(seed) & _LOW_32], np.uint32), (WORD,)
        )
    seed = as_tensor(seed)
    if seed.dims or kind(seed.dtype) != "i":
        raise at(ShapeError(f"the seed of a random key is one integer without dims, got {seed.type}"), caller())
    high = cast(seed >> 32 & _LOW_32, "uint32") if seed.dtype.itemsize == 8 else as_tensor(0, "uint32")
    return stack([high, cast(seed, "uint32")], WORD)


def fold_in(key: Tensor | jax.Array, i: Any) -> Tensor:
    """Derive a new key from a key and the integer `i`; for a tensor of integers, one key per element.

    >>> import meshdsl as md
    >>> md.random.fold_in(md.random.key(7), md.iota("layer:3")).dims
    (layer=3, key_word=2)
    """
    if isinstance(i, int | np.integer) and not 0 <= i <= _LOW_32:
        raise at(ShapeError(f"md.random.fold_in takes an integer from 0 to 2**32 - 1, got {i}"), caller())
    i = as_tensor(i, "uint32") if isinstance(i, int | np.integer) else as_tensor(i)
    return bind1(_FOLD_IN, _key(key), cast(i, "uint32") if kind(i.dtype) == "i" else i)


def split(key: Tensor | jax.Array, n: int | Dim = 2) -> Any:
    """Derive `n` new keys, as a list; if `n` is a dim, as one tensor of keys with that dim, to scan over.

    >>> import meshdsl as md
    >>> first, second = md.random.split(md.random.key(7))
    >>> md.random.split(md.random.key(7), md.Dim("layer", 12)).dims
    (layer=12, key_word=2)
    """
    if isinstance(n, Dim):
        return fold_in(key, iota(n))
    return unstack(fold_in(key, iota(Dim("key_number", n))), "key_number")


def bits(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "uint32") -> Tensor:
    """Draw random bits, as unsigned integers of 8, 16, 32 or 64 bits.

    >>> import meshdsl as md
    >>> md.random.bits(md.random.key(7), "a:2")
    tensor(uint32[a=2], [2895194379 4185947648])
    """
    return bind1(
        _BITS,
        _key(key),
        shape=_dims(dims),
        dtype=located(lambda: _dtype_of_kind("bits", dtype, "i", "unsigned integers")),
    )


def _uniform(key: Tensor | jax.Array, low: Tensor, high: Tensor, *, shape: Shape, dtype: np.dtype) -> Tensor:
    """Random mantissa bits with the exponent of 1, minus 1, scaled; from 8 random bits if the mantissa has fewer."""
    info = jnp.finfo(dtype)
    width = info.bits if info.nmant >= 8 else 8
    pattern = cast(bits(key, shape, _UNSIGNED[width]), _UNSIGNED[info.bits])
    one = int(np.ones((), dtype).view(_UNSIGNED[info.bits]))
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
    kind = located(lambda: _float("uniform", dtype))
    ends = (cast(x, kind) if isinstance(x, Tensor) else as_tensor(x, kind) for x in (low, high))
    return _draw(_uniform, key, *ends, shape=_dims(dims), dtype=dtype, name="uniform")


def _normal(key: Tensor | jax.Array, *, shape: Shape, dtype: np.dtype) -> Tensor:
    low = float(np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype))
    return float(np.array(math.sqrt(2), dtype)) * erf_inv(uniform(key, shape, low, 1, dtype))


def normal(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """Draw from the standard normal distribution.

    >>> import meshdsl as md
    >>> md.random.normal(md.random.key(7), "a:2")
    tensor(float32[a=2], [0.4512 1.9535])
    """
    return _draw(_normal, key, shape=_dims(dims), dtype=dtype, name="normal")


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
    dtype = located(lambda: _float("truncated_normal", dtype))
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
    return _draw(_gumbel, key, shape=_dims(dims), dtype=dtype, name="gumbel")


def bernoulli(key: Tensor | jax.Array, p: Any = 0.5, dims: DimsLike | None = None) -> Tensor:
    """Draw booleans that are true with probability `p`, a floating number or tensor, over `dims` (default: p's dims).

    >>> import meshdsl as md
    >>> md.random.bernoulli(md.random.key(7), 0.9, "a:2")
    tensor(bool[a=2], [ True False])
    """
    p = as_tensor(p)
    return uniform(key, p.dims if dims is None else dims, dtype=p.dtype) < p


def randint(
    key: Tensor | jax.Array, dims: DimsLike, low: Tensor | int, high: Tensor | int, dtype: Any = "int32"
) -> Tensor:
    """Draw uniform integers from `low` (inclusive) to `high` (exclusive).

    >>> import meshdsl as md
    >>> md.random.randint(md.random.key(7), "a:4", 0, 10)
    tensor(int32[a=4], [9 2 0 7])

    Raises `ShapeError` if two numbers leave no integer between them. Where tensors do, the result is `low`.
    """
    if isinstance(low, int | np.integer) and isinstance(high, int | np.integer) and not low < high:
        raise at(ShapeError(f"there is no integer from {low} to below {high}; give low < high"), caller())
    shape, dtype = _dims(dims), located(lambda: _dtype_of_kind("randint", dtype, "i", "integers"))
    sampled = dtype if dtype.itemsize >= 4 else np.dtype(np.int32)
    unsigned, info = np.dtype(_UNSIGNED[sampled.itemsize * 8]), np.iinfo(dtype)
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


def permutation(key: Tensor | jax.Array, x: Tensor | str | Dim, over: DimLike | None = None) -> Tensor:
    """The slices of `x` along `over` in random order. If `x` is a dim, the dim's indices in random order.

    >>> import meshdsl as md
    >>> md.random.permutation(md.random.key(7), "n:5")
    tensor(int32[n=5], [4 2 3 0 1])
    """
    if isinstance(x, str | Dim):
        return _shuffled(key, _dims(x)[0])
    dim = located(lambda: find_one(x.dims if over is None else pick(over, x.dims)))
    return transpose(take(x, _shuffled(key, dim), dim), x.dims)


def _shuffled(key: Tensor | jax.Array, dim: Dim) -> Tensor:
    """The dim's indices sorted by random words, in enough rounds that a tie in all rounds is unlikely."""
    order = iota(dim)
    for _ in range(math.ceil(3 * math.log(max(1, dim.size)) / math.log(_LOW_32))):
        key, subkey = split(key)
        order = take(order, argsort(bits(subkey, dim), dim), dim)
    return order
