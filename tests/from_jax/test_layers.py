"""Equal layers of a Python loop become one loop over stacked parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from tests.from_jax import twins
from tests.from_jax.reference import check_gradients, worst

LAYOUT = ("rows:2 cols:2", "batch:rows; heads:cols; d_ff:cols; vocab:cols")


def deep(layers: int):
    params = twins.gpt2_params()
    return {**params, "layers": [twins.gpt2_params()["layers"][0] for _ in range(layers)]}


def test_a_deep_model_is_one_loop_with_the_gradient_of_jax():
    args = (deep(4), twins.tokens, twins.targets)
    m = check_gradients(twins.gpt2, args, [("", ""), LAYOUT], 1e-4, names=twins.GPT2_NAMES)
    assert m.dims["layer"] == 4
    assert m.specs[0]["layers"][0]["w1"] == md.spec("layer:4 model:32 d_ff:64")
    assert m.specs[0]["layers"][1]["w1"] is None


def test_programs_do_not_grow_with_the_number_of_layers():
    counts = []
    for n in (3, 6):
        m = md.from_jax(twins.gpt2, deep(n), twins.tokens, twins.targets, names=twins.GPT2_NAMES)
        counts.append(md.compile(md.value_and_grad(m), *LAYOUT).program(*m.specs).instructions)
    assert counts[0] == counts[1]


def test_arrays_are_those_of_each_layer():
    args = (deep(3), twins.tokens, twins.targets)
    m = md.from_jax(twins.gpt2, *args, names=twins.GPT2_NAMES)
    tensors = m.tensors(*args)
    assert worst(m.arrays(tensors), args) == 0
    step = md.jaxify(md.compile(m, *LAYOUT))
    assert float(step(*args)) == pytest.approx(float(twins.gpt2(*args)), rel=1e-5)


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
    args = (deep(4), twins.tokens, twins.targets)
    m = md.from_jax(twins.gpt2, *args, names=twins.GPT2_NAMES)

    def parts(params, *data):
        total = md.accumulate(lambda part: md.value_and_grad(m)(params, *part), data, 4)
        return jax.tree.map(lambda x: x / 4, total)

    compiled = md.compile(parts, "stages:2 rows:2", "layer:stages; batch:rows")
    assert "permute" in {c.kind for c in compiled.program(*m.specs).collectives}
    assert worst(m.arrays(compiled(*m.tensors(*args))), jax.value_and_grad(twins.gpt2)(*args)) < 1e-4
