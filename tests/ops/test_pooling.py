"""Random pools are those of lax: sizes, strides, dilations and paddings; their gradients too."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from tests.ops.test_conv import BATCH, DIFFERENTIATED, FAST, cotangent, numpy_pullback

POOLS = 120


@dataclass(frozen=True)
class Pool:
    """One pooling of x [a, b, c] over some of its dims."""

    name: str
    sizes: tuple[int, int, int]
    window: dict[str, int]
    stride: dict[str, int] | int | None
    padding: dict[str, tuple[int, int]] | str

    def call(self, x: md.Tensor) -> md.Tensor:
        return getattr(md, self.name)(x, self.window, stride=self.stride, padding=self.padding)

    def lax(self, x: Any) -> Any:
        """The same by lax, over an input that is padded (or cut) by hand."""
        size = [self.window.get(d, 1) for d in "abc"]
        given = self.stride if isinstance(self.stride, dict) else dict.fromkeys(self.window, self.stride)
        stride = [1 if d not in self.window else given.get(d, 1) or self.window[d] for d in "abc"]
        if isinstance(self.padding, str):
            pads = lax.padtype_to_pads(x.shape, size, stride, self.padding.upper())
        else:
            pads = [self.padding.get(d, (0, 0)) for d in "abc"]

        def reduced(x: Any, start: float, reduce: Any) -> Any:
            padded = [low + m + high for m, (low, high) in zip(x.shape, pads, strict=True)]
            if any(m < k for m, k in zip(padded, size, strict=True)):
                sizes = [max(0, (m - k) // s + 1) for m, k, s in zip(padded, size, stride, strict=True)]
                return jnp.zeros(sizes) + 0 * x.sum()
            x = lax.pad(x, jnp.asarray(start), [(low, high, 0) for low, high in pads])
            return lax.reduce_window(x, start, reduce, size, stride, "VALID")

        if self.name == "max_pool":
            return reduced(x, -np.inf, lax.max)
        return reduced(x, 0.0, lax.add) / reduced(jnp.ones_like(x), 0.0, lax.add)


def draw_pool(rng: random.Random) -> Pool:
    over = rng.sample("abc", rng.randint(1, 3))
    return Pool(
        name=rng.choice(["max_pool", "avg_pool"]),
        sizes=(rng.randint(1, 8), rng.randint(1, 8), rng.randint(1, 8)),
        window={d: rng.choice([1, 2, 3, 4, 9]) for d in over},
        stride=rng.choice([None, rng.randint(1, 4), {d: rng.randint(1, 4) for d in over[1:]}]),
        padding=rng.choice(["valid", "same", {d: (rng.randint(-3, 9), rng.randint(-3, 9)) for d in over}]),
    )


@pytest.mark.parametrize("block", range(POOLS // BATCH))
def test_random_pools_are_those_of_lax(block: int) -> None:
    rng = random.Random(block)
    cases = [draw_pool(rng) for _ in range(BATCH)]
    arrays = [np.random.default_rng(i).normal(size=case.sizes) for i, case in enumerate(cases)]

    def theirs(arrays: Any) -> Any:
        found = []
        for i, (case, x) in enumerate(zip(cases, arrays, strict=True)):
            y, pull = jax.vjp(case.lax, x) if i < DIFFERENTIATED else (case.lax(x), lambda ct: ())
            found.append([y, *pull(jnp.asarray(cotangent(y.shape)))])
        return found

    for case, x, wanted in zip(cases, arrays, jax.jit(theirs, compiler_options=FAST)(arrays), strict=True):
        for a, b in zip(numpy_pullback(case.call, [x], ["abc"]), wanted, strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=repr(case))


def shared_gradient(case: Pool, x: np.ndarray, ct: np.ndarray) -> np.ndarray:
    """The gradient of a maximum by its definition: each window's cotangent, divided equally among its ties.

    Nothing equals NaN, so in a window with NaN each element gets 0 * (ct / 0), which is NaN.
    """
    windows = dict(zip("abc", axes(case), strict=True))
    gradient = np.zeros_like(x)
    for at in np.ndindex(ct.shape):
        read = [
            [p for p in range(i * stride - low, i * stride - low + size) if 0 <= p < n]
            for i, n, (size, stride, low) in zip(at, x.shape, windows.values(), strict=True)
        ]
        if all(read):
            block = x[np.ix_(*read)]
            ties = (block == block.max()).astype(x.dtype)
            gradient[np.ix_(*read)] += ties * (ct[at] / ties.sum())
    return gradient


def axes(case: Pool) -> list[tuple[int, int, int]]:
    """Size, stride and low padding of each axis."""
    size = [case.window.get(d, 1) for d in "abc"]
    given = case.stride if isinstance(case.stride, dict) else dict.fromkeys(case.window, case.stride)
    stride = [1 if d not in case.window else given.get(d, 1) or case.window[d] for d in "abc"]
    if isinstance(case.padding, str):
        pads = lax.padtype_to_pads(case.sizes, size, stride, case.padding.upper())
    else:
        pads = [case.padding.get(d, (0, 0)) for d in "abc"]
    return [(k, s, low) for k, s, (low, _) in zip(size, stride, pads, strict=True)]


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
def test_ties_share_the_gradient_of_a_maximum_by_definition(odd: bool) -> None:
    rng, shared = random.Random(7), 0
    for i in range(60):
        case = dataclasses.replace(draw_pool(rng), name="max_pool")
        draw = np.random.default_rng(i)
        x = draw.integers(0, 3, case.sizes).astype(np.float64)
        if odd:
            x[draw.random(x.shape) < 0.1] = draw.choice([np.nan, np.inf, -np.inf])
        with np.errstate(all="ignore"):
            value, gradient = numpy_pullback(case.call, [x], ["abc"])
            right = shared_gradient(case, x, cotangent(value.shape))
        np.testing.assert_allclose(gradient, right, rtol=1e-12, atol=1e-12, err_msg=repr(case))
        shared += bool(np.any(right % 1))
    assert odd or shared > 20


def test_the_gradient_of_a_maximum_is_shared_among_ties() -> None:
    x = md.tensor([2.0, 2.0, 1.0, 5.0, 5.0], "length")
    grad = md.grad(lambda x: md.sum(md.max_pool(x, {"length": 3}, stride=2) * md.tensor([6.0, 8.0], "length")))(x)
    np.testing.assert_array_equal(grad.numpy(), [3, 3, 0, 4, 4])
    overlapping = md.grad(lambda x: md.sum(md.max_pool(x, {"length": 3}, stride=1, padding="same")))
    np.testing.assert_allclose(overlapping(md.tensor([0.0, 0.0, 0.0], "length")).numpy(), [5 / 6, 4 / 3, 5 / 6])
