"""`md.nn.causal_conv` equals NumPy, whole, in parts, and under layouts."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md

DOUBLE = md.nn.Precision("float64", "float64", "float64")
RNG = np.random.default_rng(5)
X = md.tensor(RNG.normal(size=(2, 7, 3)), "batch length channels")
STATE = md.tensor(RNG.normal(size=(2, 3, 3)), "batch recent channels")
MODEL = md.model(lambda x, state: md.nn.causal_conv(x, 4, "channels", state=state, precision=DOUBLE))
PARAMS = {"conv/w": RNG.normal(size=(4, 3)), "conv/b": RNG.normal(size=3)}
TENSORS = {
    "conv/w": md.tensor(PARAMS["conv/w"], "length_window channels"),
    "conv/b": md.tensor(PARAMS["conv/b"], "channels"),
}


def expected(state: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    joined = np.concatenate([state, x], 1)
    y = sum(joined[:, i : i + x.shape[1]] * PARAMS["conv/w"][i] for i in range(4)) + PARAMS["conv/b"]
    return y, joined[:, -3:]


@pytest.mark.parametrize("state", [None, STATE])
@pytest.mark.parametrize("layout", ["", "length:a", "channels:a; length:b", "batch:a; recent:b"])
def test_causal_conv_equals_numpy_under_layouts(state: md.Tensor | None, layout: str):
    before = np.zeros((2, 3, 3)) if state is None else state.numpy()
    y, recent = md.compile(MODEL, "a:2 b:2", layout)(TENSORS, X, state)
    for result, array in zip((y, recent), expected(before, X.numpy()), strict=True):
        np.testing.assert_allclose(result.numpy(), array, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [(1, 1, 5), (4, 3), (2, 5)])  # also fewer positions than the state has
def test_causal_conv_in_parts_equals_the_whole(sizes: tuple[int, ...]):
    whole, last = MODEL(TENSORS, X, None)
    state, parts, start = None, [], 0
    for size in sizes:
        y, state = MODEL(TENSORS, md.slice(X, "length", start, size), state)
        parts.append(y.numpy())
        start += size
    assert state is not None
    np.testing.assert_allclose(np.concatenate(parts, 1), whole.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(state.numpy(), last.numpy())


def test_causal_conv_of_one_position_has_an_empty_state():
    model = md.model(lambda x: md.nn.causal_conv(x, 1, "channels"))
    _, state = md.eval_shape(model, model.specs(X), X)
    assert [d.size for d in state.dims] == [2, 0, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: md.nn.causal_conv(X, 5, "channels", state=STATE), "the state of md.nn.causal_conv has the dims"),
        (lambda: md.nn.causal_conv(X, 0, "channels"), "md.nn.causal_conv reads at least 1 position, got size=0"),
        (lambda: md.nn.causal_conv(X, 4, "channels", "time"), "'time'"),
    ],
)
def test_causal_conv_refuses_wrong_arguments(call, message: str):
    with pytest.raises(md.ShapeError, match=message):
        md.model(call).specs()
