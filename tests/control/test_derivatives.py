"""`md.jvp` and `md.vjp`: each is the transpose of the other, for every operation; JAX's values where it has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from tests.laws import Row, leaves, rows, run

# md.attention has second derivatives only with method="plain", and a jvp is a derivative of the gradient
ROWS = [
    row
    for row in rows()
    if row.differentiable and row.ins and "float32" in row.dtypes and not row.name.startswith("attention")
]
FEW = ROWS[::15]


def transposed(row: Row) -> None:
    """<ct, J v> = <J' ct, v>, for random v and ct."""
    dtype = "float64" if "float32" in row.dtypes else row.dtypes[0]
    rng = np.random.default_rng(list(row.name.encode()))
    xs = row.make(rng, dtype=dtype)
    ys = md.eval_shape(lambda *xs: leaves(row.call(*xs)), *xs)
    floating = [i for i, x in enumerate(xs) if x.dtype.kind == "f"]
    vs = [md.tensor(rng.normal(size=x.shape).astype(x.dtype), x.dims) for x in xs]
    cts = [md.tensor(rng.normal(size=[d.size for d in y.dims]).astype(y.dtype), y.dims) for y in ys]

    def both(xs: Any, vs: Any, cts: Any) -> Any:
        f = lambda *xs: leaves(row.call(*xs))  # noqa: E731
        moved = md.jvp(f, tuple(xs), tuple(vs))[1]
        grads = md.vjp(f, *xs)[1](cts)
        return moved, [grads[i] for i in floating]

    graph = md.compile(both, "", "").graph(xs, vs, cts)
    with np.errstate(all="ignore"):
        found = run(graph, [x.numpy() for x in (*xs, *vs, *cts)], backend.NumPy)
    moved, grads = found[: len(ys)], found[len(ys) :]
    left = sum(np.sum(m * ct.numpy()) for m, ct in zip(moved, cts, strict=True) if ct.dtype.kind == "f")
    right = sum(np.sum(g * vs[i].numpy()) for g, i in zip(grads, floating, strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9, err_msg=row.name)


@pytest.mark.parametrize("row", FEW, ids=str)
def test_jvp_is_the_transpose_of_vjp(row: Row) -> None:
    transposed(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_jvp_is_the_transpose_of_vjp_for_every_operation(row: Row) -> None:
    transposed(row)


X, V = np.array([1.0, 2.0, -1.0]), np.array([0.5, 1.0, 2.0])


def test_hessian_products_and_loops_are_jaxs() -> None:
    ours = md.jvp(md.grad(lambda x: md.sum(md.sin(x) * md.cumsum(x, "a"))), (md.tensor(X, "a"),), (md.tensor(V, "a"),))
    theirs = jax.jvp(jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cumsum(x))), (X,), (V,))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-12)
    step = lambda c, x: (c * x + 1, c)  # noqa: E731
    ours = md.jvp(
        lambda c, x: md.scan(step, c, x, over="a"), (md.tensor(1.0), md.tensor(X, "a")), (1.0, md.tensor(V, "a"))
    )
    theirs = jax.jvp(lambda c, x: jax.lax.scan(step, c, x), (1.0, X), (1.0, V))
    for a, b in zip(leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-6)


def test_the_middle_pass_of_a_jvp_is_removed() -> None:
    graph = md.compile(lambda x, v: md.jvp(md.sin, (x,), (v,)), "", "").graph(md.spec("a:3"), md.spec("a:3"))
    assert [str(eqn.op) for eqn in graph.eqns] == ["sin", "cos", "multiply"]


def test_jacobians_by_vmap() -> None:
    y, pull = md.vjp(lambda x: md.sort(x * x, "a"), md.tensor(X, "a"))
    rows = md.vmap(pull, over="row")(md.tensor(np.eye(3), "row a"))[0]
    np.testing.assert_allclose(rows.numpy(), jax.jacrev(lambda x: jnp.sort(x * x))(X))
    columns = md.vmap(lambda v: md.jvp(md.sin, (md.tensor(X, "a"),), (v,))[1], over="row")(
        md.tensor(np.eye(3), "row a")
    )
    np.testing.assert_allclose(columns.numpy(), np.diag(np.cos(X)))
    assert y.dims == md.dims("a:3")


def test_integers_have_no_tangent() -> None:
    f = lambda i, x: (i, x * 2)  # noqa: E731
    (i, y), (di, dy) = md.jvp(f, (md.tensor(1), md.tensor(2.0)), (None, 1.0))
    assert (i.item(), y.item(), di.item(), dy.item()) == (1, 4, 0, 2)
    nothing, six = md.vjp(f, md.tensor(1), md.tensor(2.0))[1]((None, 3.0))
    assert nothing is None and six.item() == 6


def test_mistakes() -> None:
    x = md.tensor([1.0, 2.0], "a")
    for wrong, text in [
        (lambda: md.jvp(md.sin, (x,), (md.tensor([1.0, 2.0], "b"),)), "has the type of its value"),
        (lambda: md.jvp(md.sin, (x,), ()), "has the structure"),
        (lambda: md.vjp(md.sin, x)[1]((x, x)), "has the structure"),
        (lambda: md.vjp(md.sin, x)[1](md.tensor(1.0)), "has the type of its value"),
        (
            lambda: md.jvp(lambda x: md.while_loop(lambda x: md.sum(x) < 9, lambda x: x * 2, x), (x,), (x,)),
            "no gradient",
        ),
    ]:
        with pytest.raises(md.MeshdslError, match=text):
            wrong()
