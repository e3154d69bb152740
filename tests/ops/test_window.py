"""Windows against lax: convolutions and pools of random sizes, strides, dilations, paddings and dim orders.

The values come from the NumPy kernels, so that these tests compare two implementations; the table in tests/laws/
compares each with the other, gradients included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl import backend
from meshdsl.ops.window import Window, transposed
from meshdsl.trace import trace
from meshdsl.transforms.autodiff import vjp_of_graph
from tests.laws import run

CONVS, POOLS, BATCH, DIFFERENTIATED = 320, 120, 20, 5
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
    joint, _, _ = vjp_of_graph(graph, [True] * len(specs))
    sizes = [d.size for d in graph.outs[0].shape]
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


def test_a_window_reads_the_positions_it_says_and_its_transpose_reads_back() -> None:
    """Every (output, place, input) of a window, by definition; the transposed one has the same, turned round."""
    rng = random.Random(0)

    def reads(v: Window, n: int) -> set[tuple[int, int, int]]:
        found = set()
        for o in range(v.out_size(n)):
            for k in range(v.size):
                p = o * v.stride - v.low + k * v.dilation
                if p % v.base_dilation == 0 and 0 <= p // v.base_dilation < n:
                    found.add((o, k, p // v.base_dilation))
        return found

    for _ in range(500):
        size, stride, dilation, base = (rng.randint(1, 4) for _ in range(4))
        v = Window("a", "b", size, stride, dilation, base, rng.randint(-3, 5), rng.randint(-3, 5))
        n = rng.randint(0, 9)
        m = v.out_size(n)
        back = transposed(v, n, m)
        assert (back.dim, back.out_dim, back.out_size(m)) == ("b", "a", n)
        assert reads(back, m) == {(i, v.size - 1 - k, o) for o, k, i in reads(v, n)}
        forth = transposed(back, m, n)  # the same window, but for padding at the end that no window reaches
        assert (forth.out_size(n), reads(forth, n)) == (m, reads(v, n))


def test_the_gradient_of_a_maximum_is_shared_among_ties() -> None:
    x = md.tensor([2.0, 2.0, 1.0, 5.0, 5.0], "length")
    grad = md.grad(lambda x: md.sum(md.max_pool(x, {"length": 3}, stride=2) * md.tensor([6.0, 8.0], "length")))(x)
    np.testing.assert_array_equal(grad.numpy(), [3, 3, 0, 4, 4])
    overlapping = md.grad(lambda x: md.sum(md.max_pool(x, {"length": 3}, stride=1, padding="same")))
    np.testing.assert_allclose(overlapping(md.tensor([0.0, 0.0, 0.0], "length")).numpy(), [5 / 6, 4 / 3, 5 / 6])


def test_infinities_and_nan_are_values_like_others_and_padding_is_none() -> None:
    x = md.tensor([-np.inf, np.nan, 1.0, np.inf, -np.inf], "length")
    pooled = md.max_pool(x, {"length": 2}, stride=1, padding={"length": (2, 2)})
    np.testing.assert_array_equal(pooled.numpy(), [-np.inf, -np.inf, np.nan, np.nan, np.inf, np.inf, -np.inf, -np.inf])
    lowest = md.tensor([-np.inf, -np.inf], "length")
    grad = md.grad(lambda x: md.sum(md.max_pool(x, {"length": 4}, padding={"length": (1, 1)})))(lowest)
    np.testing.assert_array_equal(grad.numpy(), [0.5, 0.5])  # padding is -inf too, and takes no share
    means = md.avg_pool(md.tensor([1.0, 3.0], "length"), {"length": 2}, stride=2, padding={"length": (3, 0)})
    np.testing.assert_array_equal(means.numpy(), [np.nan, 1.0])
    assert md.avg_pool(md.tensor([1, 2, 4, 9], "length"), {"length": 2}).numpy().tolist() == [1.5, 6.5]
    whole = md.max_pool(md.tensor([3, -2, -7], "length"), {"length": 2}, padding={"length": (2, 0)})
    assert whole.numpy().tolist() == [np.iinfo(whole.dtype).min, 3]


def test_a_result_without_windows_is_empty_and_has_no_gradient() -> None:
    x, w = md.tensor([1.0, 2.0], "length"), md.tensor([1.0, 1.0, 1.0], "kernel")

    def total(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.sum(md.conv(x, w, {"length": "kernel"}, "length", padding="valid"))

    assert md.conv(x, w, {"length": "kernel"}, "length", padding="valid").shape == (0,)
    assert [g.numpy().tolist() for g in md.grad(total, argnums=(0, 1))(x, w)] == [[0, 0], [0, 0, 0]]
    assert md.max_pool(x, {"length": 3}).shape == (0,)
    assert md.grad(lambda x: md.sum(md.max_pool(x, {"length": 3})))(x).numpy().tolist() == [0, 0]


def test_gradients_of_gradients() -> None:
    """By central differences of the first gradient, which the laws compare with JAX's."""
    draw = np.random.default_rng(0)
    x = md.tensor(draw.normal(size=(7, 2)), "length channels")
    w = md.tensor(draw.normal(size=(3, 2, 2)), "kernel channels features")

    def f(x: md.Tensor) -> md.Tensor:
        y = md.conv(
            x, w, {"length": "kernel"}, "features length", stride=2, base_dilation=2, padding={"length": (2, 1)}
        )
        y = md.max_pool(md.tanh(y), {"length": 3}, stride=1) * md.avg_pool(md.square(y), {"length": 3}, stride=1)
        return md.sum(y)

    along = md.tensor(draw.normal(size=(7, 2)), "length channels")
    second = md.grad(lambda x: md.sum(md.grad(f)(x) * along))(x).numpy()
    step = 1e-5
    differences = (md.grad(f)(x + step * along).numpy() - md.grad(f)(x - step * along).numpy()) / (2 * step)
    np.testing.assert_allclose(second, differences, rtol=1e-6, atol=1e-7)


def test_no_window_is_a_product() -> None:
    x, w = md.tensor([[1.0, 2.0]], "batch io"), md.tensor([[1.0], [3.0]], "io features")
    assert md.conv(x, w, window={}, out="batch features").numpy().tolist() == [[7.0]]
    with pytest.raises(md.ShapeError, match="would lose dim 'batch'"):
        md.conv(x, w, window={}, out="features")


X, W = md.tensor(np.ones((2, 5, 3)), "batch length io"), md.tensor(np.ones((3, 3, 4)), "kernel io features")
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (lambda: md.conv(X, W, {"lenght": "kernel"}, "batch"), "no dim to slide over 'lenght' here"),
    "kernel": (lambda: md.conv(X, W, {"length": "k"}, "batch"), "no kernel dim 'k' here"),
    "lost": (lambda: md.conv(X, W, {"length": "kernel"}, "length features"), "would lose dim 'batch'"),
    "unslid": (lambda: md.conv(X, W, {"length": "kernel"}, "batch features"), "would lose dim 'length'"),
    "extra": (lambda: md.conv(X, W, {"length": "kernel"}, "batch length features kernel"), "no output dim 'kernel'"),
    "both": (lambda: md.conv(X, W, {"length": "io"}, "batch length"), "dim 'io' is part of the window 'length': 'io'"),
    "twice": (lambda: md.conv(X, W, {"length": "kernel", "batch": "kernel"}, "length"), "each needs its own"),
    "made": (lambda: md.conv(X, W, {"length": ("kernel", "batch")}, "batch features"), "makes dim 'batch' from"),
    "mapping": (lambda: md.conv(X, W, cast(Any, "length"), "batch"), "for example window={'height': 'kh'}"),
    "bool": (lambda: md.conv(X > 0, W > 0, {"length": "kernel"}, "batch length features"), "takes two tensors of"),
    "stride": (lambda: md.conv(X, W, {"length": "kernel"}, "batch", stride=0), "whole numbers from 1 for its stride"),
    "stray": (lambda: md.max_pool(X, {"length": 2}, stride={"io": 2}), "a stride for dim 'io', which is not"),
    "padding": (lambda: md.avg_pool(X, {"length": 2}, padding="SAME"), "md.avg_pool pads with 'same', 'valid'"),
    "pair": (lambda: md.max_pool(X, {"length": 2}, padding={"length": 1}), "got 1 for dim 'length'"),
    "window": (lambda: md.max_pool(X, {"length": 0}), "whole numbers from 1 for its window"),
    "order": (lambda: md.max_pool(X > 0, {"length": 2}), "needs numbers that have an order, got bool"),
    "sizes": (lambda: md.conv(X, md.slice(W, "io", 0, 2), {"length": "kernel"}, "batch length features"), "two sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_says_why(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(md.ShapeError) as caught:
        call()
    assert message in str(caught.value)
    assert "test_window.py" in str(caught.value)
