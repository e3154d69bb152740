"""Random keys, and random bits from them.

The random bits of each element: Threefry-2x32 of the key and of its global index, in row-major order of the dims.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...backend import Block, Local
from ...dims import Dim, DimLike, DimsLike, Shape, fresh_dim, pick, size_of
from ...errors import ShapeError
from ...ir import Fuses, Op, Type
from ...trace import KEY_WORD, Tensor, as_tensor, bind1, tensor
from ..dtypes import as_dtype, cast, kind
from ..indexing import iota
from ..joining import stack, unstack
from ..reductions import spread
from ..reshape import transpose

UNSIGNED = {8: "uint8", 16: "uint16", 32: "uint32", 64: "uint64"}


def as_key(key: Any) -> Tensor:
    """Return the user's key; raise `ShapeError` if it is not a tensor. `check_key` checks its type."""
    if isinstance(key, Tensor):
        return key
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.shape:
        return tensor(key)
    what = repr(key) if isinstance(key, int) else type(key).__name__
    error = ShapeError(f"a random key is a uint32[{KEY_WORD}] tensor, got {what}\n  make one with md.random.key(seed)")
    raise error


def check_key(key: Type, batch: Shape) -> None:
    """Raise `ShapeError` unless the type is that of a key, or of one key for each place of `batch`."""
    if key.dims != (*batch, KEY_WORD) or key.dtype != np.uint32:
        raise ShapeError(f"a random key is a uint32[{KEY_WORD}] tensor, got {key}\n  make one with md.random.key(seed)")


def _bits_type(key: Type, *, shape: Shape, dtype: np.dtype, batch: Shape = ()) -> Type:
    check_key(key, batch)
    if dtype.name not in UNSIGNED.values():
        raise ShapeError(f"random bits are {', '.join(UNSIGNED.values())}, not {dtype.name}")
    return Type((*batch, *shape), dtype)


def _bits_kernel(c: Local, key: Any, *, shape: Shape, dtype: np.dtype, batch: Shape = ()) -> Any:
    out, n = c.outs[0], len(batch)
    drawn = Block(out.dims[n:], out.sizes[n:], out.axes[n:])  # the numbers of one key depend on these dims only
    a, b = random_words(c, key, max(1, len(shape)), *element_index(c, drawn))
    if dtype.itemsize == 8:
        word = (a.astype(dtype) << np.uint64(32)) | b.astype(dtype)
    else:
        word = (a ^ b).astype(dtype)
    return word.reshape(c.outs[0].sizes)


BITS = Op(
    "bits",
    type=_bits_type,
    kernel=_bits_kernel,
    vmap=lambda key, *, new, batch=(), **params: bind1(BITS, key, batch=(new, *batch), **params),
    blocked=lambda key, **_: (KEY_WORD.name,),
    flops=lambda ins, outs, **_: 115.0 * math.prod(outs[0]),  # integer operations in 20 rounds and 5 key injections
    fuses=Fuses.MAP,
)


def _fold_in_type(key: Type, i: Type, *, batch: Shape = ()) -> Type:
    check_key(key, batch)
    if i.dtype != np.uint32:
        raise ShapeError(f"md.random.fold_in takes an integer, got {i}")
    return Type((*i.dims, KEY_WORD), np.dtype(np.uint32))


def _fold_in_kernel(c: Local, key: Any, i: Any, *, batch: Shape = ()) -> Any:
    i = i.reshape((*i.shape, 1))
    a, b = random_words(c, key, i.ndim - len(batch), c.xp.zeros((1,), np.uint32), i)
    return c.xp.stack([a, b], -1).reshape(c.outs[0].sizes)


def _fold_in_vmap(key: Tensor, i: Tensor, *, new: Dim, batch: Shape = ()) -> Tensor:
    if new not in key.dims:
        return bind1(FOLD_IN, key, transpose(i, (*batch, *(d for d in i.dims if d not in batch))), batch=batch)
    return bind1(FOLD_IN, key, *spread([i], new), batch=(new, *batch))


FOLD_IN = Op(
    "fold_in",
    type=_fold_in_type,
    kernel=_fold_in_kernel,
    vmap=_fold_in_vmap,
    blocked=lambda key, i, **_: (KEY_WORD.name,),
    flops=lambda ins, outs, **_: 60.0 * math.prod(outs[0]),
    fuses=Fuses.MAP,
)


def dtype_of_kind(name: str, dtype: Any, required_kind: str, words: str) -> np.dtype:
    """Convert to a NumPy dtype; raise `ShapeError` if its kind is not `required_kind`."""
    dtype = as_dtype(dtype)
    if kind(dtype) != required_kind:
        raise ShapeError(f"md.random.{name} draws {words}, not {dtype.name}")
    return dtype


def new_dims(dims: DimsLike) -> Shape:
    return pick(dims, (), new=True)


def key(seed: Any) -> Tensor:
    """Create a random key, equal to `jax.random.key(seed)`. The seed is an integer or a traced integer.

    >>> import meshdsl as md
    >>> md.random.key(7)
    tensor(uint32[key_word=2], [0 7])
    """
    has_int64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64  # else `jax.random.key` drops the high word
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        if not -(1 << 63) <= seed < 1 << 64:
            raise ShapeError(f"the seed of a random key has at most 64 bits, got {seed}")
        return tensor(
            np.array([int(seed) >> 32 & LOW_32 if has_int64 else 0, int(seed) & LOW_32], np.uint32), (KEY_WORD,)
        )
    seed = as_tensor(seed)
    if seed.dims or kind(seed.dtype) != "i":
        raise ShapeError(f"the seed of a random key is one integer without dims, got {seed.type}")
    high = cast(seed >> 32 & LOW_32, "uint32") if seed.dtype.itemsize == 8 else as_tensor(0, "uint32")
    return stack([high, cast(seed, "uint32")], KEY_WORD)


def fold_in(key: Tensor | jax.Array, i: Any) -> Tensor:
    """Derive a new key from a key and the integer `i`; for a tensor of integers, one key per element.

    >>> import meshdsl as md
    >>> md.random.fold_in(md.random.key(7), md.iota("layer:3")).dims
    (layer=3, key_word=2)
    """
    if isinstance(i, int | np.integer) and not 0 <= i <= LOW_32:
        raise ShapeError(f"md.random.fold_in takes an integer from 0 to 2**32 - 1, got {i}")
    i = as_tensor(i, "uint32") if isinstance(i, int | np.integer) else as_tensor(i)
    return bind1(FOLD_IN, as_key(key), cast(i, "uint32") if kind(i.dtype) == "i" else i)


def split(key: Tensor | jax.Array, n: int | DimLike = 2) -> Any:
    """Derive `n` new keys, as a list; if `n` is a dim, as one tensor of keys with that dim, to scan over.

    >>> import meshdsl as md
    >>> first, second = md.random.split(md.random.key(7))
    >>> md.random.split(md.random.key(7), md.Dim("layer", 12)).dims
    (layer=12, key_word=2)
    """
    if not isinstance(n, int | np.integer):
        return fold_in(key, iota(n))
    if n < 1:
        raise ShapeError(f"md.random.split makes at least 1 key, got n={n!r}")
    number = fresh_dim(Dim("key_number", int(n)), as_key(key).dims)
    return unstack(fold_in(key, iota(number)), number)


def bits(key: Tensor | jax.Array, dims: DimsLike = (), dtype: Any = "uint32") -> Tensor:
    """Draw random bits, as unsigned integers of 8, 16, 32 or 64 bits.

    >>> import meshdsl as md
    >>> md.random.bits(md.random.key(7), "a:2")
    tensor(uint32[a=2], [2895194379 4185947648])
    """
    return bind1(
        BITS,
        as_key(key),
        shape=new_dims(dims),
        dtype=dtype_of_kind("bits", dtype, "i", "unsigned integers"),
    )


LOW_32 = 0xFFFFFFFF


_LOW_16 = np.uint32(0xFFFF)


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
    high = p1 * s1 + (middle >> np.uint32(16)) + (carry >> np.uint32(16)) + p * np.uint32(stride >> 32 & LOW_32)
    return high, p * np.uint32(stride & LOW_32)


def element_index(c: Local, block: Block) -> tuple[Any, Any]:
    """The global row-major index of each element of a block, as a high and a low uint32 word."""
    high = low = c.xp.zeros((1,), np.uint32)
    narrow = size_of(block.dims) <= 1 << 32
    for i, dim in enumerate(block.dims):
        stride = size_of(block.dims[i + 1 :])
        index = c.xp.arange(block.sizes[i], dtype=np.uint32) + c.xp.asarray(c.start(block, dim), np.uint32)
        index = index.reshape((-1,) + (1,) * (len(block.sizes) - i - 1))
        if narrow:
            low = low + index * np.uint32(stride & LOW_32)
            continue
        more_high, more_low = _wide_product(index, stride)
        low = low + more_low
        high = high + more_high + (low < more_low).astype(np.uint32)
    return high, low


def random_words(c: Local, key: Any, rank: int, high: Any, low: Any) -> tuple[Any, Any]:
    """The words of each element, of `rank` axes, for each key; never of scalars, since NumPy's warn on overflow."""
    k0, k1 = (key[..., i].reshape(key.shape[:-1] + (1,) * rank) for i in (0, 1))
    return c.xp.outline(threefry)(k0, k1, high, low)
