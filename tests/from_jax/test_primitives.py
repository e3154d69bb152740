"""Every primitive that is imported: its values and gradients beside JAX's, on one device and split over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from tests.from_jax.reference import ONE, check_gradients, check_values
from tests.joined import in_groups

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.2, 0.9, (4, 6)), jnp.float32)
N = jnp.asarray(RNG.integers(-9, 9, (4, 6)), jnp.int32)
PLACES = jnp.asarray([[1, 0, 3], [2, 2, 5], [0, 9, -1], [5, 4, 3]], jnp.int32)
IMAGE = jnp.asarray(RNG.uniform(-1, 1, (4, 6, 7, 2)), jnp.float32)
KERNEL = jnp.asarray(RNG.uniform(-1, 1, (3, 2, 2, 5)), jnp.float32)
SQUARE = jnp.asarray(RNG.uniform(-1, 1, (4, 3, 3)), jnp.float32) + 3 * jnp.eye(3)
HWIO = ("NHWC", "HWIO", "NHWC")


def conv(x: Any, w: Any, stride: int = 1, padding: str = "SAME", **options: Any) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=HWIO, **options)


LAYOUTS = (ONE, ("rows:2 cols:2", "batch:rows; io:cols"))
ROWS = ("rows:2", "batch:rows")
NAMES = {"x": "batch io"}


def _of(module: Any, name: str) -> Callable[[Any], Any]:
    return lambda x: getattr(module, name)(x)


ON_REALS: dict[str, Callable[[Any], Any]] = (
    {
        name: _of(jnp, name)
        for name in (
            "abs",
            "arccos",
            "arcsin",
            "arctan",
            "cbrt",
            "ceil",
            "cos",
            "cosh",
            "exp",
            "exp2",
            "expm1",
            "floor",
            "log",
            "log1p",
            "log2",
            "negative",
            "rint",
            "sign",
            "sin",
            "sinh",
            "sqrt",
            "square",
            "tan",
            "tanh",
            "reciprocal",
            "sinc",
            "isfinite",
            "cumsum",
            "cumprod",
            "sort",
            "argsort",
            "argmax",
            "flip",
            "trace",
        )
    }
    | {
        name: _of(jax.nn, name)
        for name in (
            "relu",
            "relu6",
            "gelu",
            "silu",
            "softplus",
            "elu",
            "selu",
            "leaky_relu",
            "sigmoid",
            "log_sigmoid",
            "softmax",
            "log_softmax",
            "hard_tanh",
            "glu",
            "standardize",
            "celu",
            "mish",
        )
    }
    | {
        "logsumexp": lambda x: jax.nn.logsumexp(x, 1),
        "erf": lambda x: jax.scipy.special.erf(x),
        "erfc": lambda x: jax.scipy.special.erfc(x),
        "erf_inv": lambda x: jax.scipy.special.erfinv(x),
        "lgamma": lambda x: jax.scipy.special.gammaln(x),
        "digamma": lambda x: jax.scipy.special.digamma(x),
        "rsqrt": lambda x: lax.rsqrt(x),
        "stop_gradient": lambda x: x * lax.stop_gradient(x),
        "power": lambda x: x**3 + x**1.7 + 2.0**x,
        "clip": lambda x: jnp.clip(x, 0.3, 0.7),
        "clamp": lambda x: lax.clamp(jnp.float32(0.3), x, jnp.float32(0.7)),
        "where": lambda x: jnp.where(x > 0.5, x, 2 * x),
        "mod": lambda x: x % 0.3,
        "arctan2": lambda x: jnp.arctan2(x, 1 - x),
        "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32),
        "cast": lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.float32),
        "to_int": lambda x: (10 * x).astype(jnp.int32),
        "complex": lambda x: jnp.abs(jnp.exp(1j * x)),
        "nextafter": lambda x: jnp.nextafter(x, jnp.float32(1)),
        "max": lambda x: x.max(0),
        "min": lambda x: x.min((0, 1)),
        "prod": lambda x: x.prod(1),
        "var": lambda x: x.var(0),
        "all": lambda x: (x > 0.3).all(1),
        "any": lambda x: (x > 0.8).any(),
        "norm": lambda x: jnp.linalg.norm(x),
        "median": lambda x: jnp.median(x, 1),
        "top_k": lambda x: lax.top_k(x, 3),
        "transpose": lambda x: x.T @ x,
        "reshape": lambda x: x.reshape(2, 2, 3, 2).sum(2),
        "transposing reshape": lambda x: lax.reshape(x, (3, 8), (1, 0)).sum(1),
        "flat": lambda x: x.reshape(-1)[::2],
        "crossing": lambda x: x.reshape(3, 8).sum(1),
        "pad": lambda x: jnp.pad(x, ((1, 0), (2, 3))),
        "pad_inner": lambda x: lax.pad(x, jnp.float32(0.5), ((0, 0, 1), (-1, 2, 0))),
        "roll": lambda x: jnp.roll(x, 2, 1),
        "concatenate": lambda x: jnp.concatenate([x, 2 * x[:, :2]], 1),
        "stack": lambda x: jnp.stack([x, x * x], 1),
        "tile": lambda x: jnp.tile(x, (2, 3)),
        "repeat": lambda x: jnp.repeat(x, 2, 1),
        "split": lambda x: jnp.split(x, 3, 1),
        "split_uneven": lambda x: jnp.split(x, [1, 3], 1),
        "slice": lambda x: x[1:3, ::2],
        "one_row": lambda x: x[1] + x[-1],
        "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(2)), (2, 3)),
        "dynamic_update": lambda x: lax.dynamic_update_slice(x, 2 * x[:2, :1], (jnp.int32(3), jnp.int32(1))),
        "gather": lambda x: x[:, jnp.array([0, 2, 2])],
        "take": lambda x: jnp.take(x, jnp.array([0, 9, -2]), 1),
        "clipped": lambda x: jnp.take(x, jnp.array([0, 9, -2]), 1, mode="clip"),
        "points": lambda x: x[jnp.array([0, 1]), jnp.array([3, 3])],
        "at_each": lambda x: jax.vmap(lambda i: lax.dynamic_index_in_dim(x, i, 0, False))(jnp.array([0, 9, 2])),
        "along": lambda x: jnp.take_along_axis(x, PLACES % 6, 1),
        "set": lambda x: x.at[:, 2].set(7.0),
        "set_many": lambda x: x.at[:, jnp.array([2, 0])].set(7.0),
        "add_at": lambda x: x.at[:, jnp.array([2, 2])].add(x[:, :2]),
        "add_out": lambda x: x.at[jnp.array([1, 9])].add(1.0),
        "max_at": lambda x: x.at[:, jnp.array([2, 2])].max(0.8),
        "mul_at": lambda x: x.at[jnp.array([0, 2])].multiply(3.0),
        "set_repeated": lambda x: x.at[jnp.array([1, 3, 1])].set(x[1:] ** 2),
        "set_out": lambda x: x.at[jnp.array([1, 9])].set(1.0),
        "min_repeated": lambda x: x.at[jnp.array([1, 3, 1])].min(x[1:] - 0.5),
        "order": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x),
        "one_hot": lambda x: jax.nn.one_hot((x * 5).astype(int), 5) @ jnp.arange(5.0),
        "iota": lambda x: x + jnp.arange(6) - lax.broadcasted_iota(x.dtype, (4, 6), 0),
        "einsum": lambda x: jnp.einsum("ab,cb,cd->ad", x, x, x),
        "outer": lambda x: jnp.einsum("ab,ac->abc", x, x),
        "matmul": lambda x: x @ jnp.ones((6, 3)) @ jnp.ones((3, 1)),
        "batched": lambda x: jnp.einsum("ab,ab->a", x, x),
        "squeeze": lambda x: (x[:, None] * x[None, :1]).squeeze(),
        "expand": lambda x: x[:, None, :, None] * jnp.ones((1, 3, 1, 2)),
        "tril": lambda x: jnp.tril(x, 1),
        "triu": lambda x: jnp.triu(x),
        "diag": lambda x: jnp.diag(x[:, :4]),
        "cummax": lambda x: lax.cummax(x, 1),
        "logcumsumexp": lambda x: lax.cumlogsumexp(x, 1),
        "sort_two": lambda x: lax.sort((x, x * x), num_keys=1),
        "sort_keys": lambda x: lax.sort((jnp.round(x), x), num_keys=2),
        "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
        "map": lambda x: lax.map(lambda r: r * r.sum(), x),
        "scan": lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), x[0], x),
        "reverse_scan": lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(6), x, reverse=True),
        "one_trip": lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x[:1]),
        "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.9 + i, x),
        "while": lambda x: lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x),
        "cond": lambda x: lax.cond(x.sum() > 3, jnp.sin, jnp.cos, x),
        "switch": lambda x: lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.tanh], x),
        "vmap": lambda x: jax.vmap(lambda r: jnp.dot(r, r))(x),
        "associative": lambda x: lax.associative_scan(jnp.add, x, axis=1),
        "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x),
        "jacobian": lambda x: jax.jvp(jnp.tanh, (x,), (x,))[1],
        "hypot": lambda x: jnp.hypot(x, 1),
        "logaddexp": lambda x: jnp.logaddexp(x, 2 * x),
        "xlogy": lambda x: jax.scipy.special.xlogy(x, x),
        "quantile": lambda x: jnp.quantile(x, 0.3, axis=1),
        "constant": lambda x: x + jnp.asarray(np.arange(24.0, dtype=np.float32).reshape(4, 6)),
        "weights": lambda x: jnp.average(x, 1, jnp.arange(6.0)),
        "normal": lambda x: x + jax.random.normal(jax.random.key(3), (4, 6)),
        "keys": lambda x: x * jax.vmap(lambda k: jax.random.uniform(k, (6,)))(jax.random.split(jax.random.key(0), 4)),
        "fold_in": lambda x: (
            x
            + jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(jax.random.PRNGKey(1), i)))(jnp.arange(4))[
                :, None
            ]
        ),
        "clone": lambda x: x * jax.random.uniform(jax.random.clone(jax.random.key(1)), (6,)),
        "permutation": lambda x: jax.random.permutation(jax.random.key(1), x),
        "categorical": lambda x: jax.random.categorical(jax.random.key(2), x),
        "max_pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"),
        "sum_pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 2), "SAME"),
        "dot_attention": lambda x: jax.nn.dot_product_attention(
            x.reshape(1, 4, 2, 3), x.reshape(1, 4, 2, 3), x.reshape(1, 4, 2, 3), is_causal=True
        ),
    }
)
NO_GRADIENT = {
    "bitcast",
    "to_int",
    "isfinite",
    "argsort",
    "argmax",
    "all",
    "any",
    "while",
    "sign",
    "rint",
    "ceil",
    "floor",
    "nextafter",
    "integers",
    "categorical",
    "mul_at",
}


def loss(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A scalar in which every element of every floating result counts differently."""

    def total(x: Any) -> Any:
        floats = [y for y in jax.tree.leaves(f(x)) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.sum(y.astype(jnp.float32) * (1 + jnp.arange(y.size).reshape(y.shape) / 7)) for y in floats)

    return total


VALUES = in_groups(ON_REALS, X)
LOSSES = {name: loss(f) for name, f in ON_REALS.items() if name not in NO_GRADIENT}
GRADIENTS = in_groups({name: jax.value_and_grad(f) for name, f in LOSSES.items()}, X)


@pytest.mark.parametrize("name", ON_REALS)
def test_values(name: str) -> None:
    at_most = 1e-2 if name == "cast" else 1e-5
    check_values(ON_REALS[name], [X], LAYOUTS, at_most, wanted=VALUES(name), names=NAMES)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    at_most = 1e-2 if name == "cast" else 1e-4
    check_gradients(LOSSES[name], [X], [ROWS], at_most, wanted=GRADIENTS(name), names=NAMES)


ON_IMAGES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: conv(x, KERNEL),
    "strided": lambda x: conv(x, KERNEL, 2, "VALID"),
    "dilated": lambda x: conv(x, KERNEL, rhs_dilation=(2, 2)),
    "transposed": lambda x: lax.conv_transpose(x, KERNEL, (2, 2), "SAME", dimension_numbers=HWIO),
    "depthwise": lambda x: conv(x, KERNEL[:, :, :1, :2], 2, feature_group_count=2),
    "grouped": lambda x: conv(x, KERNEL[:, :, :1, :4], feature_group_count=2),
    "groups of the batch": lambda x: conv(x, KERNEL[..., :4], 2, batch_group_count=2),
}


@pytest.mark.parametrize("name", ON_IMAGES)
def test_convolutions(name: str) -> None:
    names = {"x": "batch height width channels"}
    layout = ("rows:2 cols:2", "batch:rows; channels:cols")
    check_gradients(loss(ON_IMAGES[name]), [IMAGE], [layout], names=names)


def test_a_grouped_convolution_is_split_over_groups() -> None:
    x, k = jnp.tile(IMAGE, 4) * jnp.arange(1, 9), jnp.concatenate([KERNEL, KERNEL[..., :3] ** 2], 3)

    def f(k: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(conv(x, k, 2, feature_group_count=4)))

    names = {"x": "batch height width channels", "k": ". . . features"}
    m = check_gradients(f, [k, x], [("rows:2 cols:2", "batch:rows; channels:cols; features:cols")], 1e-4, names=names)
    assert m.dims["features"] == 8 and len(m.dims) == 8, m
    (sent,) = md.compile(m, "cols:4", "channels:cols; features:cols").program(*m.specs).collectives
    assert sent.shape == () and "no operation here" not in str(m)
    check_values(jax.grad(f, (0, 1)), [k, x], [("rows:2", "batch:rows")], names=names)


def test_a_depthwise_convolution_is_split_over_channels() -> None:
    m = md.from_jax(ON_IMAGES["depthwise"], IMAGE, names={"x": "batch height width channels"})
    assert md.eval_shape(m, *m.specs).dims[-1].name == "channels" and "no operation here" not in str(m)
    assert not md.compile(m, "cols:2", "channels:cols").program(*m.specs).collectives


@pytest.mark.parametrize("f", [jnp.linalg.cholesky, jnp.linalg.inv, lambda x: jnp.linalg.qr(x)[1], jnp.linalg.det])
def test_linear_algebra(f: Callable[[Any], Any]) -> None:
    check_gradients(loss(lambda x: f(x @ jnp.swapaxes(x, 1, 2))), [SQUARE], [ROWS], 1e-3, names={"x": "batch . ."})
