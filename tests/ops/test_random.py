"""Random numbers equal those of `jax.random`, bit for bit, and depend on nothing but the key and the element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.backend import Block, Local, NumPy, whole
from meshdsl.dims import Dim, dims
from meshdsl.ops.random.keys import BITS
from meshdsl.trace import KEY_WORD, trace

KEY = md.random.key(11)
THEIRS = jax.random.key(11)
SHAPES = [((1001,), "a:1001"), ((3, 5, 7), "a:3 b:5 c:7"), ((), ""), ((0, 3), "a:0 b:3")]
FLOATS = ["float32", "bfloat16", "float16", "float64"]
SHAPED = pytest.mark.parametrize(("sizes", "text"), SHAPES)


def same(ours: md.Tensor, theirs: Any) -> None:
    a, b = ours.numpy(), np.asarray(theirs)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("seed", [0, 7, -1, 2**31, 2**32 + 5, 2**62, -(2**40)])
def test_keys(seed: int) -> None:
    data = jax.random.key_data(jax.random.key(seed))
    same(md.random.key(seed), data)
    same(md.random.key(md.tensor(np.int64(seed))), data)


@pytest.mark.parametrize("x64", [False, True])
def test_every_integer_of_32_bits_folds_in(x64: bool) -> None:
    with jax.enable_x64(x64):
        words = [md.random.fold_in(md.random.key(7), i).numpy().tolist() for i in (0, 2**31 - 1, 2**31, 2**32 - 1)]
    assert len({tuple(word) for word in words}) == 4


def test_keys_from_keys() -> None:
    for i in (0, 5, 2**31 + 7):
        same(md.random.fold_in(KEY, i), jax.random.key_data(jax.random.fold_in(THEIRS, i)))
    same(md.random.fold_in(KEY, md.tensor(np.int32(5))), jax.random.key_data(jax.random.fold_in(THEIRS, 5)))
    wanted = jax.random.key_data(jax.random.split(THEIRS, 4))
    for ours, theirs in zip(md.random.split(KEY, 4), wanted, strict=True):
        same(ours, theirs)
    same(md.random.split(KEY, Dim("layer", 4)), wanted)


@SHAPED
def test_bits(sizes: tuple[int, ...], text: str) -> None:
    for dtype in ("uint32", "uint64") if len(sizes) > 1 else ("uint8", "uint16", "uint32", "uint64"):
        same(md.random.bits(KEY, text, dtype), jax.random.bits(THEIRS, sizes, dtype))


@SHAPED
def test_uniform(sizes: tuple[int, ...], text: str) -> None:
    same(md.random.uniform(KEY, text), jax.random.uniform(THEIRS, sizes, "float32"))


# The sizes enter through the bits alone, and JAX takes long to compile these: one size for the rest.
# Without optimizations, XLA fuses other multiplications with additions than it does in JAX's functions.
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(dtype: str) -> None:
    n, text = (1001,), "a:1001"
    same(md.random.uniform(KEY, text, 2.5, 3.1, dtype), jax.random.uniform(THEIRS, n, dtype, 2.5, 3.1))
    same(md.random.normal(KEY, text, dtype), jax.random.normal(THEIRS, n, dtype))
    same(md.random.gumbel(KEY, text, dtype), jax.random.gumbel(THEIRS, n, dtype))


@pytest.mark.usefixtures("optimized", "at_once_in_jax")
def test_truncated_normal() -> None:
    jax.clear_caches()  # scalars are computed on the way, which other tests compile without optimizations
    for dtype in ("float32", "bfloat16"):
        wanted = jax.random.truncated_normal(THEIRS, -0.7, 1.3, (1013,), dtype)
        same(md.random.truncated_normal(KEY, -0.7, 1.3, "a:1013", dtype), wanted)


def test_booleans() -> None:
    same(md.random.bernoulli(KEY, 0.3, "a:1001"), jax.random.bernoulli(THEIRS, 0.3, (1001,)))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("int32", -5, 1000),
        ("uint8", 0, 256),
        ("int32", -(2**31), 2**31),
        ("uint32", 0, 2**32),
        ("int64", -5, 2**62),
        ("uint64", 0, 2**63 - 1),
    ],
)
def test_integers(dtype: str, low: int, high: int) -> None:
    wanted = jax.random.randint(THEIRS, (1001,), low, high, dtype)
    same(md.random.randint(KEY, "a:1001", low, high, dtype), wanted)


@pytest.mark.parametrize(("low", "high"), [(3, 3), (5, 2)])
def test_integers_of_an_empty_range(low: int, high: int) -> None:
    wanted = jax.random.randint(THEIRS, (11,), low, high, "int32")
    same(md.random.randint(KEY, "a:11", md.tensor(np.int32(low)), md.tensor(np.int32(high))), wanted)
    with pytest.raises(md.ShapeError, match=f"no integer from {low} to below {high}"):
        md.random.randint(KEY, "a:11", low, high)


def test_traced_bounds() -> None:
    low, high = np.int32(-3), np.int32(9)
    ours = md.random.randint(KEY, "a:100", md.tensor(low), md.tensor(high))
    same(ours, jax.random.randint(THEIRS, (100,), low, high, "int32"))
    p = np.linspace(0, 1, 7, dtype=np.float32)
    ours = md.random.bernoulli(KEY, md.tensor(p, "b"), "a:5 b:7")
    same(ours, jax.random.bernoulli(THEIRS, p, (5, 7)))


def test_permutation() -> None:
    n = 5000  # two rounds of sorting
    same(md.random.permutation(KEY, Dim("n", n)), jax.random.permutation(THEIRS, np.arange(n, dtype=np.int32)))
    x = np.arange(12).reshape(3, 4)
    same(md.random.permutation(KEY, md.tensor(x, "a b"), "b"), jax.random.permutation(THEIRS, x, axis=1))


def test_a_key_is_a_tensor() -> None:
    """It can be traced, scanned over and carried."""
    keys = md.random.split(KEY, Dim("layer", 3))

    def step(key: md.Tensor, own: md.Tensor) -> Any:
        return md.random.fold_in(key, 1), md.random.uniform(own, "a:4")

    carried, rows = md.scan(step, KEY, keys, over="layer")
    same(rows, jnp.stack([jax.random.uniform(k, (4,), "float32") for k in jax.random.split(THEIRS, 3)]))
    last = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(THEIRS, 1), 1), 1)
    same(carried, jax.random.key_data(last))


def reference(key: tuple[int, int], index: int) -> int:
    """One word of random bits, in Python's integers."""
    mask, (k0, k1) = 0xFFFFFFFF, key
    ks = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (index >> 32) + k0 & mask, (index & mask) + k1 & mask
    for i in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1 & mask
            x1 = (x1 << by | x1 >> 32 - by) & mask ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3] & mask, x1 + ks[(i + 2) % 3] + i + 1 & mask
    return x0 ^ x1


def test_beyond_32_bits_of_index() -> None:
    """A block of a tensor with 2**48 elements, somewhere in the middle."""
    assert [reference((0, 7), i) for i in range(3)] == md.random.bits(md.random.key(7), "a:3").numpy().tolist()
    shape = dims("a:70001 b:65537 c:65521")
    block = Block(shape, (2, 3, 2), (("x",), ("y",), ()))
    places: dict[tuple[str, ...], int] = {("x",): 30011, ("y",): 21845}
    key = np.array([123, 4567], np.uint32)
    c = Local(NumPy, (whole((KEY_WORD,)),), (block,), index=lambda axes: places[axes])
    got = BITS.kernel(c, key, shape=shape, dtype=np.dtype("uint32"))
    for i, j, k in np.ndindex(2, 3, 2):
        index = ((2 * 30011 + i) * 65537 + 3 * 21845 + j) * 65521 + k
        assert got[i, j, k] == reference((123, 4567), index)


def test_blocks_are_cut_from_the_whole() -> None:
    """Devices draw their own part, whatever the cut, and sizes that do not divide are padded."""
    shape = dims("a:5 b:7")
    whole_bits = md.random.bits(KEY, shape).numpy()
    for place in range(3):
        block = Block(shape, (5, 3), ((), ("x",)))
        c = Local(NumPy, (whole((KEY_WORD,)),), (block,), index=lambda axes, place=place: place)
        part = BITS.kernel(c, KEY.numpy(), shape=shape, dtype=np.dtype("uint32"))
        real = min(3, 7 - 3 * place)
        np.testing.assert_array_equal(part[:, :real], whole_bits[:, 3 * place : 3 * place + real])


def test_tracing_draws_one_equation_of_bits() -> None:
    graph, _, _ = trace(lambda key: md.random.normal(key, "a:4 b:8"), [KEY.type])
    assert [str(eqn.op) for eqn in graph.eqns].count("bits") == 1


def test_misuse() -> None:
    with pytest.raises(md.ShapeError, match=r"a random key is a uint32\[\[key_word=2\]|a random key is"):
        md.random.bits(md.tensor([1.0], "a"), "b:3")
    draw: Any
    for draw in (md.random.normal, md.random.bits, md.random.fold_in):
        for key, what in ((7, "7"), (jax.random.PRNGKey(7), "ArrayImpl")):
            with pytest.raises(
                md.ShapeError, match=rf"tensor, got {what}\n  make one with md.random.key\(seed\)\n  at "
            ):
                draw(key, 3) if draw is md.random.fold_in else draw(key, "b:3")
    with pytest.raises(md.ShapeError, match="draws floats, not int32"):
        md.random.normal(KEY, "a:3", "int32")
    with pytest.raises(md.ShapeError, match="at most 64 bits"):
        md.random.key(2**70)


def test_a_gamma_draw_and_its_gradient_are_those_of_jax_under_a_layout() -> None:
    key, a = jax.random.key(3), np.linspace(0.5, 3, 5).astype(np.float32)

    def draw(key: md.Tensor, a: md.Tensor) -> Any:
        return md.value_and_grad(lambda a: md.sum(md.random.gamma(key, a, dtype=a.dtype)))(a)

    ours = md.compile(draw, mesh="x:2", layout="a:x")(md.tensor(key), md.tensor(a, "a"))
    theirs = jax.value_and_grad(lambda a: jax.random.gamma(key, a, dtype=a.dtype).sum())(a)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6)
