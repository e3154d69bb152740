"""NaN and infinity in any shard give what they give on one device, forward and backward.

Each value is put into each block in turn, alone and together with another one in another block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from tests.laws import run
from tests.lowering.test_layout_law import placed

NAN, INF = np.nan, np.inf  # -NAN has its sign bit set, as inf - inf has on x86
VALUES = [(NAN,), (-NAN,), (INF,), (-INF,), (INF, -INF), (INF, INF), (NAN, INF), (-INF, -NAN)]
LAYOUTS = ["a:x", "b:x", "a:y,x", "a:x; b:y", "b:x,y"]
MESH = "x:3 y:2"
SHAPE = (7, 5)  # no mesh axis divides it


def normed(norm: Callable[..., md.Tensor], over: Any) -> Callable[[md.Tensor], md.Tensor]:
    """A norm without parameters."""
    options = {"scale": False} | ({"bias": False} if norm is md.nn.layer_norm else {})
    wide = md.nn.Precision(param="float64", compute="float64", reduce="float64")
    return lambda x: md.model(lambda x: norm(x, over, precision=wide, **options))({}, x)


def loss(**options: Any) -> Callable[[md.Tensor], md.Tensor]:
    return lambda x: md.nn.softmax_cross_entropy(
        x, md.iota(next(d for d in x.dims if d.name == "b")) % 7, "a", **options
    )


def along(name: str, over: Any) -> Callable[[md.Tensor], md.Tensor]:
    """A public reduction or normalisation along one dim, or over all."""
    return lambda x: getattr(md, name)(x, over)


def slopes_of_kernel(x: md.Tensor) -> md.Tensor:
    """The gradient of a kernel slid over x: a convolution by a cotangent that is split like x, and unevenly."""
    kernel = md.tensor([1.0, -2.0, 3.0], "k")

    def total(w: md.Tensor) -> md.Tensor:
        y = md.conv(x, md.cast(w, x.dtype), {"a": "k"}, "a b")
        return md.sum(y * (md.iota(y.dims[0], y.dtype) + 1))

    return md.grad(total)(kernel)


FUNCTIONS: dict[str, Callable[[md.Tensor], Any]] = {
    **{name: along(name, "a") for name in ("sum", "mean", "max", "min", "prod", "var")},
    **{f"{name}_all": along(name, None) for name in ("sum", "mean", "max", "min", "var")},
    **{name: along(name, "a") for name in ("softmax", "log_softmax", "logsumexp", "cumsum")},
    "cumsum_back": lambda x: md.cumsum(x, "a", exclusive=True, reverse=True),
    "argmax": lambda x: (md.argmax(x, "a"), md.argmin(x, "a")),
    "any": lambda x: (md.any(x > 0, "a"), md.all(x > 0, "a"), md.any(md.isnan(x), "a"), md.all(md.isfinite(x))),
    "sort": lambda x: (md.sort(x, "a"), md.argsort(x, "a")),
    "top_k": lambda x: md.top_k(x, "a", md.Dim("k", 3)),
    "top_k_all": lambda x: md.top_k(x, "a", md.Dim("k", SHAPE[0])),
    "conv_kernel": lambda x: slopes_of_kernel(x),
    "max_pool": lambda x: md.max_pool(x, {"a": 3}, padding={"a": (1, 1)}, stride={"a": 2}),
    "avg_pool": lambda x: md.avg_pool(x, {"a": 3}, padding={"a": (1, 1)}, stride={"a": 2}),
    "einsum": lambda x: md.einsum(x, x, out="b"),
    "norm_l2": lambda x: md.sqrt(md.sum(md.square(x), "a")),
    "layer_norm": normed(md.nn.layer_norm, "a"),
    "rms_norm": normed(md.nn.rms_norm, "a"),
    "layer_norm_both": normed(md.nn.layer_norm, "a b"),
    "cross_entropy": loss(),
    "smoothed": loss(z_loss=1e-3, label_smoothing=0.1),
    "take": lambda x: md.take(x, md.tensor([0, 3, 6, 9], "n"), "a", drop=True),
    "take_in_order": lambda x: md.take(x, md.tensor([3, 0, 6, 1, 1, 5, 9], "a"), "a", drop=True),
    "where": lambda x: md.where(md.isfinite(x), x, 0),
    "concat": lambda x: md.concat([md.roll(x, "a", 2), md.pad(x, "a", 1, 1)], "a"),
    "reshape": lambda x: md.flatten(x, "a b", "n"),
    "unstack": lambda x: md.unstack(x, "a")[3],
}


def with_gradient(f: Callable[[md.Tensor], Any]) -> Callable[[md.Tensor], Any]:
    """The results and, of those that are floats, the gradient of their sum with uneven weights."""

    def leaves(x: md.Tensor) -> list[md.Tensor]:
        made = f(x)
        return list(made) if isinstance(made, tuple | list) else [made]

    def total(x: md.Tensor) -> Any:
        outs, sum_of = leaves(x), md.tensor(np.float64(0))
        for y in outs:
            if y.dtype.kind == "f":
                for d in y.dims:
                    y = y * (md.iota(d, y.dtype) + 1)
                sum_of = sum_of + md.sum(y)
        return sum_of, outs

    return md.value_and_grad(total, has_aux=True)


def inputs() -> list[np.ndarray]:
    """Every value, or pair of values, in different places of one row and of different rows."""
    base, found = np.random.default_rng(0).normal(size=SHAPE), []
    one, two = [[(0, 0)], [(2, 0)], [(3, 1)], [(6, 4)]], [[(0, 0), (6, 4)], [(2, 0), (0, 0)], [(3, 1), (0, 1)]]
    for values in VALUES:
        for at in one if len(values) == 1 else two:
            x = base.copy()
            for place, value in zip(at, values, strict=True):
                x[place] = value
            found.append(x)
    return found


INPUTS = inputs()


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    return got.dtype == wanted.dtype and np.allclose(got, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_shard_may_hold_it(name: str) -> None:
    spec = md.spec([md.Dim("a", SHAPE[0]), md.Dim("b", SHAPE[1])], "float64")
    graph = md.compile(with_gradient(FUNCTIONS[name]), "", "").graph(spec)
    with np.errstate(all="ignore"):
        wanted = [run(graph, [x], backend.NumPy) for x in INPUTS]
    first = list(FUNCTIONS).index(name)
    for layout in (LAYOUTS[(first + i) % len(LAYOUTS)] for i in range(3)):  # all of them, over the functions
        program = md.compile(with_gradient(FUNCTIONS[name]), MESH, layout).program(spec)
        for x, right in zip(INPUTS, wanted, strict=True):
            wrong = [k for k, (a, b) in enumerate(zip(md.simulate(program, x), right, strict=True)) if not same(a, b)]
            assert not wrong, f"results {wrong} of {name} differ under {layout}:\n{x}"


@pytest.mark.parametrize(
    "name", ["max", "min", "logsumexp", "softmax", "argmax", "sort", "layer_norm", "smoothed", "max_pool"]
)
def test_devices_do_as_the_simulation(name: str) -> None:
    spec = md.spec([md.Dim("a", SHAPE[0]), md.Dim("b", SHAPE[1])], "float64")
    step = md.compile(with_gradient(FUNCTIONS[name]), "x:4 y:2", "a:x; b:y")
    program = step.program(spec)
    for x in INPUTS[::4]:
        (total, outs), gradient = step(*placed(program, [x]))
        for got, right in zip([total, *outs, gradient], md.simulate(program, x), strict=True):
            assert same(got.numpy(), right), f"{name}:\n{x}"
