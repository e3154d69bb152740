"""Equal layers of a Python loop become one loop over stacked parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from benchmarks.handwritten import twins
from tests.from_jax.reference import TARGETS, TOKENS, check_gradients, worst

LAYOUT = ("rows:2 cols:2", "batch:rows; heads:cols; d_ff:cols; vocab:cols")


def deep(layers: int):
    params = twins.gpt2_params()
    return {**params, "layers": [twins.gpt2_params()["layers"][0] for _ in range(layers)]}


def test_a_deep_model_is_one_loop_with_the_gradient_of_jax():
    args = (deep(4), TOKENS, TARGETS)
    m = check_gradients(twins.gpt2, args, [("", ""), LAYOUT], 1e-4, names=twins.GPT2_NAMES)
    assert m.dims["layer"] == 4
    assert m.specs[0]["layers"][0]["w1"] == md.spec("layer:4 model:32 d_ff:64")
    assert m.specs[0]["layers"][1]["w1"] is None


def test_programs_do_not_grow_with_the_number_of_layers():
    counts = []
    for n in (3, 6):
        m = md.from_jax(twins.gpt2, deep(n), TOKENS, TARGETS, names=twins.GPT2_NAMES)
        counts.append(md.compile(md.value_and_grad(m), *LAYOUT).program(*m.specs).instructions)
    assert counts[0] == counts[1]


def test_arrays_are_those_of_each_layer():
    args = (deep(3), TOKENS, TARGETS)
    m = md.from_jax(twins.gpt2, *args, names=twins.GPT2_NAMES)
    tensors = m.tensors(*args)
    assert worst(m.arrays(tensors), args) == 0
    step = md.jaxify(md.compile(m, *LAYOUT))
    assert float(step(*args)) == pytest.approx(float(jax.jit(twins.gpt2)(*args)), rel=1e-5)


@pytest.mark.parametrize("odd", ["another activation", "a weight read twice", "a result of each layer"])
def test_layers_that_are_not_equal_stay_apart(odd):
    def f(params, x):
        kept = []
        for i, p in enumerate(params):
            x = (jnp.sin if odd == "another activation" and i == 1 else jnp.tanh)(x @ p["w"])
            kept.append(x)
        x = x @ params[0]["w"] if odd == "a weight read twice" else x
        return jnp.sum(sum(kept) if odd == "a result of each layer" else x)

    params = [{"w": twins.normal(8, 8)} for _ in range(4)]
    m = check_gradients(f, [params, twins.normal(4, 8)], names={"x": "batch model"})
    assert "layer" not in m.dims
    assert len(jax.tree.leaves(m.specs)) == 5


def test_layers_are_the_stages_of_a_pipeline():
    args = (deep(4), TOKENS, TARGETS)
    m = md.from_jax(twins.gpt2, *args, names=twins.GPT2_NAMES)

    def parts(params, *data):
        total = md.accumulate(lambda part: md.value_and_grad(m)(params, *part), data, 4)
        return jax.tree.map(lambda x: x / 4, total)

    compiled = md.compile(parts, "stages:2 rows:2", "layer:stages; batch:rows")
    assert "permute" in {c.kind for c in compiled.program(*m.specs).collectives}
    assert worst(m.arrays(compiled(*m.tensors(*args))), jax.jit(jax.value_and_grad(twins.gpt2))(*args)) < 1e-4


def drop(x, key, rate):
    return jnp.where(jax.random.uniform(key, x.shape) < rate, x, 0.0) / rate


def stacked(params, x, key):
    for i in range(4):
        x = x + jnp.tanh(x @ jax.tree.map(lambda p, i=i: p[i], params)["w"])
    return jnp.sum(x**2)


def numbered(params, x, key):
    """Names as Haiku gives them, and a key that is carried on, of which the last layer reads one half."""
    for name, rate in (("linear", 0.5), ("linear_1", 0.6), ("linear_2", 0.7)):
        key, own = jax.random.split(key)
        x = drop(x + jnp.tanh(x @ params[name]["w"]), own, rate)
    return jnp.sum(x**2)


def folded(params, x, key):
    """Keys as Flax makes them, with a number that differs, and a mask that each layer makes anew."""
    for i, p in enumerate(params):
        mask = jnp.where(jnp.arange(8) > 2, 1.0, 0.0)
        x = drop(x + jnp.tanh(x @ p["w"]) * mask, jax.random.fold_in(key, 7 * i), 0.5)
    return jnp.sum(x**2)


W = twins.normal(4, 8, 8)
CASES = {
    "stacked": (stacked, {"w": W}),
    "numbered": (numbered, {n: {"w": W[i]} for i, n in enumerate(("linear", "linear_1", "linear_2"))}),
    "folded": (folded, [{"w": w} for w in W]),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_may_differ_in_slices_keys_and_numbers(name):
    f, params = CASES[name]
    args = (params, twins.normal(4, 8), jax.random.key(3))
    m = check_gradients(f, args, names={"x": "batch model"})
    assert sum(step.primitive == "scan" for step in m._block.steps) == 1
    assert m._block.ins[0].shape == (3 if name == "numbered" else 4, 8, 8)


def test_parameters_whose_paths_differ_in_words_are_no_layers():
    def f(params, x):
        for p in params.values():
            x = x + jnp.tanh(x @ p)
        return jnp.sum(x)

    m = md.from_jax(f, dict(zip(("query", "key", "value"), W, strict=False)), twins.normal(4, 8))
    assert len(jax.tree.leaves(m.specs)) == 4
