"""Semantics of operations outside the table of ordinary values: NaN, ties, order of derivatives, loops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from meshdsl.dims import Dim
from meshdsl.trace import Tensor, trace
from tests.laws import run

NAN, INF = np.nan, np.inf
QUICK = {"xla_backend_optimization_level": 0}
ODD = np.array([[NAN, 1, -INF], [INF, -0.0, 0.0], [2, -2.5, NAN], [-INF, -INF, -INF]], np.float32)


def t(x: Any, dims: str = "", dtype: Any = np.float32) -> md.Tensor:
    return md.tensor(np.asarray(x, dtype), dims)


def numpy(function: Callable[..., Any], *xs: md.Tensor) -> list[np.ndarray]:
    """The results, by NumPy's kernels: nothing to compile."""
    graph, _, _ = trace(function, [x.type for x in xs])
    return run(graph, [x.numpy() for x in xs], backend.NumPy)


def both(function: Callable[..., Any], *xs: md.Tensor) -> np.ndarray:
    """The value in JAX, after checking that NumPy's kernels give the same."""

    def at_once(*arrays: Any) -> Any:
        return function(*(Tensor(x.dims, x.dtype, array=a) for x, a in zip(xs, arrays, strict=True))).stored

    there = np.asarray(jax.jit(at_once, compiler_options=QUICK)(*(x.array for x in xs)))
    np.testing.assert_allclose(numpy(function, *xs)[0], there, rtol=1e-5)
    return there


@pytest.mark.parametrize("name", ["max", "min", "sum", "prod", "mean", "logsumexp", "argmax", "argmin", "any", "all"])
def test_reductions_of_nan_and_inf_are_jnps(name: str) -> None:
    theirs = getattr(jax.nn if name == "logsumexp" else jnp, name)
    ours = both(lambda x: getattr(md, name)(x, "b"), t(ODD, "a b"))
    np.testing.assert_allclose(ours, theirs(ODD, axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "sort", "argsort", "cumsum"])
def test_rows_of_nan_and_inf_are_jnps(name: str) -> None:
    theirs = getattr(jax.nn if "softmax" in name else jnp, name)
    ours = both(lambda x: getattr(md, name)(x, "b"), t(ODD, "a b"))
    np.testing.assert_allclose(ours, theirs(ODD, axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["maximum", "minimum", "power", "floor_divide", "remainder", "divide"])
def test_pairs_of_odd_numbers_are_jnps(name: str) -> None:
    odd = np.array([NAN, INF, -INF, 0, -0.0, 1, -1, 2.5, -3, 3], np.float32)
    x, y = (a.reshape(-1) for a in np.meshgrid(odd, odd))
    function = getattr(__import__("meshdsl.ops.elementwise", fromlist=["x"]), name)
    ours = both(function, t(x, "a"), t(y, "a"))
    np.testing.assert_allclose(ours, getattr(jnp, name)(x, y), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_integer_division_is_jnps_by_zero_too(dtype: str) -> None:
    values = np.array([0, 1, 3, 7, 100, -1, -7, -100] if dtype != "uint8" else [0, 1, 3, 7, 100, 255], dtype)
    x, y = (a.reshape(-1) for a in np.meshgrid(values, values))
    for name, ours in (("floor_divide", lambda x, y: x // y), ("remainder", lambda x, y: x % y)):
        np.testing.assert_array_equal(both(ours, t(x, "a", dtype), t(y, "a", dtype)), getattr(jnp, name)(x, y))


def test_activations_of_odd_numbers_are_jax_nns() -> None:
    for name in ("relu", "silu", "softplus", "elu", "selu", "leaky_relu", "sigmoid", "gelu"):
        ours = both(getattr(md, name), t(ODD, "a b"))
        np.testing.assert_allclose(ours, getattr(jax.nn, name)(ODD), rtol=2e-6, atol=1e-6, err_msg=name)


def test_activation_slopes_at_zero() -> None:
    names = ("relu", "softplus", "elu", "leaky_relu", "gelu", "silu")
    wanted = jax.jit(lambda x: [jax.grad(getattr(jax.nn, name))(x) for name in names], compiler_options=QUICK)(0.0)
    ours = numpy(lambda x: [md.grad(getattr(md, name))(x) for name in names], t(0.0))
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_ties_share_equally() -> None:
    x = t([[2, 2, 1], [3, 3, 3]], "a b")
    shares = [[0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(md.grad(lambda x: md.sum(md.max(x, "b")))(x).numpy(), shares)
    np.testing.assert_allclose(md.grad(lambda x: md.sum(-md.min(-x, "b")))(x).numpy(), shares)
    for f in (md.maximum, md.minimum):
        dx, dy = md.grad(lambda x, y, f=f: md.sum(f(x, y)), argnums=(0, 1))(x, x)
        np.testing.assert_array_equal([dx.numpy(), dy.numpy()], np.full((2, 2, 3), 0.5))


def test_where_never_leaks() -> None:
    x = t([0.0, 4.0], "a")
    safe = md.grad(lambda x: md.sum(md.where(x > 0, md.sqrt(md.where(x > 0, x, 1)), 0)))(x)
    np.testing.assert_array_equal(safe.numpy(), [0, 0.25])
    chosen = md.grad(lambda x, y: md.sum(md.where(x > 0, x, y)), argnums=(0, 1))(x, t([NAN, NAN], "a"))
    np.testing.assert_array_equal([g.numpy() for g in chosen], [[0, 1], [1, 0]])
    assert md.where(x >= 0, x, t([NAN, INF], "a")).numpy().tolist() == [0, 4]


def test_powers() -> None:
    assert md.tensor(0.0) ** 0 == md.tensor(1.0)
    assert (t(0.0) ** t(0.0)).item() == 1
    assert np.isnan((t(-2.0) ** 0.5).item())
    assert (t(-2.0) ** 3).item() == (t(-2.0) ** t(3.0)).item() == -8
    assert (t(3, dtype=np.int32) ** 2).dtype == np.int32
    assert (t(3, dtype=np.int32) ** 2.0).dtype == jnp.result_type(float)
    assert md.grad(lambda x: x ** t(0.0))(t(0.0)).item() == 0  # where JAX says NaN
    for x, y in [(0.0, 2.0), (2.0, 0.0), (2.0, 3.0), (0.0, 1.0)]:
        ours = md.grad(lambda x, y: x**y, argnums=(0, 1))(t(x), t(y))
        np.testing.assert_allclose([g.item() for g in ours], jax.grad(jnp.power, (0, 1))(x, y), rtol=1e-6)


OPERATORS = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_a_numpy_number_on_the_left(name: str) -> None:
    """NumPy calls a function of its own, such as `np.add`; the result is the tensor that `6 + x` gives."""
    x, apply = t([1, 3], "io", np.int32), getattr(operator, name)
    expected = apply(6, x)
    for left in (np.int32(6), np.array(6, np.int32)):
        found = apply(left, x)
        assert isinstance(found, md.Tensor) and found.dtype == expected.dtype
        assert np.array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize("other", [True, 2, 2.5, np.float32(2), np.int8(3), np.float64(2)])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "bfloat16", "float16", "float32", "float64"])
def test_dtypes_are_promoted_as_in_jax(dtype: str, other: Any) -> None:
    x = np.ones(2, jnp.dtype(dtype))
    y = np.ones(2, np.asarray(other).dtype)

    def combine(x: Any, y: Any) -> list[Any]:
        return [x + other, other * x, x + y, x / other]

    graph, _, _ = trace(combine, [md.spec("a:2", x.dtype), md.spec("a:2", y.dtype)])
    assert [v.dtype for v in graph.outs] == [z.dtype for z in jax.eval_shape(combine, x, y)]


def test_indices_do_not_wrap() -> None:
    table = t(np.arange(300), "row")
    assert md.take(table, t([2**32 + 1, -1, 299], "n", np.int64), "row", drop=True).numpy().tolist() == [0, 0, 299]
    hot = md.one_hot(t([44], "n", np.uint8), "row:300").numpy()[0]
    assert np.flatnonzero(hot).tolist() == [44]
    added = md.put_add(table * 0, t([2**32 + 1, 3], "n", np.int64), 1, "row", drop=True).numpy()
    assert np.flatnonzero(added).tolist() == [3]


def test_exclusive_sums_start_at_zero() -> None:
    assert md.cumsum(t([INF, 1, 2], "a"), "a", exclusive=True).numpy().tolist() == [0, INF, INF]


def test_top_k_orders_nan_first_and_breaks_ties_by_index() -> None:
    x = t([1, NAN, 3, 1, 3], "a")
    values, index = md.top_k(x, "a", Dim("k", 4))
    assert index.numpy().tolist() == [1, 2, 4, 0] == jax.lax.top_k(x.numpy(), 4)[1].tolist()
    np.testing.assert_array_equal(values.numpy(), [NAN, 3, 3, 1])
    for dtype in ("uint8", "int32"):
        y = t(np.array([0, 5, 200, 5]), "a", dtype)
        assert md.top_k(y, "a", Dim("k", 3))[1].numpy().tolist() == [2, 1, 3]
        assert md.argsort(y, "a").numpy().tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize(
    ("ours", "shape"),
    [
        (lambda x: md.sum(x, "a"), (4,)),
        (lambda x: md.prod(x, "a"), (4,)),
        (lambda x: md.sum(x), ()),
        (lambda x: md.concat([x, x], "a"), (0, 4)),
        (lambda x: md.sort(x, "a"), (0, 4)),
        (lambda x: md.einsum(x, x, out="b"), (4,)),
        (lambda x: md.cumsum(x, "a"), (0, 4)),
        (lambda x: md.pad(x, "a", 1, 1), (2, 4)),
        (lambda x: md.flatten(x, "a b", "n"), (0,)),
        (lambda x: md.take(x, md.tensor([0, 1], "n"), "a", drop=True), (2, 4)),
        (lambda x: md.scan(lambda c, v: (c + 1, v * 2), 0, x, over="a")[1], (0, 4)),
        (lambda x: md.grad(lambda x: md.sum(x * x))(x), (0, 4)),
        (lambda x: md.random.bits(md.random.key(0), x.dims), (0, 4)),
    ],
)  # fmt: skip
def test_a_dim_of_size_zero(ours: Callable[..., Any], shape: tuple[int, ...]) -> None:
    out = both(ours, t(np.zeros((0, 4)), "a b"))
    assert out.shape == shape


def recurrence(w: Any, xs: Any, tanh: Any, matmul: Any, scan: Any) -> Any:
    """A loop whose body uses an outer value, carries an integer besides, and returns what nobody uses."""

    def step(carry: Any, x: Any) -> Any:
        c, n = carry
        c = tanh(matmul(c, w) + x * x)
        return (c, n + 1), (c * x, c)

    return scan(step, xs)


def our_loop(reverse: bool, wrap: Callable[..., Any] = lambda f: f) -> Callable[..., Any]:
    def loss(w: md.Tensor, xs: md.Tensor) -> md.Tensor:
        def matmul(c: md.Tensor, w: md.Tensor) -> md.Tensor:
            return md.rename(md.einsum(c, w, out="out"), out="a")

        def scan(step: Any, xs: md.Tensor) -> Any:
            start = (md.broadcast(md.tensor(np.float64(0)), [xs.dims[1]]), 0)
            (last, n), (ys, _) = md.scan(wrap(step), start, xs, over="t", reverse=reverse)
            return md.sum(last * last) + md.sum(md.sin(ys)) * n

        return recurrence(w, xs, md.tanh, matmul, scan)

    return loss


def their_loop(reverse: bool) -> Callable[..., Any]:
    def loss(w: Any, xs: Any) -> Any:
        def scan(step: Any, xs: Any) -> Any:
            (last, n), (ys, _) = jax.lax.scan(step, (jnp.zeros(xs.shape[1]), 0), xs, reverse=reverse)
            return jnp.sum(last * last) + jnp.sum(jnp.sin(ys)) * n

        return recurrence(w, xs, jnp.tanh, jnp.matmul, scan)

    return loss


def twice(grad: Any, total: Any) -> Callable[..., Any]:
    """The gradient of a function of the gradient."""
    return lambda f: grad(lambda w, xs: total(grad(f)(w, xs)))


@pytest.mark.parametrize(
    ("reverse", "remat"), [(False, ""), (True, ""), (False, "nothing"), (True, "nothing"), (True, "collectives")]
)
def test_gradients_through_a_loop_to_second_order(reverse: bool, remat: str) -> None:
    rng = np.random.default_rng(0)
    w, xs = rng.normal(size=(3, 3)), rng.normal(size=(4, 3))
    ours, theirs = our_loop(reverse, lambda f: md.checkpoint(f, remat) if remat else f), their_loop(reverse)
    tensors = [t(w, "a out", np.float64), t(xs, "t a", np.float64)]

    def evaluate(f: Callable[..., Any]) -> list[Any]:
        graph, _, _ = trace(f, [x.type for x in tensors])
        return run(graph, [w, xs], backend.NumPy)

    def total(g: md.Tensor) -> md.Tensor:
        return md.sum(md.square(g))

    both_args = jax.jit(jax.grad(theirs, (0, 1)), compiler_options=QUICK)(w, xs)
    for a, b in zip(evaluate(md.grad(ours, argnums=(0, 1))), both_args, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    second = jax.jit(twice(jax.grad, lambda g: jnp.sum(g**2))(theirs), compiler_options=QUICK)(w, xs)
    np.testing.assert_allclose(evaluate(twice(md.grad, total)(ours))[0], second, rtol=1e-9)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: md.sum(md.softmax(x, "b") * x), lambda x: jnp.sum(jax.nn.softmax(x, 1) * x)),
        (lambda x: md.sum(md.logsumexp(x, "b") ** 3), lambda x: jnp.sum(jax.nn.logsumexp(x, 1) ** 3)),
        (lambda x: md.sum(md.prod(x, "b")), lambda x: jnp.sum(jnp.prod(x, 1))),
        (lambda x: md.sum(md.var(x, "b") ** 2), lambda x: jnp.sum(jnp.var(x, 1) ** 2)),
        (lambda x: md.sum(md.softplus(x) * md.erf(x)), lambda x: jnp.sum(jax.nn.softplus(x) * jax.lax.erf(x))),
        (
            lambda x: md.sum(md.sort(x, "b") ** 3 * md.iota("b:3")),
            lambda x: jnp.sum(jnp.sort(x, 1) ** 3 * jnp.arange(3)),
        ),
        (
            lambda x: md.sum(md.take(x, md.tensor([0, 2, 2], "n"), "b") ** 3),
            lambda x: jnp.sum(x[:, np.array([0, 2, 2])] ** 3),
        ),
        (
            lambda x: md.sum(md.cond(md.sum(x) > 0, lambda x: x**3, lambda x: md.exp(x), x)),
            lambda x: jnp.sum(jax.lax.cond(jnp.sum(x) > 0, lambda x: x**3, jnp.exp, x)),
        ),
        (lambda x: md.sum(md.map(jnp.tanh, x) ** 2), lambda x: jnp.sum(jnp.tanh(x) ** 2)),
    ],
)  # fmt: skip
def test_second_derivatives(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    x = np.random.default_rng(1).normal(size=(2, 3))
    graph, _, _ = trace(md.grad(lambda x: md.sum(md.sin(md.grad(ours)(x)))), [md.spec("a:2 b:3", "float64")])
    wanted = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(theirs)(x)))), compiler_options=QUICK)(x)
    np.testing.assert_allclose(run(graph, [x], backend.NumPy)[0], wanted, rtol=1e-9, atol=1e-10)


def test_gradients_of_trees_and_arguments() -> None:
    def loss(p: dict[str, Any], x: md.Tensor) -> Any:
        return md.sum(p["w"] * x) + p["b"][0], {"seen": md.sum(x)}

    params = {"w": t([1, 2], "a"), "b": [t(3.0), t(4.0)]}
    (value, aux), (grads, dx) = md.value_and_grad(loss, argnums=(0, -1), has_aux=True)(params, t([5, 6], "a"))
    assert (value.item(), aux["seen"].item()) == (20, 11)
    assert grads["w"].numpy().tolist() == [5, 6]
    assert [g.item() for g in grads["b"]] == [1, 0]
    assert dx.numpy().tolist() == [1, 2]


def test_a_gradient_has_the_dims_order_and_dtype_of_its_operand() -> None:
    w, x = t(np.ones((3, 2)), "b a", jnp.bfloat16), t(np.ones((4, 2)), "n a")
    grad = md.grad(lambda w: md.sum(md.einsum(x, w, out="n b")))(w)
    assert (grad.dims, grad.dtype) == (w.dims, w.dtype)


def test_custom_gradients() -> None:
    def clipped(x: md.Tensor) -> md.Tensor:
        return md.custom_vjp(lambda x: x, lambda x: (x, ()), lambda _, ct: (md.minimum(ct, 1),))(x)

    x = t([1, 2], "a")
    assert md.grad(lambda x: md.sum(clipped(x) * 5))(x).numpy().tolist() == [1, 1]
    looped = md.grad(lambda x: md.sum(md.scan(lambda c, v: (clipped(c + v) * 3, v), 0.0, x, over="a")[0]))(x)
    assert looped.numpy().tolist() == [1, 1]
    with pytest.raises(md.TraceError, match="pass it as an argument"):
        md.grad(lambda x: md.custom_vjp(lambda y: y * x, lambda y: (y * x, ()), lambda _, ct: (ct,))(t(1.0)))(t(2.0))


def test_stop_gradient_and_integers_give_no_gradient() -> None:
    x = t([1, 2], "a")
    assert md.grad(lambda x: md.sum(x * md.stop_gradient(x)))(x).numpy().tolist() == [1, 2]
    steps = md.grad(lambda x: md.sum(md.floor(x) + md.cast(md.cast(x, "int32"), "float32")))(x)
    assert steps.numpy().tolist() == [0, 0]


def test_a_while_loop_says_where_its_gradient_is_to_be_had() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        return md.while_loop(lambda c: c < 10, lambda c: 2 * c, x)

    with pytest.raises(md.TraceError, match=r"md\.while_loop has no gradient.*\n.*max_trips=.*\n.*test_semantics"):
        md.grad(f)(t(3.0))
    assert md.grad(lambda x: x * f(md.stop_gradient(x)))(t(3.0)).item() == 12
    with pytest.raises(md.ShapeError, match=r"the carry of md\.while_loop changes"):
        md.while_loop(lambda c: c < 10, lambda c: md.broadcast(c, "a:2"), t(1.0))
    with pytest.raises(
        md.ShapeError, match=r"goes in as \[float32\[\]\] and comes out as \[float32\[\], float32\[\]\]"
    ):
        md.while_loop(lambda c: c < 10, lambda c: (c, c), t(1.0))
    with pytest.raises(md.ShapeError, match="one boolean without dims"):
        md.while_loop(lambda c: c < 10, lambda c: c, t([1.0], "a"))
    with pytest.raises(md.ShapeError, match="one boolean, got"):
        md.while_loop(lambda c: (c < 1, c < 2), lambda c: c, t(1.0))


def test_a_loop_without_inputs() -> None:
    carry, ys = md.scan(lambda c, _: (c * 2, c), t(1.0), None, over="t:3")
    assert (carry.item(), ys.numpy().tolist()) == (8, [1, 2, 4])
    assert ys.dims == (Dim("t", 3),)


def test_dims_may_have_the_names_of_parameters() -> None:
    x = md.ones("x:6 pattern:2")
    assert md.rename(x, x="new", pattern="x").dims == md.dims("new:6 x:2")
    divided = md.rearrange(x, "x=(new pattern) pattern=(x) -> pattern new x", pattern=3, x=2)
    assert divided.dims == md.dims("pattern:3 new:2 x:2")
