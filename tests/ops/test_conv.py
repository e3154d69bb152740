"""Random convolutions are those of lax: sizes, strides, dilations, paddings and dim orders.

The values come from the NumPy kernels, so that these tests compare two implementations; the table in tests/laws/
compares each with the other, gradients included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl import backend
from meshdsl.control.autodiff import vjp_of_graph
from meshdsl.trace import trace
from tests.laws import run

CONVS, BATCH, DIFFERENTIATED = 320, 20, 5
FAST = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Conv:
    """One convolution with canonical sizes, and the storage orders in which meshdsl gets its operands."""

    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    base: tuple[int, ...]
    pads: tuple[tuple[int, int], ...] | str
    batch: int
    channels: int
    features: int
    group: int  # 0: without a dim of groups
    orders: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(f"s{i}", f"k{i}") for i in range(len(self.spatial))]

    def call(self, x: md.Tensor, w: md.Tensor) -> md.Tensor:
        def by_name(numbers: Sequence[Any]) -> dict[str, Any]:
            return {s: n for (s, _), n in zip(self.names, numbers, strict=True)}

        return md.conv(
            x,
            w,
            window=dict(self.names),
            out=self.orders[2],
            stride=by_name(self.stride),
            dilation=by_name(self.dilation),
            base_dilation=by_name(self.base),
            padding=self.pads if isinstance(self.pads, str) else by_name(self.pads),
        )

    def arrays(self, seed: int) -> list[np.ndarray]:
        """x [batch, group, channels, spatial] and w [group, features, channels, kernel] in the orders drawn."""
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(self.batch, max(self.group, 1), self.channels, *self.spatial))
        w = draw.normal(size=(max(self.group, 1), self.features, self.channels, *self.kernel))
        return [x, w]

    def ours(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The operands as meshdsl gets them."""
        found = []
        for x, names, order in zip(arrays, (self.x_names(), self.w_names()), self.orders, strict=False):
            there = [n for n in names if n != "group" or self.group]
            x = x if self.group else x.reshape([n for n, name in zip(x.shape, names, strict=True) if name != "group"])
            found.append(x.transpose([there.index(n) for n in order]))
        return found

    def x_names(self) -> list[str]:
        return ["batch", "group", "channels", *(s for s, _ in self.names)]

    def w_names(self) -> list[str]:
        return ["group", "features", "channels", *(k for _, k in self.names)]

    def lax(self, x: Any, w: Any) -> Any:
        """The result of lax [batch, group features, spatial], in the order of ours."""
        x = x.reshape(self.batch, -1, *self.spatial)
        w = w.reshape(-1, self.channels, *self.kernel)
        dilated = tuple((m - 1) * b + 1 for m, b in zip(self.spatial, self.base, strict=True))
        effective = tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        if isinstance(self.pads, str):  # lax's SAME does not count the holes of base dilation
            pads = lax.padtype_to_pads(dilated, effective, self.stride, self.pads.upper())
        else:
            pads = self.pads
        padded = [low + m + high for m, (low, high) in zip(dilated, pads, strict=True)]
        if any(m < k for m, k in zip(padded, effective, strict=True)):
            sizes = [max(0, (m - k) // s + 1) for m, k, s in zip(padded, effective, self.stride, strict=True)]
            y = jnp.zeros((x.shape[0], w.shape[0], *sizes)) + 0 * x.sum() * w.sum()
        else:
            pads = [(0, 0, 0)] * 2 + [(low, high, b - 1) for (low, high), b in zip(pads, self.base, strict=True)]
            x = lax.pad(x, jnp.zeros((), x.dtype), pads)
            y = lax.conv_general_dilated(
                x, w, self.stride, "VALID", None, self.dilation, feature_group_count=max(1, self.group)
            )
        names = ["batch", *(["group"] if self.group else []), "features", *(s for s, _ in self.names)]
        y = y.reshape(self.batch, *([self.group] if self.group else []), self.features, *y.shape[2:])
        return y.transpose([names.index(d) for d in self.orders[2]])


def draw_conv(rng: random.Random) -> Conv:
    n = rng.choice([1, 1, 2, 2, 2, 3])
    largest = 11 if n == 1 else 7 if n == 2 else 4

    def each(choices: Sequence[int]) -> tuple[int, ...]:
        return tuple(rng.choice(choices) for _ in range(n))

    group = rng.choice([0, 0, 1, 2, 3])
    extra = ["group"] if group else []
    s, k = [f"s{i}" for i in range(n)], [f"k{i}" for i in range(n)]

    def shuffled(names: list[str]) -> tuple[str, ...]:
        return tuple(rng.sample(names, len(names)) if rng.random() < 0.7 else names)

    return Conv(
        spatial=each(range(1, largest + 1)),
        kernel=each([1, 2, 3, 3, 4, 5] if n < 3 else [1, 2, 3]),
        stride=each([1, 1, 2, 3]),
        dilation=each([1, 1, 2, 3]),
        base=each([1, 1, 2, 3]),
        pads=rng.choice(["same", "valid", tuple((rng.randint(-2, 4), rng.randint(-2, 4)) for _ in range(n))]),
        batch=rng.randint(1, 3),
        channels=rng.randint(1, 3),
        features=rng.randint(1, 3),
        group=group,
        orders=(
            shuffled(["batch", *extra, "channels", *s]),
            shuffled([*extra, "features", "channels", *k]),
            shuffled(["batch", *extra, "features", *s]),
        ),
    )


def numpy_pullback(call: Callable[..., Any], arrays: Sequence[np.ndarray], orders: Sequence[Sequence[str]]) -> Any:
    """The value and the gradients (for a cotangent of ones times place) by NumPy kernels."""
    shapes = [[md.Dim(n, m) for n, m in zip(o, x.shape, strict=True)] for o, x in zip(orders, arrays, strict=True)]
    specs = [md.spec(shape, "float64") for shape in shapes]
    graph, _, _ = trace(call, specs)
    joint, _, _ = vjp_of_graph(graph, [True] * len(specs), [True])
    sizes = [d.size for d in graph.outs[0].dims]
    return run(joint, [*arrays, cotangent(sizes)], backend.NumPy)


def cotangent(sizes: Sequence[int]) -> np.ndarray:
    return np.cos(np.arange(np.prod(sizes, dtype=int))).reshape(sizes)


@pytest.mark.parametrize("block", range(CONVS // BATCH))
def test_random_convolutions_are_those_of_lax(block: int) -> None:
    rng = random.Random(block)
    cases = [draw_conv(rng) for _ in range(BATCH)]
    arrays = [case.arrays(i) for i, case in enumerate(cases)]

    def theirs(arrays: Any) -> Any:  # compiling takes the time, so only the first few are differentiated
        found = []
        for i, (case, (x, w)) in enumerate(zip(cases, arrays, strict=True)):
            y, pull = jax.vjp(case.lax, x, w) if i < DIFFERENTIATED else (case.lax(x, w), lambda ct: ())
            found.append([y, *pull(jnp.asarray(cotangent(y.shape)))])
        return found

    for case, xs, wanted in zip(cases, arrays, jax.jit(theirs, compiler_options=FAST)(arrays), strict=True):
        y, *grads = numpy_pullback(case.call, case.ours(xs), case.orders[:2])
        for a, b in zip([y, *grads], [wanted[0], *case.ours([np.asarray(g) for g in wanted[1:]])], strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11, err_msg=repr(case))
