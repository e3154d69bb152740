"""Optimizers equal optax's over many steps, and numbers worked out by hand over two."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md

SHAPES = {"w": "io:3 hidden:2", "bias": "hidden:2"}
PAIRS: dict[str, tuple[md.optim.Optimizer, Any]] = {
    "sgd": (md.optim.sgd(0.1), optax.sgd(0.1)),
    "momentum": (md.optim.momentum(0.1), optax.sgd(0.1, momentum=0.9)),
    "nesterov": (md.optim.momentum(0.1, 0.8, nesterov=True), optax.sgd(0.1, momentum=0.8, nesterov=True)),
    "adam": (md.optim.adam(0.1, 0.8, 0.95, 1e-3), optax.adam(0.1, 0.8, 0.95, 1e-3)),
    "adamw": (md.optim.adamw(0.1, weight_decay=0.3), optax.adamw(0.1, weight_decay=0.3)),
    "adamw on matrices": (
        md.optim.adamw(0.1, weight_decay=0.3, decays=lambda path: path != "bias"),
        optax.adamw(0.1, weight_decay=0.3, mask={"w": True, "bias": False}),
    ),
    "clipped": (
        md.optim.with_clipping(md.optim.sgd(0.1), 1.5),
        optax.chain(optax.clip_by_global_norm(1.5), optax.sgd(0.1)),
    ),
    "schedule": (
        md.optim.sgd(md.optim.warmup_cosine(0.1, 3, 8, 0.01)),
        optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 8, 0.01)),
    ),
}


def tensors(rng: np.random.Generator) -> dict[str, md.Tensor]:
    return {
        name: md.tensor(rng.standard_normal([d.size for d in md.dims(dims)]), dims) for name, dims in SHAPES.items()
    }


def arrays(tree: dict[str, md.Tensor]) -> dict[str, Any]:
    return {name: x.array for name, x in tree.items()}


@pytest.mark.parametrize("name", PAIRS)
def test_optimizer_ten_steps_equal_optax(name: str):
    ours, theirs = PAIRS[name]
    rng = np.random.default_rng(0)
    params = tensors(rng)
    expected: Any = arrays(params)
    state, their_state = ours.init(params), theirs.init(expected)
    update = md.compile(ours.update, md.Mesh("one:1"), md.Layout(""))
    their_update = jax.jit(theirs.update)
    for _ in range(10):
        grads = tensors(rng)
        params, state = update(grads, state, params)
        changes, their_state = their_update(arrays(grads), their_state, expected)
        expected = optax.apply_updates(expected, changes)
    assert int(state["step"]) == 10
    for path in SHAPES:  # schedules and their product with a gradient are float32
        np.testing.assert_allclose(params[path].numpy(), expected[path], rtol=2e-6 if name == "schedule" else 1e-12)


def test_adam_two_steps_by_hand():
    """Gradients 2 and -1. After both: m = 0.9 * 0.2 - 0.1 = 0.08, v = 0.999 * 0.004 + 0.001 = 0.004996."""
    optimizer = md.optim.adam(0.1, eps=0.0)
    params = {"w": md.tensor(np.array([1.0]), "a")}
    state = optimizer.init(params)
    after = []
    for g in (2.0, -1.0):
        params, state = optimizer.update({"w": md.tensor(np.array([g]), "a")}, state, params)
        after.append(params["w"].numpy()[0])
    step_2 = (0.08 / 0.19) / (0.004996 / 0.001999) ** 0.5
    np.testing.assert_allclose(after, [1 - 0.1 * 2 / 2, 0.9 - 0.1 * step_2], rtol=1e-12)
    np.testing.assert_allclose([state["m"]["w"].numpy()[0], state["v"]["w"].numpy()[0]], [0.08, 0.004996], rtol=1e-12)


def test_momentum_two_steps_by_hand():
    optimizer = md.optim.momentum(0.5, decay=0.5)
    params = {"w": md.tensor(np.array([1.0]), "a")}
    state = optimizer.init(params)
    for g in (2.0, 1.0):  # m is 2, then 1 + 0.5 * 2
        params, state = optimizer.update({"w": md.tensor(np.array([g]), "a")}, state, params)
    assert params["w"].numpy()[0] == 1 - 0.5 * 2 - 0.5 * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("rate", [0.1, md.optim.rsqrt(0.1, 10)], ids=["number", "schedule"])
def test_optimizer_update_keeps_types(dtype: str, rate: Any):
    for make in (md.optim.sgd, md.optim.momentum, md.optim.adam):
        optimizer = md.optim.with_clipping(make(rate), 1.0)
        params = {"w": md.spec("a:2", dtype)}
        state = md.eval_shape(optimizer.init, params)
        assert md.eval_shape(optimizer.update, params, state, params) == (params, state)


def test_optimizer_accepts_any_pytree():
    params = [md.tensor([1.0], "a"), {"b": (md.tensor([2.0], "b"),)}]
    optimizer = md.optim.adam(0.5)
    after, state = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose([x.numpy()[0] for x in jax.tree.leaves(after)], [0.5, 1.5], rtol=1e-6)
    assert jax.tree.structure(state["m"]) == jax.tree.structure(params)


def test_global_norm_is_over_all_elements():
    grads = {"w": md.tensor([3.0, 0.0], "a"), "v": md.tensor([[4.0], [12.0]], "a b")}
    assert md.optim.global_norm(grads).item() == 13
    clipped, norm = md.optim.clip_by_global_norm(grads, 6.5)
    assert norm.item() == 13
    np.testing.assert_array_equal(clipped["v"].numpy(), [[2.0], [6.0]])
    same, _ = md.optim.clip_by_global_norm(grads, 13.0)
    np.testing.assert_array_equal(same["w"].numpy(), [3.0, 0.0])
    zero, norm = md.optim.clip_by_global_norm({"w": md.tensor([0.0], "a")}, 1.0)
    assert zero["w"].numpy()[0] == 0 == norm.item()
    lost, _ = md.optim.clip_by_global_norm({"w": md.tensor([np.inf, 1.0], "a")}, 1.0)
    assert np.isnan(lost["w"].numpy()).all()


@pytest.mark.parametrize("layout", ["", "a:x", "b:y", "a:y,x; b:"])
def test_norms_and_clipping_of_large_elements(layout: str):
    """Their squares overflow, the norm does not; nor does its gradient, in the dtype of what it is taken of."""
    w, v = np.array([3e20, 0, 1, -4e20, 1e-3], np.float32), np.array([[2.0], [1e19], [0.0]], np.float32)
    grads = {"w": md.tensor(w, "a"), "v": md.tensor(v, "b c"), "u": md.tensor(np.array([7.0], np.float16), "one")}

    def both(grads: Any) -> Any:
        return md.optim.clip_by_global_norm(grads, 2.0), md.grad(md.optim.global_norm)(grads)

    (clipped, norm), slope = md.compile(both, "x:2 y:3", layout)(grads)
    exact = np.sqrt(sum(np.square(x.numpy().astype(np.float64)).sum() for x in grads.values()))
    np.testing.assert_allclose(norm.item(), exact, rtol=1e-6)
    for name, x in grads.items():
        assert clipped[name].dtype == slope[name].dtype == x.dtype
        np.testing.assert_allclose(clipped[name].numpy(), 2 * x.numpy() / exact, rtol=1e-3, atol=1e-7)
        np.testing.assert_allclose(slope[name].numpy(), x.numpy() / exact, rtol=1e-3, atol=1e-7)


def test_the_slope_of_a_norm_without_large_elements_is_the_usual_one():
    x = np.array([3.0, 4.0, 0.0], np.float32)
    np.testing.assert_allclose(md.grad(md.optim.global_norm)(md.tensor(x, "a")).numpy(), x / 5, rtol=1e-6)


def test_global_norm_of_narrow_gradients_is_float32():
    grads = {"w": md.broadcast(md.cast(1, "bfloat16"), "a:1000")}  # 1000 ones are not a bfloat16 sum away from 256
    np.testing.assert_allclose(md.optim.global_norm(grads).item(), 1000**0.5, rtol=1e-6)


SCHEDULES: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "constant": (md.optim.constant(0.3), lambda step: 0.3),
    "linear": (md.optim.linear(1.0, 0.2, 4), optax.linear_schedule(1.0, 0.2, 4)),
    "warmup_cosine": (
        md.optim.warmup_cosine(1.0, 3, 8, end=0.1, start=0.2),
        optax.warmup_cosine_decay_schedule(0.2, 1.0, 3, 8, 0.1),
    ),
    "rsqrt": (md.optim.rsqrt(2.0, 4), lambda step: 2 * min((step + 1) / 4, (4 / (step + 1)) ** 0.5)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_values(name: str):
    ours, reference = SCHEDULES[name]
    found = [ours(md.tensor(np.int32(step))) for step in range(12)]
    assert {x.dtype.name for x in found} == {"float32"}
    np.testing.assert_allclose([x.item() for x in found], [float(reference(step)) for step in range(12)], rtol=1e-6)


def test_schedule_rsqrt_equals_the_transformer_formula():
    """Vaswani et al., equation 3, at its own sizes."""
    rate = md.optim.rsqrt((512 * 4000) ** -0.5, 4000)
    for step in (1, 100, 4000, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        np.testing.assert_allclose(rate(md.tensor(np.int32(step - 1))).item(), paper, rtol=1e-6)


def test_global_norm_is_equal_under_every_layout():
    grads = {"w": md.tensor(jnp.arange(12.0).reshape(3, 4), "io hidden"), "b": md.tensor(jnp.ones(4), "hidden")}
    norms = {
        layout: md.compile(md.optim.global_norm, md.Mesh("r:2 c:2"), md.Layout(layout))(grads).item()
        for layout in ("", "io:r hidden:c", "hidden:c,r", "io:c")
    }
    np.testing.assert_allclose(list(norms.values()), (sum(i * i for i in range(12)) + 4) ** 0.5, rtol=1e-14)


P = {"w": md.tensor(np.ones((2, 3)), "io hidden"), "b": md.tensor(np.ones(3), "hidden")}
MISFITS: dict[str, tuple[Any, Any, str]] = {
    "one is missing": ({"w": P["w"]}, None, "parameters without gradient: b\n  gradients without parameter: none"),
    "one is too many": (
        {**P, "v": P["w"]},
        None,
        "parameters without gradient: none\n  gradients without parameter: v",
    ),
    "other dims": (
        {**P, "w": md.tensor(np.ones((2, 4)), "io out")},
        None,
        "its gradient is float64[io=2 out=4]",
    ),
    "an array": (
        {**P, "b": np.ones(3)},
        None,
        "'b' is float64[hidden=3] and its gradient is ndarray",
    ),
    "another's state": (P, {"step": md.tensor(0)}, "the optimizer's state has no 'm'"),
}


@pytest.mark.parametrize("grads,state,message", MISFITS.values(), ids=MISFITS)
def test_optimizer_errors_for_mismatched_trees(grads: Any, state: Any, message: str):
    o = md.optim
    for optimizer in (o.momentum(0.1), o.adam(0.1), o.lamb(0.1), o.lars(0.1), o.adafactor(0.1, momentum=0.9)):
        with pytest.raises(md.ShapeError, match=re.escape(message)):
            optimizer.update(grads, optimizer.init(P) if state is None else {**state, "v": P}, P)


def test_optimizer_error_for_text_learning_rate():
    with pytest.raises(md.ShapeError, match="the learning rate is a number or a function, got str"):
        md.optim.sgd("0.1")  # pyright: ignore
