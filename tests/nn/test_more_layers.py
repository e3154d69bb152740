"""Convolution, batch and group norm, recurrent and state-space layers: plain formulas, and the same under layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md

RNG = np.random.default_rng(0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def made(f: Callable[..., Any], *inputs: Any, seed: int = 0) -> tuple[md.Model, dict[str, md.Tensor]]:
    """The model and random parameters, in float64 where the inputs are."""
    model = md.model(f)
    rng = np.random.default_rng(seed)
    specs = model.specs(*inputs)
    return model, {path: md.tensor(rng.normal(size=[d.size for d in s.dims]), s.dims) for path, s in specs.items()}


DOUBLE = md.nn.Precision("float64", "float64", "float64")


def test_a_convolution_is_that_of_lax() -> None:
    x = md.tensor(RNG.normal(size=(2, 6, 5, 3)), "batch height width channels")
    window = {"height": 3, "width": 2}
    options: dict[str, Any] = {"stride": {"height": 2}, "padding": "valid", "precision": DOUBLE}
    model, params = made(lambda x: md.nn.conv(x, window, "channels", "channels:4", **options), x)
    y = model(params, x)
    theirs = jax.lax.conv_general_dilated(
        x.array, params["conv/w"].array, (2, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert [d.name for d in y.dims] == ["batch", "height", "width", "channels"]
    np.testing.assert_allclose(y.numpy(), theirs + params["conv/b"].numpy(), rtol=1e-10)
    model, params = made(lambda x: md.nn.conv(x, {"height": 3}, "channels", bias=False, precision=DOUBLE), x)
    padded = np.pad(x.numpy(), [(0, 0), (1, 1), (0, 0), (0, 0)])
    wanted = sum(padded[:, k : k + 6] * params["conv/w"].numpy()[k] for k in range(3))
    np.testing.assert_allclose(model(params, x).numpy(), wanted, rtol=1e-10)


def test_batch_norm_normalises_by_the_batch_and_then_by_its_state() -> None:
    x = RNG.normal(2, 3, size=(8, 5, 4))
    model, params = made(
        lambda x, state, on: md.nn.batch_norm(x, "batch length", state, training=on, precision=DOUBLE),
        md.tensor(x, "batch length channels"), None, True,
    )  # fmt: skip
    scale, bias = params["norm/scale"].numpy(), params["norm/bias"].numpy()
    state: Any = None
    mean, var = np.zeros(4), np.ones(4)
    for _ in range(3):
        y, state = model(params, md.tensor(x, "batch length channels"), state, True)
        m, v = x.mean((0, 1)), x.var((0, 1))
        np.testing.assert_allclose(y.numpy(), (x - m) / np.sqrt(v + 1e-5) * scale + bias, rtol=1e-9)
        mean, var = 0.9 * mean + 0.1 * m, 0.9 * var + 0.1 * v
        np.testing.assert_allclose(state["mean"].numpy(), mean, rtol=1e-10)
        np.testing.assert_allclose(state["var"].numpy(), var, rtol=1e-10)
        x = x + 1
    y, after = model(params, md.tensor(x, "batch length channels"), state, False)
    np.testing.assert_allclose(y.numpy(), (x - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-9)
    assert after["mean"] is state["mean"] or np.array_equal(after["mean"].numpy(), mean)


def test_batch_norm_stores_the_unbiased_variance_if_asked() -> None:
    x = md.tensor(np.array([[1.0, 2.0], [3.0, 6.0]]), "b c")
    model, params = made(lambda x: md.nn.batch_norm(x, "b", unbiased=True, momentum=0.5, precision=DOUBLE), x)
    _, state = model(params, x)
    np.testing.assert_allclose(state["var"].numpy(), 0.5 + 0.5 * np.array([2.0, 8.0]))


def test_the_gradient_of_batch_norm_ignores_its_state_and_is_jaxs() -> None:
    x = RNG.normal(size=(6, 3))
    model, params = made(lambda x, s: md.nn.batch_norm(x, "b", s, precision=DOUBLE), md.tensor(x, "b c"), None)

    def loss(x: md.Tensor) -> md.Tensor:
        y, state = model(params, x, None)
        return md.sum(md.sin(y)) + md.sum(state["mean"]) + md.sum(state["var"])

    def theirs(x: Any) -> Any:
        y = (x - x.mean(0)) / jax.numpy.sqrt(x.var(0) + 1e-5) * params["norm/scale"].array + params["norm/bias"].array
        return jax.numpy.sum(jax.numpy.sin(y))

    ours = md.compile(md.grad(loss), "", "")(md.tensor(x, "b c"))
    np.testing.assert_allclose(ours.numpy(), jax.jit(jax.grad(theirs))(x), rtol=1e-7)


def test_group_norm_normalises_each_group() -> None:
    x = RNG.normal(size=(2, 3, 6))
    model, params = made(lambda x: md.nn.group_norm(x, 2, "c", "length", precision=DOUBLE), md.tensor(x, "b length c"))
    parts = x.reshape(2, 3, 2, 3)
    normal = (parts - parts.mean((1, 3), keepdims=True)) / np.sqrt(parts.var((1, 3), keepdims=True) + 1e-5)
    wanted = normal.reshape(x.shape) * params["norm/scale"].numpy() + params["norm/bias"].numpy()
    np.testing.assert_allclose(model(params, md.tensor(x, "b length c")).numpy(), wanted, rtol=1e-9)
    with pytest.raises(md.ShapeError, match="cannot divide c=6 into 4"):
        md.model(lambda x: md.nn.group_norm(x, 4, "c")).specs(md.spec("b:2 c:6"))


def test_lstm_and_gru_are_their_formulas() -> None:
    x = RNG.normal(size=(2, 5, 3))
    inputs = md.tensor(x, "batch length model")
    model, p = made(lambda x: md.nn.lstm(x, "hidden:4", precision=DOUBLE), inputs)
    w, u, b = (p[f"lstm/{name}"].numpy() for name in "wub")
    h = c = np.zeros((2, 4))
    wanted = []
    for t in range(5):
        gates = np.einsum("bi,igh->gbh", x[:, t], w) + np.einsum("bi,igh->gbh", h, u) + b[:, None]
        c = sigmoid(gates[1]) * c + sigmoid(gates[0]) * np.tanh(gates[2])
        h = sigmoid(gates[3]) * np.tanh(c)
        wanted.append(h)
    y, (last, cell) = model(p, inputs)
    np.testing.assert_allclose(y.numpy(), np.stack(wanted, 1), rtol=1e-9)
    np.testing.assert_allclose(last.numpy(), h, rtol=1e-9)
    np.testing.assert_allclose(cell.numpy(), c, rtol=1e-9)
    model, p = made(lambda x: md.nn.gru(x, "hidden:4", precision=DOUBLE), inputs)
    w, u, b, more = (p[f"gru/{name}"].numpy() for name in ("w", "u", "b", "b_new"))
    h, wanted = np.zeros((2, 4)), []
    for t in range(5):
        own, other = np.einsum("bi,igh->gbh", x[:, t], w) + b[:, None], np.einsum("bi,igh->gbh", h, u)
        reset, update = sigmoid(own[0] + other[0]), sigmoid(own[1] + other[1])
        h = (1 - update) * np.tanh(own[2] + reset * (other[2] + more)) + update * h
        wanted.append(h)
    np.testing.assert_allclose(model(p, inputs)[0].numpy(), np.stack(wanted, 1), rtol=1e-9)


@pytest.mark.slow
def test_a_sequence_in_two_parts_is_the_sequence() -> None:
    x = RNG.normal(size=(2, 6, 3))
    for layer in (md.nn.lstm, md.nn.gru):
        whole, p = made(lambda x, f=layer: f(x, "hidden:4", precision=DOUBLE), md.tensor(x, "batch length model"))
        resumed = md.model(lambda x, s, f=layer: f(x, "hidden:4", state=s, precision=DOUBLE))
        first, state = whole(p, md.tensor(x[:, :4], "batch length model"))
        second, _ = resumed(p, md.tensor(x[:, 4:], "batch length model"), state)
        wanted = whole(p, md.tensor(x, "batch length model"))[0].numpy()
        np.testing.assert_allclose(np.concatenate([first.numpy(), second.numpy()], 1), wanted, rtol=1e-9)


def test_a_state_space_layer_is_its_recurrence() -> None:
    x = RNG.normal(size=(2, 7, 3))
    inputs = md.tensor(x, "batch length model")
    model, p = made(lambda x: md.nn.state_space(x, "state:4", precision=DOUBLE), inputs)
    log_a, log_dt, c, d = (p[f"state_space/{name}"].numpy() for name in ("log_a", "log_dt", "c", "d"))
    a, dt = np.exp(log_a), np.exp(log_dt)[:, None]
    h, wanted = np.zeros((2, 3, 4)), []
    for t in range(7):
        h = np.exp(-a * dt) * h + (1 - np.exp(-a * dt)) / a * x[:, t, :, None]
        wanted.append((h * c).sum(-1) + d * x[:, t])
    np.testing.assert_allclose(model(p, inputs).numpy(), np.stack(wanted, 1), rtol=1e-9)


LAYERS: dict[str, Any] = {
    "conv": lambda x: md.nn.conv(x, {"length": 3}, "model", "model:6", precision=DOUBLE),
    "batch_norm": lambda x: md.nn.batch_norm(x, "batch length", precision=DOUBLE),
    "group_norm": lambda x: md.nn.group_norm(x, 2, "model", "length", precision=DOUBLE),
    "lstm": lambda x: md.nn.lstm(x, "hidden:6", precision=DOUBLE),
    "gru": lambda x: md.nn.gru(x, "hidden:6", precision=DOUBLE),
    "state_space": lambda x: md.nn.state_space(x, "state:3", precision=DOUBLE),
}


@pytest.mark.parametrize(
    "layer",
    [name if name in ("conv", "batch_norm") else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS],
)
def test_layers_and_their_gradients_are_the_same_under_layouts(layer: str) -> None:
    x = md.tensor(RNG.normal(size=(3, 5, 4)), "batch length model")
    model, params = made(LAYERS[layer], x)

    def loss(params: Any, x: md.Tensor) -> Any:
        y = jax.tree.leaves(model(params, x))
        return md.sum(md.sin(y[0])), y

    step = md.value_and_grad(loss, has_aux=True)
    wanted = jax.tree.leaves(md.compile(step, "", "")(params, x))
    for layout in ("batch:x; length:y", "model:y; hidden:x", "length:x; state:y"):
        known = {d.name for t in [x.type, *model.specs(x).values()] for d in t.dims} | {"hidden"}
        rules = "; ".join(rule for rule in layout.split("; ") if rule.partition(":")[0] in known & mentioned(model, x))
        program = md.compile(step, "x:2 y:2", rules).program(params, x)
        for got, y in zip(md.simulate(program, *jax.tree.leaves((params, x))), wanted, strict=True):
            np.testing.assert_allclose(got, y.numpy(), rtol=1e-9, atol=1e-9)


def mentioned(model: md.Model, x: md.Tensor) -> set[str]:
    """The dims of the model's inputs, parameters and results."""
    types = [x.type, *model.specs(x).values(), *jax.tree.leaves(md.eval_shape(model, model.specs(x), x))]
    return {d.name for t in types for d in t.dims}


def test_a_model_in_another_dtype_stores_its_parameters_and_gradients_in_their_own() -> None:
    x = md.tensor(np.ones((2, 4), np.float32), "batch model")

    def layer(h: md.Tensor) -> md.Tensor:
        w = md.param("w", "model:4 out:4", init=md.init.normal(0.5))
        return md.tanh(md.rename(md.einsum(h, w, out="batch out"), out="model"))

    def head(h: md.Tensor) -> md.Tensor:
        return md.einsum(h, md.param("v", "model:4", init=md.init.normal(0.5)), out="batch")

    def body(x: md.Tensor) -> md.Tensor:
        return md.mean(md.vmap(head, over="head:2")(md.layers(layer, x, over="layer:2")), "head")

    model = md.model(body)
    fast = model.astype("bfloat16")
    assert fast.specs(x) == model.specs(x)
    params = fast.init(md.random.key(0), x)
    loss = lambda params: md.sum(md.cast(fast(params, x), "float32"))  # noqa: E731
    value, grads = md.compile(md.value_and_grad(loss), "", "")(params)
    assert fast(params, x).dtype.name == "bfloat16" and all(g.dtype == np.float32 for g in grads.values())
    np.testing.assert_allclose(value.item(), md.sum(model(params, x)).item(), rtol=0.05, atol=0.05)
