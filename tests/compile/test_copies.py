"""Copies and pickles of what users keep: tensors, parameters, optimizers, plans, programs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import Op

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}
PARAMS = {"w": md.tensor([[1.0, 2.0], [3.0, 4.0]], "io hidden"), "b": md.tensor([1, 2], "hidden")}


def step(params: dict[str, md.Tensor], x: md.Tensor) -> dict[str, md.Tensor]:
    def loss(w: md.Tensor) -> md.Tensor:
        y = md.softmax(md.relu(md.dot(x, w, "io")), "hidden")
        y, _ = md.scan(lambda c, _: (md.cond(md.sum(c) > 0, md.sin, md.exp, c), None), y, None, over="trip:2")
        return md.mean(md.square(y))

    return {"w": params["w"] - md.grad(loss)(params["w"])}


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_tensors_have_the_values(way: str) -> None:
    sharded = md.compile(lambda x: x * 2, "p:3", "hidden:p")(PARAMS["w"])  # stored with padding
    for x in (*PARAMS.values(), sharded, md.cast(PARAMS["w"], "bfloat16"), md.random.key(3), md.tensor(2.0)):
        again = WAYS[way]({"x": x})["x"]
        assert again.type == x.type and np.array_equal(again.numpy(), x.numpy())
    deep = copy.deepcopy(sharded)
    assert deep.stored is not sharded.stored and deep.stored.sharding == sharded.stored.sharding


def test_a_traced_tensor_is_copied_as_itself_and_cannot_be_pickled() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        assert copy.copy(x) is x and copy.deepcopy(x) is x
        with pytest.raises(md.TraceError, match="no values yet"):
            pickle.dumps(x)
        return x

    md.compile(f, "p:2").program(md.spec("a:2"))


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_programs_are_the_same_programs(way: str) -> None:
    compiled = md.compile(step, "p:2", "batch:p", weight_update="sharded")
    args = {"w": md.spec("io:2 hidden:2")}, md.spec("batch:4 io:2")
    for value in (compiled.program(*args), compiled.graph(*args), compiled.plan, compiled.cost(*args)):
        assert str(WAYS[way](value)) == str(value)
    program = WAYS[way](compiled.program(*args))
    x = md.ones("batch:4 io:2")
    both = [md.simulate(each, PARAMS["w"], x) for each in (program, compiled.program(*args))]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, both), strict=True))


def test_a_record_that_a_call_made_cannot_be_pickled() -> None:
    op = Op("mine", type=lambda x: x, kernel=lambda c, x: x)
    with pytest.raises(md.TraceError, match="the operation mine cannot be pickled"):
        pickle.dumps(op)
    assert copy.deepcopy(op) is op


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_optimizers_update_alike(way: str) -> None:
    params = {"w": PARAMS["w"]}
    makers = [md.optim.sgd, md.optim.momentum, md.optim.adam, md.optim.adamw, md.optim.lamb, md.optim.lars]
    for optimizer in (*(make(0.1) for make in makers), md.optim.with_average(md.optim.adam(0.1), 0.5)):
        again = WAYS[way](optimizer)
        first, second = (each.update(params, each.init(params), params) for each in (optimizer, again))
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_schedules_are_the_same_rates(way: str) -> None:
    o = md.optim
    schedules = [o.constant(0.1), o.linear(1, 0, 9), o.warmup_cosine(1.0, 2, 9), o.rsqrt(1.0, 3), o.inverse_sqrt(1, 4)]
    for schedule in schedules:
        again = WAYS[way](o.adam(schedule)), WAYS[way](schedule)
        assert again[1](md.tensor(5)).item() == schedule(md.tensor(5)).item()
        params = {"w": PARAMS["w"]}
        pair = [each.update(params, each.init(params), params)[0]["w"] for each in (again[0], o.adam(schedule))]
        assert np.array_equal(*pair)


def test_names_of_spread_arguments() -> None:
    def f(params: md.Tensor, *batch: md.Tensor, scale: float = 1.0) -> md.Tensor:
        return md.sum(params) + md.sum(batch[0]) + md.sum(batch[1]) * scale

    x = md.spec("a:2")
    assert [v.name for v in md.compile(f, "p:2").program(x, x, x).ins] == ["params", "batch_0", "batch_1"]


@pytest.mark.parametrize("name", ["relu", "einsum", "softmax"])
def test_a_function_called_as_a_method_is_named(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no method or field '{name}'; write md\.{name}\(x\)"):
        getattr(PARAMS["w"], name)
    with pytest.raises(AttributeError, match=r"no method or field 'no_such'$"):
        PARAMS["w"].no_such  # noqa: B018 - looking it up is the test  # pyright: ignore[reportAttributeAccessIssue]


def test_calls_under_strict_settings_of_jax() -> None:
    args = PARAMS, md.ones("batch:4 io:2")
    compiled = md.compile(lambda p, x: md.mean(md.dot(x, p["w"], "io") + p["b"], "batch"), "p:2", "hidden:p")
    wanted = compiled(*args).numpy()
    with jax.transfer_guard("disallow"), jax.numpy_rank_promotion("raise"):
        again = md.compile(compiled.function, "p:2", "hidden:p")
        result = again(*args)
    assert np.array_equal(result.numpy(), wanted)  # reading it is a transfer
