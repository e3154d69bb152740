"""Array functions and methods of tensors, beside NumPy's and JAX's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

LINES = [
    (0, 1, None), (3, 2, None), (10, -3, "uint8"), (0.5, 0.25, None), (100, -70, "int8"), (1, 1, "bfloat16"),
    (np.int64(4), 5, "int32"), (4_000_000_000, -7, "uint32"),
]  # fmt: skip


@pytest.mark.parametrize(("start", "step", "dtype"), LINES)
@pytest.mark.parametrize("n", [0, 1, 4])
def test_arange_is_numpys(start: float, step: float, dtype: str | None, n: int) -> None:
    made = md.arange(md.Dim("n", n), start, step, dtype)
    np.testing.assert_array_equal(made.numpy().astype(np.float64), start + step * np.arange(n, dtype=np.float64))
    assert made.dtype == np.dtype(jnp.dtype(dtype or ("float32" if isinstance(start, float) else "int32")))


@pytest.mark.parametrize("ends", [(0, 1), (-2.5, 7), (3, 3)])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_linspace_is_jnps(ends: tuple[float, float], n: int) -> None:
    for endpoint in (True, False):
        theirs = jnp.linspace(*ends, n, endpoint=endpoint, dtype="float32")
        np.testing.assert_allclose(md.linspace(md.Dim("n", n), *ends, endpoint).numpy(), theirs, rtol=1e-6, atol=1e-6)


def test_a_line_that_its_dtype_cannot_hold() -> None:
    with pytest.raises(md.ShapeError, match="does not fit into uint8"):
        md.arange("n:4", 0, 100, "uint8")
    with pytest.raises(md.ShapeError, match="does not take int32"):
        md.linspace("n:4", 0, 1, dtype="int32")
    with pytest.raises(md.ShapeError, match="does not fit into int8"):
        md.full("n:4", 300, "int8")


@pytest.mark.parametrize("order", [1, 2, np.inf])
def test_gradients_of_norms_are_jaxs(order: float) -> None:
    x = np.array([[3.0, -4.0, 0.5], [1.0, 2.0, -2.0]])
    ours = md.grad(lambda x: md.sum(md.norm(x, "b", order)))(md.tensor(x, "a b"))
    theirs = jax.grad(lambda x: jnp.sum(jnp.linalg.norm(x, order, axis=1)))(x)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12)


def test_the_norm_of_zeros_has_gradient_zero_and_keeps_nan() -> None:
    x = md.tensor([[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]], "a b")
    value, slope = md.norm(x, "b").numpy(), md.grad(lambda x: md.sum(md.norm(x, "b")))(x).numpy()
    np.testing.assert_array_equal(value, [0, np.nan, np.inf])
    np.testing.assert_array_equal(slope[0], [0, 0])
    assert np.isnan(slope[1]).all()


def test_norms_of_narrow_floats_are_summed_in_float32() -> None:
    x = md.full("n:4096", 300.0, "float16")
    assert md.norm(x).item() == 300 * 64 and md.norm(x).dtype == np.float16


@pytest.mark.parametrize("k", [-99, -1, 0, 2, 99, 10**12])
def test_triangles_are_numpys(k: int) -> None:
    x = np.arange(1, 25).reshape(2, 3, 4)
    small = max(-10, min(10, k))
    np.testing.assert_array_equal(md.tril(md.tensor(x, "a b c"), "b", "c", k).numpy(), np.tril(x, small))
    np.testing.assert_array_equal(md.triu(md.tensor(x, "a b c"), "b", "c", k).numpy(), np.triu(x, small))


REORDERED = ["b a c", "c a b", "a c b", "b:3 a:2 c:4", ["b", "a", "c"], md.dims("c:4 a:2 b:3"), "b a d:4", "d:2 c b"]


@pytest.mark.parametrize("dims", REORDERED, ids=str)
def test_reshape_refuses_dims_of_the_tensor_in_another_order(dims: Any) -> None:
    x = md.tensor(np.arange(24).reshape(2, 3, 4), "a b c")
    with pytest.raises(md.ShapeError, match=r"in another order\n  reorder them with md\.transpose"):
        md.reshape(x, dims)


@pytest.mark.parametrize(
    "dims", ["a d:3 e:4", "d:2 b c", "a b d:4 e:1", "a b:12", ["a", md.Dim("d", 12)], "a:4 b:6", "a b c"]
)
def test_reshape_takes_the_size_of_a_name_from_the_tensor(dims: Any) -> None:
    x = np.arange(24).reshape(2, 3, 4)
    y = md.reshape(md.tensor(x, "a b c"), dims)
    np.testing.assert_array_equal(y.numpy(), x.reshape(y.shape))


def test_mistakes() -> None:
    x = md.tensor([[1.0, 2.0]], "a b")
    for wrong, text in [
        (lambda: md.tril(x, "a", "a"), "two dims, and both are 'a'"),
        (lambda: md.squeeze(x, "b"), "dims of size 1"),
        (lambda: md.clip(x), "needs a limit"),
        (lambda: md.norm(x, ord=3), "not 3"),
        (lambda: md.norm(md.tensor([1j], "a")), "complex"),
        (lambda: f"{x:.3f}", "without dims is one number"),
    ]:
        with pytest.raises(md.ShapeError, match=text):
            wrong()


def test_methods_and_properties_are_the_functions() -> None:
    x = md.tensor([[1.0, 2.0], [3.0, 5.0]], "a b")
    for name in ("sum", "mean", "max", "min", "prod", "var"):
        assert getattr(x, name)("a").numpy().tolist() == getattr(md, name)(x, "a").numpy().tolist()
        assert getattr(x, name)().item() == getattr(md, name)(x).item()
    assert (x > 1).any().item() and not (x > 1).all().item()
    assert (x.ndim, x.size, x.astype("int32").dtype, x.dims) == (2, 4, np.int32, md.spec("a:2 b:2").dims)
    assert f"{x.mean():.3f} {x.mean():>8.1e}|{md.tensor(3):04d}" == "2.750  2.8e+00|0003"
    assert f"{x}" == str(x)


def test_a_traced_tensor_has_no_text_of_its_value() -> None:
    with pytest.raises(md.TraceError, match="has no values yet"):
        md.grad(lambda x: x * float(f"{x:.3f}"))(md.tensor(2.0))
