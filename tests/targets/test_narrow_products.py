"""A product that sums over its leading dims has its narrow operand first: the TPU compiler copies a wide one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from meshdsl.targets.tpu.emission import EMISSION


@pytest.mark.parametrize(
    ("formula", "x", "y", "first"),
    [
        pytest.param("abc,abd->cd", (2, 8, 256), (2, 8, 16), (2, 8, 16), id="the gradient of narrow weights"),
        pytest.param("abc,abde->cde", (2, 8, 256), (2, 8, 2, 64), (2, 8, 2, 64), id="two dims of one tile together"),
        pytest.param("abc,abd->dc", (2, 8, 256), (2, 8, 16), (2, 8, 16), id="stored the other way round"),
        pytest.param("abc,abd->cd", (2, 8, 256), (2, 8, 129), (2, 8, 256), id="more than a tile"),
        pytest.param("abc,abd->cd", (2, 8, 128), (2, 8, 16), (2, 8, 128), id="both narrow"),
        pytest.param("abd,abc->dc", (2, 8, 16), (2, 8, 256), (2, 8, 16), id="the narrow one first already"),
        pytest.param("abc,cd->abd", (2, 8, 256), (256, 16), (2, 8, 256), id="a sum over the last dim"),
        pytest.param("abc,abd->acd", (2, 8, 256), (2, 8, 16), (2, 8, 256), id="a batch of products"),
    ],
)
def test_the_first_operand(formula: str, x: tuple[int, ...], y: tuple[int, ...], first: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    arrays = draw.normal(size=x).astype(np.float32), draw.normal(size=y).astype(np.float32)
    text = jax.jit(lambda a, b: EMISSION.xp.einsum(formula, a, b, dtype=np.dtype(np.float32))).lower(*arrays).as_text()
    product = next(line for line in text.splitlines() if "dot_general" in line)
    assert f": (tensor<{'x'.join(map(str, first))}xf32>" in product, product
    got = EMISSION.xp.einsum(formula, *arrays, dtype=np.dtype(np.float32))
    np.testing.assert_allclose(got, np.einsum(formula, *arrays), rtol=1e-4, atol=1e-4)
