"""Formulas of softmax and attention become operations, where that is the same; values and gradients beside JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.trace import trace
from tests.from_jax.reference import check_gradients
from tests.joined import in_groups

B, L, M, H, K = 2, 6, 6, 2, 4
RNG = np.random.default_rng(3)
Q, KEYS, V = RNG.standard_normal((3, B, L, H, K)).astype("float32")  # of NumPy: nothing is compiled on import
ROWS, COLUMNS = np.arange(L)[:, None], np.arange(M)[None]
APART = (ROWS - COLUMNS).astype("float32")
NAMES = {"q": "batch length heads head"}
LAYOUTS = [("", ""), ("rows:2 cols:2", "batch:rows; heads:cols"), ("rows:2", "length:rows")]


def formula(mask: Any = None, scale=0.5, fill=-1e30, bias=None, used=False):
    def f(q, k, v):
        s = jnp.einsum("blhk,bmhk->bhlm", q, k) * scale
        s = s if bias is None else s + bias
        seen: Any = mask(q) if callable(mask) else mask
        s = s if mask is None else jnp.where(seen, s, fill)
        w = jax.nn.softmax(s, -1)
        y = jnp.einsum("bhlm,bmhk->blhk", w, v)
        return jnp.sum(y * jnp.cos(jnp.arange(K) + y)) + (jnp.sum(w * w) if used else 0)

    return f


def operations(m: md.Imported) -> list[str]:  # a softmax is a call with a gradient of its own
    graph, _, _ = trace(m, m.specs)
    return [str(eqn.op) for eqn in graph.eqns if str(eqn.op) in ("attention", "call", "exp")]


FORMULAS = [
    ("plain", {}, ["attention"]),
    ("causal", {"mask": ROWS >= COLUMNS, "fill": -jnp.inf}, ["attention"]),
    ("tril", {"mask": np.tril(np.ones((L, M), bool))}, ["attention"]),
    ("window", {"mask": (ROWS >= COLUMNS) & (ROWS - COLUMNS < 3)}, ["attention"]),
    ("some mask", {"mask": (ROWS + COLUMNS) % 3 != 1}, ["attention"]),
    ("of keys", {"mask": np.arange(M) != 2}, ["attention"]),
    ("bias", {"mask": ROWS >= COLUMNS, "bias": np.float32(0.3) * APART}, ["attention"]),
    (
        "of heads",
        {"bias": np.arange(H, dtype="float32")[:, None, None] * np.float32(0.1) * APART},
        ["attention"],
    ),
    ("a row that sees nothing", {"mask": ROWS > COLUMNS}, ["call"]),
    ("a mask of data", {"mask": lambda q: q[:, :, 0, 0][:, None, None] > -5}, ["call"]),
    ("a small fill", {"mask": ROWS >= COLUMNS, "fill": -3.0}, ["call"]),
    ("weights that are used", {"used": True}, ["call"]),
]
BY_JAX = in_groups({name: jax.value_and_grad(formula(**options)) for name, options, _ in FORMULAS}, Q, KEYS, V)


@pytest.mark.parametrize(("name", "options", "found"), FORMULAS)
def test_attention(name, options, found):
    m = check_gradients(formula(**options), [Q, KEYS, V], LAYOUTS, 1e-4, wanted=BY_JAX(name), names=NAMES)
    assert operations(m) == found
    how = [eqn.params["how"] for eqn in md.compile(m, "").graph(*m.specs).eqns if str(eqn.op) == "attention"]
    if name in ("causal", "tril", "window"):
        assert how[0].sees.causal and (how[0].sees.window == 3) == (name == "window")


def test_groups_of_queries_and_loops():
    def f(q, k, v):
        def layer(x, _):
            y = jax.nn.dot_product_attention(x, k, v, is_causal=True)
            return x + y, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0] ** 2)

    q = jnp.concatenate([Q, -Q], 2)
    m = check_gradients(f, [q, KEYS, V], LAYOUTS[:2], 1e-4, names=NAMES)
    (loop,) = (eqn for eqn in md.compile(m, "").graph(*m.specs).eqns if eqn.graphs())
    text = str(md.compile(m, "").graph(*m.specs))
    assert "attention" in text
    assert " exp " not in text
    assert loop.trips == 2


def test_a_mask_that_is_made_before_a_loop():
    def f(q, k, v):
        mask = jnp.tril(jnp.ones((L, M), bool))

        def layer(x, _):
            s = jnp.where(mask, jnp.einsum("blhk,bmhk->bhlm", x, k), -jnp.inf)
            return x + jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(s, -1), v), None

        return jnp.sum(jax.lax.scan(layer, q, None, length=2)[0] ** 2)

    m = check_gradients(f, [Q, KEYS, V], LAYOUTS[:1], 1e-4, names=NAMES)
    assert "causal=True" in str(md.compile(m, "").graph(*m.specs))


def test_softmax_over_the_vocabulary_keeps_its_result_only():
    def f(x, w):
        return jnp.sum(jax.nn.softmax(x @ w) ** 2)

    m = check_gradients(f, [Q[:, :, 0], jnp.ones((K, 8))], [("", ""), ("cols:2", "vocab:cols")], names={"w": ". vocab"})
    assert operations(m) == ["call"]


def picked(logits, targets):
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


@pytest.mark.parametrize(
    ("name", "loss", "reads"),
    [
        ("log_softmax", lambda x, i: -jnp.mean(picked(jax.nn.log_softmax(x), i)), 0),
        ("logsumexp", lambda x, i: jnp.mean(jax.nn.logsumexp(x, -1) - picked(x, i)), 0),
        ("one-hot", lambda x, i: jnp.mean(jax.nn.logsumexp(x, -1) - jnp.sum(x * jax.nn.one_hot(i, 6), -1)), 0),
        ("log_softmax, one-hot", lambda x, i: -jnp.sum(jax.nn.one_hot(i, 6) * jax.nn.log_softmax(x)), 0),
        ("before the sum", lambda x, i: -jnp.mean(picked(x, i) - jax.nn.logsumexp(x, -1)), 0),
        (
            "shifted before",
            lambda x, i: (lambda s: -jnp.mean(picked(s, i) - jnp.log(jnp.sum(jnp.exp(s), -1))))(
                x - jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
            ),
            0,
        ),
        ("narrow", lambda x, i: jnp.mean(jax.nn.logsumexp(x, -1) - picked(x.astype(jnp.bfloat16), i)), 0),
        ("over another axis", lambda x, i: jnp.sum(picked(x, i)) + jnp.sum(jax.nn.softmax(x, 0) ** 2), 1),
        ("no softmax", lambda x, i: jnp.sum(jnp.sin(picked(x * x, i))), 1),
    ],
)
def test_a_read_of_logits_is_a_sum_without_a_scatter(name, loss, reads):
    weights, x = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((K, 6), (8, K)))
    targets = jnp.asarray([0, 5, 2, 2, -1, -6, 3, 9] if "one-hot" in name else [0, 5, 2, 2, -1, -6, 3, 1])

    def f(w, x, i):
        return loss(x @ w, i)

    names = {"x": "batch model", "w": ". vocab"}
    m = check_gradients(f, [weights, x, targets], [("rows:2 cols:3", "batch:rows; vocab:cols")], names=names)
    ops = [str(eqn.op) for eqn in md.compile(md.grad(m), "").graph(*m.specs).eqns]
    assert ops.count("scatter_add") == reads
    graph = trace(m, m.specs)[0]
    assert [str(eqn.op) for eqn in graph.eqns].count("take") == reads
    if not reads and name != "narrow":  # of the maximum, of the exponentials, and of the targets; none of the gradient
        program = md.compile(md.value_and_grad(m), "cols:3", "vocab:cols").program(*m.specs)
        assert sorted(str(c.op)[11:14] for c in program.collectives) == ["max", "sum", "sum"]
