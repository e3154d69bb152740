"""Frozen parameters, averages of parameters, and one update every k steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax
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


def frozen(path: str) -> bool:
    return path == "still" or path.startswith("embed/")


@dataclass(frozen=True)
class Config:
    batch: int = 8


WRAPPERS: dict[str, Any] = {
    "clipping": lambda optimizer: md.optim.with_clipping(optimizer, 0.5),
    "average": lambda optimizer: md.optim.with_average(optimizer, 0.5),
    "accumulation": lambda optimizer: md.optim.with_accumulation(optimizer, 2),
}
INSIDE: dict[str, Any] = {
    "sgd": lambda: md.optim.sgd(0.1),
    "adamw": lambda: md.optim.adamw(0.1),
    "lamb": lambda: md.optim.lamb(0.1),
    "adafactor": lambda: md.optim.adafactor(0.1),
    "muon": lambda: md.optim.muon(0.1, others=md.optim.with_clipping(md.optim.adamw(0.1), 0.1)),
    "optax": lambda: md.optim.from_optax(optax.chain(optax.clip(0.3), optax.adam(0.1))),
    "own": lambda: md.optim.Optimizer(
        lambda params: {}, lambda grads, state, params: ({k: p - grads[k] for k, p in params.items()}, state)
    ),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_wrappers_in_any_order_never_read_a_frozen_gradient(inside: str) -> None:
    """The result is that of the optimizer on the tree without the frozen leaves."""
    rng = np.random.default_rng(0)
    params = {k: md.tensor(rng.standard_normal((3, 2)), "a b") for k in ("w", "v")} | {"b": md.tensor([1.0, 2.0], "a")}
    grads = [{k: md.tensor(rng.standard_normal(p.shape), p.dims) for k, p in params.items()} for _ in range(2)]
    extra: dict[str, Any] = {"still": md.ones("a:3"), "embed/w": md.ones("a:3 b:2")}
    worse = {"still": md.full("a:3", float("inf")), "embed/w": md.full("a:3 b:2", float("nan"))}
    for order in list(itertools.permutations(WRAPPERS))[: 6 if inside == "sgd" else 1]:
        plain = INSIDE[inside]()
        for name in order:
            plain = WRAPPERS[name](plain)
        for at in range(len(order) + 1):
            optimizer = INSIDE[inside]()
            for i, name in enumerate((*order, "")):
                optimizer = md.optim.with_frozen(optimizer, frozen) if i == at else optimizer
                optimizer = WRAPPERS[name](optimizer) if name else optimizer
            assert optimizer.frozen("still") and not optimizer.frozen("w")
            ours, theirs = {**params, **extra}, params
            state, their_state = optimizer.init(ours), plain.init(params)
            for g in grads:
                ours, state = optimizer.update({**g, **worse}, state, ours)
                theirs, their_state = plain.update(g, their_state, theirs)
            for k, p in {**theirs, **extra}.items():
                np.testing.assert_array_equal(ours[k].numpy(), p.numpy())
            assert jax.tree.map(lambda x: x.numpy().tolist(), state) == jax.tree.map(
                lambda x: x.numpy().tolist(), their_state
            )


def test_muon_freezes_what_its_others_freeze() -> None:
    params = {"w": md.ones("a:2 b:2"), "bias": md.ones("a:2"), "still": md.ones("a:2")}
    bad = {**params, "still": md.full("a:2", float("inf"))}
    muon = md.optim.muon(0.1, others=md.optim.with_frozen(md.optim.adam(0.1), frozen))
    optimizer = md.optim.with_clipping(muon, 1.0)
    new, _ = optimizer.update(bad, optimizer.init(params), params)
    assert new["still"] is params["still"] and all(np.isfinite(x.numpy()).all() for x in new.values())
    assert not np.array_equal(new["bias"].numpy(), params["bias"].numpy())


def test_accumulation_continues_with_another_number_of_steps() -> None:
    """An update is the mean of the gradients since the last one."""
    for before, after in itertools.product(range(1, 5), repeat=2):
        optimizer, params = md.optim.with_accumulation(md.optim.sgd(1.0), before), {"w": md.zeros("a:1")}
        state, since, place = optimizer.init(params), list[float](), 0.0
        for i in range(11):
            steps = before if i < 3 else after
            optimizer = md.optim.with_accumulation(md.optim.sgd(1.0), steps)
            params, state = optimizer.update({"w": md.full("a:1", i + 1.0)}, state, params)
            since.append(i + 1.0)
            if len(since) >= steps:
                place, since = place - sum(since) / len(since), []
            assert params["w"].numpy()[0] == pytest.approx(place, rel=1e-6), (before, after, i)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("guard", [False, True])
def test_a_step_reads_no_gradient_of_frozen_weights(guard: bool, microbatches: int) -> None:
    """It is neither computed nor reduced, and does not count as non-finite: sqrt has an infinite slope at 0."""
    model = md.model(
        lambda b: md.sqrt(md.sum(md.square(md.param("still", "d:8", init=md.init.zeros()) * b["x"]), "d")) * 0.0
        + md.einsum(b["x"], md.param("w", "d:8", init=md.init.ones()), out="batch")
    )  # fmt: skip
    workload = md.Workload(
        "frozen", Config(), model=lambda c: model, inputs=lambda c: {"x": md.spec("batch:8 d:8")},
        loss=lambda c: lambda p, b: md.train.mean(md.square(model(p, b))),
        optimizer=lambda c: md.optim.with_average(md.optim.with_frozen(md.optim.sgd(0.1), frozen)),
    )  # fmt: skip
    params, state = workload.init(md.random.key(0))
    batch = {"x": md.random.normal(md.random.key(1), "batch:8 d:8")}
    step = md.compile(workload.train_step(guard=guard), plan=md.Plan("c:4", "batch:c", microbatches=microbatches))
    new, _, metrics = step(params, state, batch)
    assert not np.array_equal(new["w"].numpy(), params["w"].numpy()) and np.isfinite(new["w"].numpy()).all()
    assert metrics.get("non_finite", md.zeros([])).item() == 0
    assert sorted(record.bytes for record in step.program(params, state, batch).collectives) == [4, 32]
