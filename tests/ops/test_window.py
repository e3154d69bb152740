"""Windows: the positions they read, their transposes, and values at their edges."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ops.window import Window, transposed


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


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("layout", ["kernel:p", "out:p", "kernel:p; out:q", "kernel:q; batch:p"])
def test_a_convolution_of_no_elements_is_zero_under_every_layout(layout: str, size: int) -> None:
    """Also where the kernel is NaN, and split unevenly; and so is the gradient."""
    x = md.tensor(np.zeros((0, 2), np.float32), "length batch")
    w = md.tensor(np.full((size, 2), np.nan, np.float32), "kernel batch")

    def results(x: md.Tensor, w: md.Tensor) -> Any:
        def conv(w: md.Tensor) -> md.Tensor:
            return md.conv(x, w, {"length": ("kernel", "out")}, "out", padding={"length": (4, 4)})

        return conv(w), md.grad(lambda w: md.sum(md.square(conv(w))))(w)

    compiled = md.compile(results, "p:2 q:2", layout)
    for y in (*compiled(x, w), *md.simulate(compiled.program(x, w), x, w), *results(x, w)):
        np.testing.assert_array_equal(np.asarray(y), 0)


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


@pytest.mark.parametrize("layout", ["a:p", "b:p", "a:p; b:q", "a:p,q", "k:q; b:p"])
def test_windows_may_exchange_the_names_of_two_dims(layout: str) -> None:
    rng = np.random.default_rng(0)
    x, w = md.tensor(rng.integers(-2, 3, (5, 6)), "a b"), md.tensor(rng.integers(-2, 3, (2, 3)), "k l")

    def f(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.conv(x, w, {"b": ("l", "a"), "a": ("k", "b")}, "b a")

    plain = md.conv(x, w, {"a": "k", "b": "l"}, "a b").numpy()
    np.testing.assert_array_equal(md.compile(f, "p:2 q:2", layout)(x, w).numpy(), plain)


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
