"""Models that nobody rewrote: values, gradients, and bytes beside the models written by hand."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import meshdsl as md
from benchmarks import imported
from benchmarks.handwritten import twins
from tests.from_jax.reference import GPT2, LLAMA, ONE, check_gradients, check_values, worst

DATA = ("rows:8", "batch:rows")
X, Y = (jnp.asarray(np.random.default_rng(2).standard_normal((8, 16, 32)), jnp.float32) for _ in range(2))


@pytest.mark.parametrize("twin", imported.TWINS.values(), ids=imported.TWINS)
def test_a_twin_is_right_and_sends_at_most_what_the_bundled_model_sends(twin):
    args = (twin.params(), *twins.text())
    check_gradients(twin.loss, args, [imported.LAYOUTS["sequence"]], names=twin.names, prefer=twins.PREFER)
    step, bundled = twin.gradients(twins.TINY)
    for layout in imported.LAYOUTS.values():
        sent, at_most = imported.sent(step, *layout), imported.sent(bundled, *layout)
        assert sent <= at_most, f"{layout}: {sent} bytes, of the bundled model {at_most}"


def test_a_whole_step_with_optax_is_imported():
    adam = optax.adamw(1e-2, eps=1e-3)  # a gradient of zero has no sign
    f, (params, *data) = GPT2

    def step(params, state, *data):
        loss, grads = jax.value_and_grad(f)(params, *data)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    names = {"*/wte": "vocab model", "*/out": "heads*head model", "*/w1": "model d_ff"}
    args = (params, adam.init(params), *data)
    m = md.from_jax(step, *args, names=names)
    assert {"vocab", "heads", "d_ff"} <= m.dims.keys()
    step_of_arrays = md.jaxify(md.compile(m, "rows:2 cols:4", "heads:cols; d_ff:cols; vocab:cols"))
    assert worst(step_of_arrays(*args), jax.jit(step)(*args)) < 1e-4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=32, qkv_features=32, decode=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]), deterministic=True)
        return x + self.down(nnx.relu(self.up(self.norm2(x))))


def test_flax_nnx():
    graph, params = nnx.split(Block(nnx.Rngs(0)))

    def loss(params, x, y):
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    names = {"x": "batch length model", "*/query/kernel": "model heads head", "*/up/kernel": "model d_ff"}
    m = check_gradients(
        loss, [params, X, Y], [("rows:2 cols:4", "batch:rows; heads:cols; d_ff:cols")], 1e-4, names=names
    )
    assert len(m._names.made_up) <= 3


def test_equinox_modules_are_arguments_as_they_are():
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(1))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(jax.vmap(model))(x) - y) ** 2)

    m = md.from_jax(loss, model, X, Y, names={"x": "batch length model", "*/layers/0/weight": "hidden model"})
    compiled = md.compile(md.value_and_grad(m), "rows:2 cols:4", "batch:rows; hidden:cols")
    value, grads = md.jaxify(compiled)(model, X, Y)
    want = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, X, Y)
    assert worst((value, jax.tree.leaves(grads)), (want[0], jax.tree.leaves(want[1]))) < 1e-5


def test_dropout_draws_the_numbers_of_jax():
    def loss(w, x, key):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.sum(jnp.where(kept, x / 0.9, 0) @ w)

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        check_gradients(loss, [jnp.ones((32, 4)), X, key], [ONE, DATA], names={"x": "batch length model"})


def test_rules_of_the_users_own_are_the_gradient():
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (rounded(x), jnp.cos(x)), lambda saved, ct: (3 * ct * saved,))

    @jax.custom_jvp
    def doubled(x, n):
        return x * n

    doubled.defjvp(lambda ins, tangents: (doubled(*ins), 7 * tangents[0] * ins[0]))

    def loss(x, n):
        return jnp.sum(rounded(x) * x) + jnp.sum(doubled(x, n)) + jnp.sum(jax.nn.relu6(3 * x))

    check_gradients(loss, [X, jnp.int32(3)], [ONE, DATA], names={"x": "batch length model"})


def test_a_rule_may_have_a_primitive_without_an_operation():
    @jax.custom_vjp
    def trace(x):
        return jnp.sum(x)

    trace.defvjp(lambda x: (trace(x), jnp.linalg.inv(x)), lambda inverse, ct: (ct * inverse,))
    check_gradients(lambda x: trace(x) ** 2, [jnp.eye(3) + X[0, :3, :3] / 8])


@jax.custom_jvp
def growing(x):
    return jnp.exp(x)


@growing.defjvp
def _(ins, tangents):
    y = growing(*ins)
    return y, 2 * tangents[0] * y


def test_second_derivatives_are_those_of_the_rule():
    x = jnp.linspace(0.1, 1, 6).reshape(2, 3)

    def loss(x):
        return jnp.sum(jnp.sin(growing(x) * x)) + jnp.sum(jax.nn.relu6(8 * x) * x)

    m, (t,) = md.from_jax(loss, x), md.from_jax(loss, x).tensors(x)
    second = md.grad(lambda t: md.sum(md.grad(m)(t)))
    want = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))))(x)
    assert worst(second(t).array, want) < 1e-6
    with pytest.raises(md.TraceError, match="third time"):
        md.grad(lambda t: md.sum(second(t)))(t)


def test_other_sizes_are_traced_again():
    f, args = LLAMA
    m = md.from_jax(f, *args, names=twins.LLAMA_NAMES)
    params, tokens, targets = m.tensors(*args)
    half = [md.slice(t, "batch", 0, 4) for t in (tokens, targets)]
    assert float(m(params, *half)) == pytest.approx(float(jax.jit(f)(args[0], args[1][:4], args[2][:4])), rel=1e-5)


def test_a_decoding_step_with_a_cache():
    weights = {n: twins.normal(32, 4, 8) for n in "qkv"}
    cache = {n: twins.normal(8, 16, 4, 8) for n in "kv"}

    def decode(params, cache, x, position):
        q, k, v = (jnp.einsum("bm,mhk->bhk", x, params[n]) for n in "qkv")
        ks, vs = (
            jax.lax.dynamic_update_slice_in_dim(cache[n], y[:, None], position, 1) for n, y in (("k", k), ("v", v))
        )
        scores = jnp.where(jnp.arange(16) <= position, jnp.einsum("bhk,blhk->bhl", q, ks), -1e9)
        return jnp.einsum("bhl,blhk->bhk", jax.nn.softmax(scores), vs), {"k": ks, "v": vs}

    names = {"x": "batch model", "*/q": "model heads head", "cache/k": "batch memory . ."}
    layouts = [("rows:2 cols:4", "batch:rows; heads:cols"), ("rows:2 cols:4", "batch:rows; memory:cols")]
    check_values(decode, [weights, cache, X[:, 0], jnp.int32(3)], layouts, names=names)


@pytest.mark.parametrize(
    ("policy", "products"),
    [
        (None, 7),
        ("nothing_saveable", 7),
        ("dots_saveable", 5),
        ("everything_saveable", 5),
        ("save_only_these_names", 6),
        ("save_any_names_but_these", 7),
    ],
)
def test_policies_of_rematerialisation(policy, products):
    chosen = policy and getattr(jax.checkpoint_policies, policy)
    chosen = chosen("inner") if policy and "names" in policy else chosen

    def loss(w, x):
        def f(w, x):
            return jnp.sin(jnp.sin(checkpoint_name(x @ w, "inner")) @ w)

        return jnp.sum(jax.checkpoint(f, policy=chosen)(w, x) ** 2)

    m = md.from_jax(loss, jnp.ones((32, 32)), X[0])
    graph = md.compile(md.value_and_grad(m), "").graph(*m.specs)
    assert [str(eqn.op) for eqn in graph.eqns].count("einsum") == products
    assert "has no equal here" not in str(m)


def test_a_policy_without_an_equal_saves_nothing_and_is_noted():
    def save_sines(primitive, *_, **params):
        return primitive.name == "sin"

    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=save_sines)(x))

    assert "the policy" in str(md.from_jax(loss, X[0])) and "save_sines" not in str(md.from_jax(jnp.sum, X[0]))


def test_sharded_updates_find_the_update_of_an_imported_step():
    tx = optax.adam(1e-2)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"up": jnp.ones((32, 16)), "down": jnp.ones((16, 32))}
    m = md.from_jax(step, params, tx.init(params), jnp.ones((8, 32)), names={"x": "batch model"})
    update = md.WeightUpdate("sharded", bucket_bytes=1e6)
    program = md.compile(m, "rows:4", "batch:rows", weight_update=update).program(*m.specs)
    assert sorted(c.kind for c in program.collectives) == ["all_gather", "reduce_scatter", "reduce_scatter"]
