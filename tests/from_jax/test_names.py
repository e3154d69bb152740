"""Names of dims: patterns, `md.named`, made-up names, and what does not fit."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from benchmarks.handwritten import twins
from tests.from_jax.reference import GPT2, LLAMA

X = jnp.ones((4, 6))


def test_names_follow_through_the_function():
    m = md.from_jax(lambda w, x: jnp.tanh(x @ w).T, jnp.ones((6, 8)), X, names={"x": "batch io", "w": ". hidden"})
    assert [spec.dims for spec in m.specs] == [md.dims("io:6 hidden:8"), md.dims("batch:4 io:6")]
    assert md.eval_shape(m, *m.specs).dims == md.dims("hidden:8 batch:4")


def test_reshapes_split_axes_into_dims():
    def f(x, w, out):
        q = (x @ w).reshape(4, 2, 3, 2)
        return q.reshape(4, 12) @ out

    m = md.from_jax(f, X, jnp.ones((6, 12)), jnp.ones((12, 5)), names={"x": "batch io", "out": "heads*group*head ."})
    assert [d.name for d in m.specs[1].dims] == ["io", "heads", "group", "head"]
    program = md.compile(m, "cols:2", "heads:cols").program(*m.specs)
    assert [c.kind for c in program.collectives] == ["all_reduce"]


def test_queries_keys_and_values_of_one_product_are_a_dim_of_parts():
    def f(x, w):
        q, k, v = jnp.split(x @ w, 3, -1)
        return q * k + v

    m = md.from_jax(f, X, jnp.ones((6, 12)), names={"x": "batch io"})
    assert [d.size for d in m.specs[1].dims] == [6, 3, 4]
    assert not md.compile(m, "cols:2", f"{m.specs[1].dims[2].name}:cols").program(*m.specs).collectives


def test_named_survives_the_transformations_of_jax():
    def f(x, w):
        y = jax.jit(lambda x: md.named(x @ w, "batch hidden"))(x)
        y = jax.vmap(lambda row: md.named(jnp.sin(row), "hidden"))(y)
        return jnp.sum(jax.lax.scan(lambda c, row: (c, md.named(row, "hidden") ** 2), 0.0, y)[1])

    w = jnp.ones((6, 8))
    for g in (f, jax.value_and_grad(f), jax.checkpoint(f)):
        assert {"batch", "hidden"} <= md.from_jax(g, X, w).dims.keys()
    assert jnp.array_equal(md.named(X, "a b"), X)


def test_made_up_names_say_where():
    m = md.from_jax(lambda params, x: x @ params["w"], {"w": jnp.ones((6, 8))}, X)
    assert str(m) == (
        "<lambda>: 2 tensors, dims w_0:6 w_1:8 x_0:4\n"
        "dims that nobody named (names={...} or md.named gives them a name):\n"
        "  w_0:6  params/w, axis 0\n  w_1:8  params/w, axis 1\n  x_0:4  x, axis 0"
    )


def test_equal_layers_share_made_up_names():
    def f(params, x):
        for p in params:
            x = jnp.tanh(x @ p["up"]) @ p["down"]
        return x

    layer = {"up": jnp.ones((6, 8)), "down": jnp.ones((8, 6))}
    m = md.from_jax(f, [layer, layer], X, names={"x": "batch io"})
    assert set(m.dims) == {"batch", "io", "down_0", "down_1"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"y": "a b"}, "names= has 'y', and no input has such a path"),
        ({"*": "a b", "x": "c d"}, "names= has 'x', and the inputs that it fits have names by ['*'], which is first"),
        ({"x": "a"}, "the input x has the shape (4, 6), and 1 names: a"),
        ({"x": "a a"}, "the input x would have the dim 'a' twice"),
        ({"x": "a b*c"}, "x, axis 1 is named b*c, and nothing in the code splits it"),
        ({"x": "a 3b"}, "the input x has the name '3b'"),
    ],
)
def test_names_that_do_not_fit(names, message):
    with pytest.raises(md.ShapeError) as caught:
        md.from_jax(lambda x: jnp.sin(x), X, names=names)
    assert message in str(caught.value)


def test_all_refusals_at_once_with_their_lines():
    def f(x):
        x = jax.pure_callback(lambda x: x, x, x)
        return jax.pure_callback(lambda x: 2 * x, x, x)

    with pytest.raises(md.TraceError) as caught:
        md.from_jax(f, X)
    text = str(caught.value)
    assert text.count("pure_callback at tests/from_jax/test_names.py") == 2
    assert "md.local" in text


def test_arguments_of_another_shape():
    m = md.from_jax(lambda x: x + 1, X)
    with pytest.raises(md.ShapeError, match="x has the shape"):
        m.tensors(jnp.ones((4, 7)))
    with pytest.raises(md.ShapeError, match="was imported for"):
        m.tensors(X, X)


def test_dims_that_are_not_there():
    with pytest.raises(md.ShapeError, match="prefer= has c, and no dim has such a name; there are a b"):
        md.from_jax(lambda x: x + 1, X, names={"x": "a b"}, prefer="b c")


def test_python_leaves_stay_what_they_were():
    m = md.from_jax(lambda x, n: x * n, X, 3)
    assert m.specs[1] is None
    with pytest.raises(md.ShapeError, match="was imported with 3, and this is 4"):
        m.tensors(X, 4)


def test_places_that_are_printed_are_patterns():
    def f(x):
        return jnp.sin(x).reshape(4, 2, 3)

    m = md.from_jax(f, X, names={"x": "batch ."})
    (place,) = (line.split("  ")[2] for line in str(m).splitlines() if line.startswith("  x_1_1"))
    assert place == "x, axis 1"
    line = f.__code__.co_firstlineno + 1
    named = md.from_jax(f, X, names={"x": "batch .", f"test_names.py:{line} axis 2": "inner"})
    assert named.dims == {"batch": 4, "x_1_0": 2, "inner": 3}
    with pytest.raises(md.ShapeError, match="no input has such a path"):
        md.from_jax(f, X, names={"test_names.py:1 axis 2": "inner"})


@pytest.mark.parametrize("twin", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_names_to_paste_name_the_dims_of_large_weights(twin):
    function, args = twin
    names = md.from_jax(function, *args).names_to_paste()
    assert names["tokens"] == "batch length"
    m = md.from_jax(function, *args, names=names)
    assert {"batch", "length", "vocab", "model", "hidden", "heads", "head"} <= m.dims.keys()
    assert m.names_to_paste() == {} and {"batch", "vocab"} <= set(m.dims_to_shard())
    assert m.fsdp("rows") == "batch:rows; params:rows"


def test_a_gradient_that_jax_made_is_said_with_the_places_that_send_more():
    def f(x):
        return jnp.sum(jax.nn.relu(x) ** 2)

    assert "gradient that JAX made" in str(md.from_jax(jax.grad(f), X))
    assert "gradient" not in str(md.from_jax(f, X)) + str(md.from_jax(lambda x: jnp.sum(jax.nn.gelu(x)), X))
    llama, args = LLAMA
    m = md.from_jax(jax.value_and_grad(llama), *args, names=twins.LLAMA_NAMES)
    assert re.search(r"twins.py:\d+ scatter-add, if vocab is split", str(m))
    assert re.search(r"twins.py:\d+ dot_general, if length is split", str(m))


def test_a_gradient_of_jax_has_the_dims_of_its_parameters():
    def f(params, i, images):
        y = jax.lax.conv_general_dilated(
            images, params["k"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(params["table"][i] ** 2) + jnp.sum(y**2)

    params, i, images = (
        {"k": jnp.ones((3, 3, 2, 4)), "table": jnp.ones((9, 4))},
        jnp.zeros(8, int),
        jnp.ones((8, 6, 7, 2)),
    )
    names = {"*/table": "vocab model", "i": "batch", "images": "batch height width ."}
    m = md.from_jax(jax.value_and_grad(f), params, i, images, names=names)
    _, grads = md.eval_shape(m, *m.specs)
    assert jax.tree.map(lambda x: x.dims, grads) == {name: spec.dims for name, spec in m.specs[0].items()}
    assert m.dims["height"] == (6, 4)
    assert "if height is split" in str(m)


def test_programs_print_the_scopes_of_the_function():
    @jax.jit
    def inner(x, w):
        with jax.named_scope("up"):
            return jnp.tanh(x @ w)

    def f(w, x):
        with jax.named_scope("block"):
            x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(inner)(x, w), None), x, w)
        return jnp.sum(x)

    m = md.from_jax(f, jnp.ones((3, 6, 6)), X, names={"x": "batch io"})
    program = md.compile(md.grad(m), "rows:4", "batch:rows").program(*m.specs)
    scopes = {line.rpartition(" in ")[2] for line in str(program).splitlines() if " in block" in line}
    assert {"block (backward)", "block/up (backward)"} <= scopes
    assert "in block/up sum over 'batch' of einsum" in str(program.collectives[0])
    imported = md.from_jax(jax.grad(f), jnp.ones((3, 6, 6)), X)
    text = str(md.compile(imported, "").program(*imported.specs))
    assert "in block/up" in text and "jvp" not in text and "in block" not in str(m)


@pytest.mark.parametrize("hidden", [6, 4])
def test_gradients_have_the_axes_of_their_arguments(hidden: int):
    """Two arguments with the same dims in another order; of equal sizes, shapes do not tell them apart."""

    def f(up, down, x):
        return jnp.sum(jnp.tanh(x @ up) @ down * jnp.arange(4.0))

    args = jnp.arange(4.0 * hidden).reshape(4, hidden) / 9, jnp.arange(4.0 * hidden).reshape(hidden, 4) / 7, X[:, :4]
    m = md.from_jax(f, *args, names={"up": "model hidden", "down": "hidden model", "x": "batch model"})
    compiled = md.compile(md.grad(m, argnums=(0, 1)), "rows:2", "hidden:rows")
    for found in (md.jaxify(compiled)(*args), m.arrays(compiled(*m.tensors(*args)), like=args[:2])):
        for x, y in zip(found, jax.grad(f, argnums=(0, 1))(*args), strict=True):
            assert x.shape == y.shape and jnp.allclose(x, y)
    grads = compiled(*m.tensors(*args))
    with pytest.raises(md.ShapeError, match=rf"an array of shape \(4, {hidden}\) cannot be like one of shape \(2, "):
        m.arrays(grads, like=(jnp.ones((2, 2 * hidden)), args[1]))


def test_axes_that_may_be_those_of_several_arguments_are_refused():
    m = md.from_jax(lambda x, y: (x * y.transpose(1, 0, 2)).sum(), jnp.ones((2, 3, 5)), jnp.ones((3, 2, 5)))
    a, b, c = m.specs[0].dims
    with pytest.raises(md.ShapeError, match=r"(?s)may be in the order of several arguments.*md\.transpose"):
        m.arrays(md.zeros([c, b, a]))
    assert m.arrays(md.zeros([b, a, c])).shape == (3, 2, 5)
