"""Frozen parameters, averages of parameters, and one update every k steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

import meshdsl as md

PARAMS = {"a": md.tensor(np.array([1.0, 2.0], np.float32), "io"), "b": md.tensor(np.float32(3.0))}
GRADS = {"a": md.tensor(np.array([0.5, -1.0], np.float32), "io"), "b": md.tensor(np.float32(2.0))}


def test_frozen_parameters_stay_and_have_no_state() -> None:
    inner = md.optim.adam(0.1)
    optimizer = md.optim.with_frozen(inner, lambda path: path == "a")
    state = optimizer.init(PARAMS)
    assert set(state["m"]) == {"b"}
    params, state = optimizer.update(GRADS, state, PARAMS)
    alone, _ = inner.update({"b": GRADS["b"]}, inner.init({"b": PARAMS["b"]}), {"b": PARAMS["b"]})
    assert params["a"] is PARAMS["a"] and params["b"].item() == alone["b"].item()
    with pytest.raises(md.ShapeError, match="every parameter is frozen"):
        md.optim.with_frozen(inner, lambda path: True).init(PARAMS)


def test_gradients_of_frozen_parameters_are_not_computed() -> None:
    optimizer = md.optim.with_frozen(md.optim.sgd(0.1), lambda path: path == "first")

    def loss(params: Any, x: md.Tensor) -> md.Tensor:
        h = md.einsum(x, params["first"], out="batch hidden")
        return md.sum(md.square(md.einsum(h, params["last"], out="batch")))

    def step(params: Any, state: Any, x: md.Tensor) -> Any:
        return optimizer.update(md.grad(loss)(params, x), state, params)

    params = {"first": md.spec("io:4 hidden:8"), "last": md.spec("hidden:8")}
    graph = md.compile(step, "", "").graph(params, {"step": md.spec([], "int32")}, md.spec("batch:2 io:4"))
    assert sum(eqn.op.name == "einsum" for eqn in graph.eqns if eqn.control is None) == 3  # two forward, one backward


def test_the_average_is_optaxs() -> None:
    optimizer, ours = md.optim.with_average(md.optim.sgd(0.1), 0.9), PARAMS
    state = optimizer.init(ours)
    average: Any = {key: p.numpy() for key, p in PARAMS.items()}
    for _ in range(4):
        ours, state = optimizer.update(GRADS, state, ours)
        average = {key: optax.incremental_update(ours[key].numpy(), average[key], 0.1) for key in average}
    for key, x in average.items():
        np.testing.assert_allclose(state["average"][key].numpy(), x, rtol=1e-6)
    assert state["step"].item() == 4


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_accumulation_is_optaxs_multi_steps(k: int) -> None:
    optimizer, ours = md.optim.with_accumulation(md.optim.sgd(0.1), k), PARAMS
    state = optimizer.init(ours)
    steps = optax.MultiSteps(optax.sgd(0.1), k)
    theirs: Any = {key: p.array for key, p in PARAMS.items()}
    their_state = steps.init(theirs)
    update = md.compile(optimizer.update, "", "")
    for i in range(7):
        grads = {key: g * (i - 2.0) for key, g in GRADS.items()}
        ours, state = update(grads, state, ours)
        updates, their_state = steps.update({key: g.array for key, g in grads.items()}, their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        for key in PARAMS:
            np.testing.assert_allclose(ours[key].numpy(), theirs[key], rtol=2e-5, atol=2e-6)
    assert (state["step"].item(), state["part"].item()) == (7 // k, 7 % k)


def test_optax_that_cannot_be_used_says_what_to_use() -> None:
    for transformation, text in [
        (optax.MultiSteps(optax.sgd(0.1), 2), "with_accumulation"),
        (optax.contrib.muon(0.1), "multiplies whole matrices"),
        (optax.lamb(0.1), "md.optim.lamb"),
        (optax.adafactor(0.1), "md.optim.adafactor"),
    ]:
        optimizer = md.optim.from_optax(transformation)
        params = {"w": md.tensor(np.ones((2, 3), np.float32), "a b")}
        with pytest.raises(md.MeshdslError, match=text):
            optimizer.update(params, optimizer.init(params), params)


def test_an_average_begins_as_a_copy_that_a_step_may_donate_too() -> None:
    params = {"w": md.tensor([1.0, 2.0], "a")}
    average = md.optim.with_average(md.optim.sgd(0.1)).init(params)["average"]["w"]
    assert average.array is not params["w"].array and average.numpy().tolist() == [1, 2]


def test_mistakes() -> None:
    for wrong, text in [
        (lambda: md.optim.with_average(md.optim.sgd(0.1), 1.5), "from 0 to 1"),
        (lambda: md.optim.with_accumulation(md.optim.sgd(0.1), 0), "at least 1"),
    ]:
        with pytest.raises(md.ShapeError, match=text):
            wrong()


@pytest.mark.parametrize("wrap", [md.optim.with_average, lambda optimizer: md.optim.with_accumulation(optimizer, 2)])
def test_a_wrapper_of_the_same_wrapper_is_refused(wrap: Any) -> None:
    with pytest.raises(md.ShapeError, match=r"the optimizer inside already has '(average|part)'"):
        wrap(wrap(md.optim.sgd(0.1))).init({"w": md.tensor([1.0], "a")})
