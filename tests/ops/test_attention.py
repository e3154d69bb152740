"""`md.attention`: its value and gradient are those of the plain formula, and of JAX's own attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.ops.attention import in_numpy
from meshdsl.ops.attention.arrays import Arrays, Span
from meshdsl.ops.attention.sees import Sees
from meshdsl.ops.attention.spec import AttentionSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal_window": {"causal": True, "window": 2},
    "mask": {"mask": True},
    "bias": {"bias": True, "causal": True},
    "segments": {"segments": True},
    "offset": {"offset": 2, "causal": True},
    "soft_cap": {"soft_cap": 0.8, "causal": True},
    "all": {"mask": True, "bias": True, "segments": True, "window": 4, "scale": 0.7, "soft_cap": 1.3},
}


def random(seed: int, dims: str, dtype: str = "float64") -> md.Tensor:
    shape = md.dims(dims)
    values = np.random.default_rng(seed).normal(size=[d.size for d in shape])
    return md.tensor(values.astype(dtype), shape)


def operands(name: str) -> tuple[list[md.Tensor], dict[str, Any]]:
    """q, k, v, and the bias if there is one; and the other options. Query 2 of the mask sees no key."""
    options = dict(OPTIONS[name])
    ins = [random(0, "batch:2 length:7 heads:3 group:2 head:4"), random(1, "batch:2 length:7 heads:3 head:4")]
    ins.append(random(2, "heads:3 length:7 batch:2 value:5"))
    if options.pop("bias", False):
        ins.append(random(3, "group:2 memory:7 length:7"))
    draw = np.random.default_rng(4)
    if options.pop("mask", False):
        mask = draw.random((2, 7, 7)) < 0.6
        mask[:, 2] = False
        options["mask"] = md.tensor(mask, "batch length memory")
    if options.pop("segments", False):
        options["segment_ids"] = md.tensor(draw.integers(0, 2, (2, 7)), "batch length")
    return ins, options


def loss_of(ins: list[md.Tensor], **options: Any) -> Any:
    """The sum of squares of the result and the result, with gradients of all operands."""

    def loss(*ins: md.Tensor) -> Any:
        more = {"bias": ins[3]} if len(ins) > 3 else {}
        out = md.attention(*ins[:3], **more, **options)
        return md.sum(md.square(out)), out

    return md.value_and_grad(loss, argnums=range(len(ins)), has_aux=True)


def by_formula(ins: list[md.Tensor], **options: Any) -> list[np.ndarray]:
    """The plain formula and its gradient in NumPy."""
    return md.simulate(md.compile(loss_of(ins, method="plain", **options), "", "").program(*ins), *ins)


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=1))


SLOW = set(OPTIONS) - {"all", "causal_window"}  # these two have the others' options too


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in OPTIONS])
def test_attention_is_the_plain_formula(name: str) -> None:
    """In float64, for every option; blocks of 3 do not divide the 7 positions."""
    ins, options = operands(name)
    assert_close(loss_of(ins, block=3, **options)(*ins), by_formula(ins, **options))


def test_the_formula_is_that_of_jax() -> None:
    """`jax.nn.dot_product_attention` has [batch, length, heads, head], and groups as consecutive heads."""
    q, k, v = (
        random(0, "b:2 length:6 heads:2 group:3 head:4"),
        *(random(i, "b:2 length:6 heads:2 head:4") for i in (1, 2)),
    )

    def theirs(q: Any, k: Any, v: Any) -> Any:
        out = jax.nn.dot_product_attention(q.reshape(2, 6, 6, 4), k, v, is_causal=True, local_window_size=(2, 0))
        return jnp.sum(jnp.square(out))

    loss, grads = jax.jit(jax.value_and_grad(theirs, (0, 1, 2)))(q.array, k.array, v.array)
    ours, _, *our_grads = by_formula([q, k, v], causal=True, window=3)
    assert_close((ours, our_grads), (loss, list(grads)), 1e-6)  # JAX's softmax is in float32


def test_a_soft_cap_is_a_tanh_of_the_scores_before_the_bias() -> None:
    ins, options = operands("all")
    del options["mask"], options["segment_ids"]

    def theirs(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = 1.3 * jnp.tanh(jnp.einsum("blhgd,bmhd->bhglm", q, k) * 0.7 / 1.3) + jnp.moveaxis(bias, 1, 2)
        away = jnp.arange(7)[:, None] - jnp.arange(7)
        p = jax.nn.softmax(jnp.where(jnp.abs(away) < 4, s, -jnp.inf), -1)
        return jnp.sum(jnp.square(jnp.einsum("bhglm,hmbe->blhge", p, v)))

    loss, grads = jax.jit(jax.value_and_grad(theirs, (0, 1, 2, 3)))(*(x.array for x in ins))
    for method in ("auto", "plain"):
        step = md.compile(loss_of(ins, block=3, method=method, **options), "", "")
        ours, _, *our_grads = jax.tree.leaves(step(*ins))
        assert_close((ours, our_grads), (loss, list(grads)))


def test_a_query_that_sees_no_key_gives_zeros_and_has_no_gradient() -> None:
    q, k, v = random(0, "length:3 head:2"), random(1, "memory:4 head:2"), random(2, "memory:4 head:2")
    mask = md.tensor(np.array([[True] * 4, [False] * 4, [True] * 4]), "length memory")
    (_, out), (dq, dk, _) = loss_of([q, k, v], mask=mask)(q, k, v)
    assert not out.numpy()[1].any() and not dq.numpy()[1].any()
    assert dk.numpy().all() and out.numpy()[0].all()
    nothing = md.attention(q, k, v, mask=md.tensor(np.zeros((3, 4), bool), "length memory"))
    assert not nothing.numpy().any()


@pytest.mark.parametrize("layout", ["", "length:r; heads:s", "memory:r"])
@pytest.mark.parametrize("method", ["auto", "plain"])
def test_attention_to_no_keys_gives_zeros_with_zero_gradients(method: str, layout: str) -> None:
    ins = [
        random(0, "length:4 heads:2 head:3"),
        random(1, "memory:0 heads:2 head:3"),
        random(2, "memory:0 heads:2 value:5"),
    ]
    ins.append(random(3, "length:4 memory:0"))
    for options in ({}, {"causal": True}):
        step = loss_of(ins, method=method, **options)
        program = md.compile(step, "r:2 s:2", layout).program(*ins)
        for results in (step(*ins), md.simulate(program, *ins)):
            leaves = [np.asarray(x) for x in jax.tree.leaves(results)]
            assert [x.shape for x in leaves] == [(), (4, 2, 5), *(x.shape for x in ins)]
            assert not any(x.any() for x in leaves)


def test_keys_that_no_query_sees_are_not_read() -> None:
    """Blocks after the diagonal are skipped: NaN there does not reach the result."""
    q, k, v = (random(i, "length:8 head:2").numpy().copy() for i in range(3))
    k[4:] = np.nan
    out = md.attention(*(md.tensor(x, "length head") for x in (q, k, v)), causal=True, block=4).numpy()
    assert np.isfinite(out[:4]).all() and np.isnan(out[4:]).all()


@pytest.mark.parametrize("options", [{"method": "plain"}, {}, {"window": 2}])
def test_floats_of_eight_bits_are_those_of_float32_rounded(options: dict[str, Any]) -> None:
    q, k, v = (md.cast(md.sin(md.cast(md.iota("n:24"), "float32") * (i + 1)), "float8_e5m2") for i in range(3))
    q, k, v = md.reshape(q, "length:6 head:4"), *(md.reshape(x, "memory:6 head:4") for x in (k, v))
    got = md.attention(q, k, v, **options)
    wanted = md.attention(*(md.cast(x, "float32") for x in (q, k, v)), **options)
    assert got.dtype == q.dtype
    np.testing.assert_allclose(md.cast(got, "float32").numpy(), wanted.numpy(), rtol=0.25, atol=0.05)


def test_a_narrow_dtype_is_summed_in_float32() -> None:
    """The error of 300 bfloat16 values of weight 1/300 is that of one rounding."""
    ones = md.tensor(np.ones((300, 4)), "memory head")
    q, k, v = (md.cast(x, "bfloat16") for x in (random(0, "length:2 head:4"), ones, ones))
    out = md.attention(q, k, v, block=32)
    assert out.dtype == jnp.bfloat16
    assert (out.numpy() == 1).all()


@pytest.mark.parametrize("name", ["all", pytest.param("bias", marks=pytest.mark.slow)])
def test_second_derivatives_are_those_of_the_plain_method(name: str) -> None:
    """Also where a query sees no key, and with respect to keys, values and the bias."""
    ins, options = operands(name)

    def twice(method: str) -> Any:
        inner = loss_of(ins, method=method, **options)
        outer = md.grad(lambda *ins: sum(md.sum(md.square(g)) for g in inner(*ins)[1]), range(len(ins)))
        return md.simulate(md.compile(outer, "", "").program(*ins), *ins)

    assert_close(twice("auto"), twice("plain"), 1e-10)


def test_memory_of_the_compiled_gradient_is_linear() -> None:
    """No buffer of length x length: four times the length takes at most about four times the memory."""

    def temporary(length: int) -> int:
        step = md.compile(
            md.grad(lambda q, k, v: md.sum(md.attention(q, k, v, causal=True, block=128)), (0, 1, 2)), "", ""
        )
        return step.lower(*[md.spec(f"length:{length} head:8")] * 3).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    assert long < 5 * short and long < 4096 * 4096


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 9), st.booleans(), st.one_of(st.none(), st.integers(1, 8)))
@example(3, 4, 7, True, 9)
def test_the_number_of_pairs_is_that_of_the_mask(
    first: int, queries: int, keys: int, causal: bool, window: int | None
) -> None:
    """Exactly under a causal mask, where the queries are among the keys' positions; else an upper bound."""
    at_q, at_k = np.arange(first, first + queries), np.arange(keys)
    counted = Sees(causal, window).pairs(np, at_q, at_k, keys).sum()
    found = Sees(causal, window).number(first, queries, keys)
    assert found == counted if causal and first + queries <= keys else found >= counted


@given(
    st.integers(0, 9), st.integers(1, 6), st.integers(0, 9), st.integers(1, 6), st.booleans(),
    st.one_of(st.none(), st.integers(1, 8)),
)  # fmt: skip
@example(0, 4, 3, 2, True, None)
@example(5, 3, 0, 4, True, 3)
@example(0, 4, 5, 2, False, 3)
def test_a_block_is_skipped_only_if_no_query_sees_a_key(
    first: int, queries: int, key: int, keys: int, causal: bool, window: int | None
) -> None:
    """At the borders of the mask too, where one pair of a block is seen. Exact, except for blocks with padding."""
    sees, at_q, at_k = Sees(causal, window), np.arange(first, first + queries), np.arange(key, key + keys)
    found, wanted = bool(sees.any(at_q, at_k, 11)), bool(sees.pairs(np, at_q, at_k, 11).any())
    assert found == wanted or (found and key + keys > 11)


def test_numpy_form_is_the_formula() -> None:
    """The simulator's form, by hand: two keys with scores 0 and log 3."""
    q, k = np.array([[1.0]]), np.array([[0.0], [np.log(3)]])
    names = AttentionSpec("head", "length", "length", "memory")
    x = Arrays(q, k, np.array([[4.0], [8.0]]), (Span(0, 1),), (Span(0, 2),), 2, names, 0)
    out, lse = in_numpy.forward(x)
    np.testing.assert_allclose(out, [[7]])
    np.testing.assert_allclose(lse, [np.log(4)])


def with_memory(attend: Any) -> Any:
    """A call on q, and on k and v whose positions are called memory."""
    return lambda q, k, v: attend(q, *(md.rename(x, length="memory") for x in (k, v)))


WRONG = {
    "two positions": (
        lambda q, k, v: md.attention(q, md.broadcast(k, "memory:2 length head"), v),
        "two dims of positions",
    ),
    "no positions": (lambda q, k, v: md.attention(q, k, v, length="place", memory="spot"), "no dim of positions"),
    "a dim of k alone": (lambda q, k, v: md.attention(q, md.broadcast(k, "x:2 length head"), v), "which q"),
    "v unlike k": (lambda q, k, v: md.attention(q, k, md.broadcast(v, "x:2 length head")), "one dim of its own"),
    "window of 0": (lambda q, k, v: md.attention(q, k, v, window=0), "window is a number"),
    "soft cap of 0": (lambda q, k, v: md.attention(q, k, v, soft_cap=0.0), "soft_cap is a positive number; got 0.0"),
    "method": (lambda q, k, v: md.attention(q, k, v, method="flash"), "method is one of"),
    "offset without causal": (lambda q, k, v: md.attention(q, k, v, offset=1), "has an effect only with"),
    "causal without positions": (
        with_memory(lambda q, k, v: md.attention(md.sum(q, "length"), k, v, causal=True)),
        "queries have none",
    ),
    "dtypes": (lambda q, k, v: md.attention(q, md.cast(k, "float32"), v), "of one floating dtype"),
    "mask of floats": (lambda q, k, v: md.attention(q, k, v, mask=q), "mask is boolean"),
    "mask of other dims": (lambda q, k, v: md.attention(q, k, v, mask=q > 0), r"has \[head"),
    "segments of queries": (
        with_memory(lambda q, k, v: md.attention(q, k, v, segment_ids=md.iota("length:3"))),
        "memory_segment_ids= is missing",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_attention_says_what_does_not_fit(name: str) -> None:
    call, said = WRONG[name]
    with pytest.raises(md.ShapeError, match=said):
        call(*(random(i, "length:3 head:2") for i in range(3)))
