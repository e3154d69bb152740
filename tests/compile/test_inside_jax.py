"""meshdsl inside JAX: compiled functions under jit and grad, keys, and arguments that are Python values or keywords."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.compile.array_function import ArrayFunction
from meshdsl.compile.inside_jax import _bind
from tests.joined import in_groups

X, W = np.random.default_rng(0).normal(size=(6, 8)), np.random.default_rng(1).normal(size=(8, 5))


def loss(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.mean(md.tanh(md.dot(x, w, "io")))


def plain(x: Any, w: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w))


STEP = md.compile(loss, "r:2 s:2", "batch:r; hidden:s")  # hidden has 5 elements: stored with padding
SPECS = md.spec("batch:6 io:8", "float64"), md.spec("io:8 hidden:5", "float64")


@pytest.mark.parametrize("layout", ["", "batch:r; io:s", "io:r; hidden:s", "hidden:r,s"])
def test_compiled_functions_under_jit_and_grad(layout: str) -> None:
    step = md.compile(loss, "r:2 s:2", layout)

    def wrapped(x: Any, w: Any) -> Any:
        return jnp.exp(step(md.tensor(x, "batch io"), md.tensor(w, "io hidden")).array)

    value, grads = jax.jit(jax.value_and_grad(wrapped, argnums=(0, 1)))(X, W)
    wanted, slopes = jax.jit(jax.value_and_grad(lambda x, w: jnp.exp(plain(x, w)), argnums=(0, 1)))(X, W)
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    for a, b in zip(grads, slopes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-15)


def test_jaxify_takes_and_returns_arrays_in_the_programs_shardings() -> None:
    def step(params: Any, x: md.Tensor, i: md.Tensor) -> Any:
        return {"y": md.dot(x, params["w"], "io") * 2.0, "i": i + 1}

    compiled = md.compile(step, "r:2 s:2", "batch:r; hidden:s")
    f: Any = md.jaxify(compiled, {"w": SPECS[1]}, SPECS[0], md.spec("", "int32"))
    y = jax.jit(f)({"w": W}, X, 3)
    np.testing.assert_allclose(y["y"], 2 * X @ W, rtol=1e-12)
    assert int(y["i"]) == 4 and y["y"].shape == (6, 5)
    grads = jax.grad(lambda p: jnp.sum(f(p, X, 3)["y"] ** 2))({"w": W})
    np.testing.assert_allclose(grads["w"], jax.jit(jax.grad(lambda w: jnp.sum((2 * X @ w) ** 2)))(W), rtol=1e-12)
    assert f.in_shardings[1].spec[0] == "r" and f.out_shardings["y"].spec[0] == "r"
    with pytest.raises(md.ShapeError, match=r"takes arrays of \[\(8, 5\), \(6, 8\), \(\)\]"):
        f({"w": W}, W, 3)


def test_jaxify_called_outside_jax_equals_the_call_inside_jit() -> None:
    """Arrays of NumPy, in other shardings, of another dtype or weakly typed, and sizes that need padding."""
    compiled = md.compile(lambda x, s: (x * s, md.sum(x, "batch")), "r:4", "batch:r")
    f: Any = md.jaxify(compiled, md.spec("batch:6 io:8"), md.spec(""))
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    replicated = jax.device_put(x, jax.sharding.NamedSharding(jax.make_mesh((4,), ("other",)), jax.P()))
    for array in (x, x.astype(np.float16), jnp.asarray(x), replicated, f(x, 1)[0]):
        for scale in (2, np.float32(2), jnp.asarray(2.0)):
            for bare, inside in zip(f(array, scale), jax.jit(f)(array, scale), strict=True):
                np.testing.assert_array_equal(bare, inside, strict=True)
    assert f(x, 1)[0].tolist() == x.tolist()


@pytest.mark.parametrize("mesh", ["r:1", "r:4"])
def test_jaxify_refuses_an_array_that_was_donated(mesh: str) -> None:
    f: Any = md.jaxify(md.compile(lambda x: x + 1.0, mesh, "io:r", donate=(0,)), md.spec("io:8"))
    x = f(jnp.zeros(8))
    f(x)
    with pytest.raises(md.ShapeError, match="argument x was donated to an earlier call"):
        f(x)


def two_layers(x: md.Tensor, w: md.Tensor, i: md.Tensor) -> Any:
    """Products, a loop, a softmax and an integer; hidden has 5 elements, so it is stored with padding."""

    def layer(h: md.Tensor, s: md.Tensor) -> tuple[md.Tensor, None]:
        return md.tanh(h) * s, None

    h = md.scan(layer, md.dot(x, w, "io"), md.iota(md.Dim("step", 2), "float64") + 1.0, over="step")[0]
    return {"y": md.softmax(h, "hidden") * md.cast(i, "float64"), "i": i + 1}


def two_layers_in_jax(x: Any, w: Any, i: Any) -> Any:
    h = jnp.tanh(jnp.tanh(x @ w) * 1.0) * 2.0
    return {"y": jax.nn.softmax(h, -1) * i, "i": i + 1}


def weighed(f: Any) -> Any:
    """A scalar function of the two floating arguments; a derivative of any order depends on every element."""
    return lambda x, w: jnp.sum(f(x, w, 3)["y"] ** 2 * jnp.arange(1.0, 31.0).reshape(6, 5))


def slope(f: Any, x: Any, w: Any) -> Any:
    """A product with the Hessian, by reverse mode twice."""
    return jax.grad(lambda w: jnp.sum(jax.grad(f, argnums=1)(x, w) * jnp.cos(W)))(w)


TRANSFORMED: dict[str, Any] = {
    "jvp": lambda f: jax.jvp(weighed(f), (X, W), (jnp.cos(X), jnp.sin(W))),
    "jvp_of_one": lambda f: jax.jvp(lambda w: f(X, w, 3)["y"], (W,), (jnp.sin(W),)),
    "linearize": lambda f: jax.linearize(weighed(f), X, W)[1](jnp.cos(X), W),
    "vjp": lambda f: jax.vjp(lambda x, w: f(x, w, 3)["y"], X, W)[1](jnp.ones((6, 5))),
    "reverse_reverse": lambda f: slope(weighed(f), X, W),
    "forward_reverse": lambda f: jax.jvp(jax.grad(weighed(f), argnums=1), (X, W), (jnp.cos(X), W)),
    "reverse_forward": lambda f: jax.grad(lambda x: jax.jvp(lambda w: weighed(f)(x, w), (W,), (W,))[1])(X),
    "third": lambda f: jax.grad(lambda x: jnp.sum(slope(weighed(f), x, W) ** 2))(X),
    "hessian": lambda f: jax.hessian(lambda a: weighed(f)(a * X, W))(0.7),
    "jacobian": lambda f: jax.jacrev(lambda w: f(X, w, 3)["y"][:, :2])(W),
    "vmap": lambda f: jax.vmap(f, in_axes=(1, None, 0))(jnp.stack([X, 2 * X], 1), W, jnp.arange(2)),
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(weighed(f), argnums=1), (0, None))(jnp.stack([X, 2 * X]), W),
    "grad_of_vmap": lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(weighed(f), (0, None))(jnp.stack([X, 2 * X]), w)))(W),
    "vmap_twice": lambda f: jax.vmap(jax.vmap(lambda s: weighed(f)(s * X, W)))(jnp.arange(4.0).reshape(2, 2)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(weighed(f)), argnums=(0, 1))(X, W),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + weighed(f)(c, W), None), x, None, 2)[0].sum())(
        X
    ),
}


def transformed(f: Any) -> Any:
    """Every transformation of a function under `jax.jit`, by its name."""
    return in_groups({name: functools.partial(apply, f) for name, apply in TRANSFORMED.items()})


@functools.cache
def on_mesh(layout: str) -> tuple[Any, Any]:
    f = md.jaxify(md.compile(two_layers, "r:2 s:2", layout), *SPECS, md.spec("", "int64"))
    return f, transformed(f)


IN_JAX = transformed(two_layers_in_jax)
OTHER_LAYOUTS = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("", "io:r,s")]
BARE = {"reverse_reverse", "vmap_of_grad", "linearize"}  # these also run outside `jax.jit`


@pytest.mark.parametrize("layout", ["batch:r; hidden:s", *OTHER_LAYOUTS])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_of_jax_are_those_of_the_same_function_in_jax(name: str, layout: str) -> None:
    f, inside = on_mesh(layout)
    for results in (inside(name), *([TRANSFORMED[name](f)] if name in BARE else [])):
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(IN_JAX(name)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_a_linear_function_is_transposed() -> None:
    f = md.jaxify(md.compile(lambda x: md.dot(x, md.tensor(W, "io hidden"), "io"), "r:2", "io:r"), SPECS[0])
    (ct,) = jax.linear_transpose(f, X)(np.ones((6, 5)))
    np.testing.assert_allclose(ct, np.ones((6, 5)) @ W.T, rtol=1e-12)
    twice = jax.linear_transpose(jax.vmap(f), np.stack([X, X]))(np.ones((2, 6, 5)))[0]
    np.testing.assert_allclose(twice, np.ones((2, 6, 5)) @ W.T, rtol=1e-12)


def test_the_dim_of_vmap_has_a_name_that_the_function_does_not_use() -> None:
    compiled = md.compile(lambda x: md.sum(x, "vmap"), "r:2", "vmap:r")
    f = md.jaxify(compiled, md.spec("vmap:8 b:3", "float64"))
    x = np.arange(2 * 3 * 8 * 3.0).reshape(2, 3, 8, 3)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(f))(x), x.sum(2))


def test_a_layout_may_name_dims_and_results_that_a_derivative_lacks() -> None:
    def f(x: md.Tensor) -> dict[str, md.Tensor]:
        place = md.argmax(md.rename(x, io="inside"), "inside")  # integers: no derivative reads it
        return {"y": x * x, "place": place}

    layout = md.Layout("inside:r", overrides={"place": "batch:r", "y": "io:r"})
    g: Any = md.jaxify(md.compile(f, "r:2", layout), SPECS[0])
    loss = lambda x: jax.numpy.sum(g(x)["y"])  # noqa: E731 - one line
    np.testing.assert_array_equal(jax.vmap(jax.grad(loss))(np.stack([X, X])), [2 * X, 2 * X])
    np.testing.assert_array_equal(jax.jvp(loss, (X,), (X,))[1], np.sum(2 * X * X))


def test_a_gradient_is_partitioned_once() -> None:
    """`jax.grad` asks for the derivative in a direction and transposes it; only the transpose becomes a program."""
    stages = md.compile(loss, "r:2 s:2", "batch:r; hidden:s")._for(SPECS)[0]
    function = ArrayFunction.of(stages)
    f = lambda *arrays: _bind(function, arrays)[0]  # noqa: E731 - one line
    grads = jax.jit(jax.grad(f, argnums=(0, 1)))(jnp.asarray(X), jnp.asarray(W))
    for a, b in zip(grads, jax.jit(jax.grad(plain, argnums=(0, 1)))(X, W), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-15)
    assert {key[0]: "stages" in vars(each) for key, each in function._derived.items()} == {"jvp": False, "vjp": True}


def test_a_gradient_outside_jit_reads_arguments_that_a_call_would_overwrite() -> None:
    f: Any = md.jaxify(md.compile(lambda x: md.sum(x * x), "r:4", "io:r", donate=(0,)), md.spec("io:8"))
    x = jax.device_put(jnp.arange(8.0, dtype="float32"), f.in_shardings[0])
    assert jax.grad(f)(x).tolist() == [2.0 * i for i in range(8)] and not x.is_deleted()


def test_functions_of_jax_numpy_refuse_tensors_with_a_way_out() -> None:
    x: Any = md.tensor(X, "batch io")
    assert (jnp.float64(2) * x + jnp.asarray(1.0)).dims == x.dims  # operators of numbers are those of the tensor
    for call in (lambda: jnp.sin(x), lambda: md.compile(jnp.exp, "r:2").program(x), lambda: jnp.asarray(x) + 1):
        with pytest.raises(md.TraceError, match=r"md\.map\(jnp\.sin, x\).*md\.local\(f, x, out=, split=\)"):
            call()


def test_a_tensor_that_jax_traces_is_no_constant() -> None:
    def f(a: Any) -> Any:
        x = md.tensor(a, "n")
        assert repr(x).startswith("traced float")
        return md.compile(lambda y: y + x, "r:2")(md.tensor(a, "n")).array

    with pytest.raises(md.TraceError, match="closes over a tensor that a JAX transformation traces"):
        jax.jit(f)(jnp.ones(4))


def test_an_array_that_jax_traces_is_no_constant_of_a_mapped_function() -> None:
    def f(a: Any) -> Any:
        return md.compile(lambda x: md.map(lambda z: z * a[0], x), "r:2", "n:r")(md.tensor(a, "n")).array

    with pytest.raises(md.TraceError, match="closes over an array that a JAX transformation traces"):
        jax.jit(f)(jnp.ones(4))


def test_constants_of_a_function_that_is_first_called_inside_jit() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        noise = md.random.normal(md.random.key(0), "n:4", "float64")
        return x * md.tensor(np.arange(4.0), "n") + noise + md.tensor(2.0)

    @jax.jit
    def inside(a: Any) -> Any:
        return md.compile(f, "r:2", "n:r")(md.tensor(a, "n")).array

    np.testing.assert_array_equal(inside(X[0, :4]), f(md.tensor(X[0, :4], "n")).numpy())


def test_typed_keys_are_those_of_md_random() -> None:
    for seed in (0, 7, 2**40 + 3):
        ours, theirs = md.random.key(seed), jax.random.key(seed)
        assert md.tensor(theirs).numpy().tolist() == ours.numpy().tolist()
        got = md.random.normal(theirs, "a:3 b:5")
        assert got.numpy().tolist() == jax.random.normal(theirs, (3, 5), "float32").tolist()
        assert got.numpy().tolist() == md.random.normal(ours, "a:3 b:5").numpy().tolist()
    keys = md.tensor(jax.random.split(jax.random.key(0), 4), "layer")
    assert keys.dims == md.dims("layer:4 key_word:2")
    assert keys.numpy().tolist() == md.random.split(md.random.key(0), md.Dim("layer", 4)).numpy().tolist()
    for call in (lambda k: md.random.normal(k, "a:3"), md.tensor):
        with pytest.raises(md.ShapeError, match="threefry2x32"):
            call(jax.random.key(0, impl="rbg"))


def test_static_and_keyword_arguments() -> None:
    traces: list[Any] = []

    def f(x: md.Tensor, power: int, *, scale: Any = 1.0, train: bool = False) -> Any:
        traces.append((power, train))
        y = x**power * scale
        return {"y": md.sum(y, "io") if train else y}

    step = md.compile(f, "r:2", "io:r", static=("power", "train"))
    x = md.tensor(X, "batch io")
    np.testing.assert_allclose(step(x, 2, train=True)["y"].numpy(), (X**2).sum(1), rtol=1e-12)
    np.testing.assert_allclose(step(x, power=2, scale=3.0)["y"].numpy(), 3 * X**2, rtol=1e-12)
    np.testing.assert_allclose(step(x, scale=2.0, power=2)["y"].numpy(), 2 * X**2, rtol=1e-12)
    np.testing.assert_allclose(step(x=x, power=3)["y"].numpy(), X**3, rtol=1e-12)
    assert traces == [(2, True), (2, False), (3, False)]  # a number that moves is no reason to trace again
    spec = md.spec("batch:6 io:8")
    assert [c.kind for c in step.program(spec, 2, train=True).collectives] == ["all_reduce"]
    assert step.graph(spec, power=2).outs[0].dims == md.dims("batch:6 io:8")
    assert step.under("r:4", "io:r").program(spec, 2, train=True).mesh.size == 4
    assert step.cost(spec, 2, train=True).to_dict() != step.cost(spec, 2).to_dict()
    with pytest.raises(md.ShapeError, match="'power' has no hash"):
        step(x, [2])
    with pytest.raises(md.ShapeError, match="static='pover' is no argument; did you mean 'power'"):
        md.compile(f, "r:2", static="pover")
    with pytest.raises(md.ShapeError, match="missing a required argument: 'power'"):
        step(x)


def test_donated_arguments_keep_their_numbers_beside_static_ones() -> None:
    step = md.compile(lambda n, x, y: (x + n, y), "r:2", "a:r", static=0, donate=1)
    x, y = (md.compile(lambda x: x * 2, "r:2", "a:r")(md.tensor([1.0, 2.0], "a")) for _ in range(2))
    assert step(3, x, y)[0].numpy().tolist() == [5, 7]
    assert x._array.is_deleted() and not y._array.is_deleted()
