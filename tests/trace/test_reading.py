"""Results are read, and options of JAX meet, without surprises: empty results, 64-bit types, NaN in padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md


@pytest.mark.parametrize("n", [6, 5])
@pytest.mark.parametrize("layout", ["a:p", ""])
@pytest.mark.usefixtures("at_once_in_jax")
def test_an_empty_result_with_a_split_dim_is_read(n: int, layout: str) -> None:
    x = md.tensor(np.ones((n, 3), "f4"), "a b")
    y = md.compile(lambda x: md.slice(x, "b", 3, 0) + 1, "p:2", layout)(x)
    assert y.numpy().shape == y.array.shape == (n, 0) and y.numpy().dtype == np.float32
    again = md.compile(lambda y: md.sum(y, "b"), "p:2", layout)(y)
    assert (again.numpy() == np.zeros(n)).all() and "float32[a=" in repr(y + 1)


@pytest.mark.parametrize("f", [lambda x: md.sum(x * x, "a"), md.compile(lambda x: md.sum(x * x, "a"), "p:4", "a:p")])
def test_a_tensor_of_64_bits_is_refused_where_jax_has_none(f: Callable[[Any], Any]) -> None:
    values = np.random.default_rng(0).normal(size=(6, 5))
    x = md.tensor(values, "a b")
    right = f(x).numpy()
    with jax.enable_x64(False), pytest.raises(md.ShapeError, match="float64, and JAX runs without 64-bit types now"):
        f(x)
    np.testing.assert_allclose(f(x).numpy(), right, rtol=1e-15)


def test_an_error_of_debug_nans_names_the_padded_dims() -> None:
    x = md.tensor(np.ones((5, 4), "f4"), "batch io")
    share = {layout: md.compile(lambda x: x / md.sum(x, "io"), "p:4", layout) for layout in ("batch:p", "io:p")}
    jax.config.update("jax_debug_nans", True)
    try:
        assert (share["io:p"](x).numpy() == 0.25).all()
        with pytest.raises(FloatingPointError) as caught:
            share["batch:p"](x)
        assert "meshdsl stores batch=5 with padding" in "".join(caught.value.__notes__)
    finally:
        jax.config.update("jax_debug_nans", False)
