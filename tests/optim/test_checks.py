"""An optimizer takes the states that its own `init` creates, and no other: the error names every entry."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md

PARAMS = {"w": md.spec("io:4 hidden:6"), "b": md.spec("hidden:6")}
OTHERS = {"w": md.spec("io:4 hidden:3"), "b": md.spec("hidden:3")}
ADAM, SGD = md.optim.adam(0.1), md.optim.sgd(0.1)
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": md.optim.momentum(0.1),
    "adam": ADAM,
    "adafactor": md.optim.adafactor(0.1, min_dim_to_factor=2),
    "adafactor with momentum": md.optim.adafactor(0.1, min_dim_to_factor=2, momentum=0.9),
    "muon": md.optim.muon(0.1),
    "muon and sgd": md.optim.muon(0.1, others=SGD),
    "accumulated": md.optim.with_accumulation(ADAM, 2),
    "accumulated sgd": md.optim.with_accumulation(SGD, 2),
    "average": md.optim.with_average(ADAM),
    "average of accumulated": md.optim.with_average(md.optim.with_accumulation(ADAM, 2)),
    "frozen": md.optim.with_frozen(ADAM, lambda path: path == "b"),
}


def state_of(optimizer: md.optim.Optimizer, params: Any = PARAMS) -> dict[str, Any]:
    return md.eval_shape(optimizer.init, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_takes_the_states_of_its_own_init_only(name: str) -> None:
    update, own = OPTIMIZERS[name].update, state_of(OPTIMIZERS[name])
    assert md.eval_shape(update, PARAMS, own, PARAMS) == (PARAMS, own)
    for other in OPTIMIZERS.values():
        for params in (PARAMS, OTHERS):
            state = state_of(other, params)
            if state != own:
                with pytest.raises(md.ShapeError, match="the optimizer's state has"):
                    md.eval_shape(update, PARAMS, state, PARAMS)


ADAMS = state_of(ADAM)


@pytest.mark.parametrize(
    ("optimizer", "state", "message"),
    [
        (SGD, ADAMS, "the optimizer's state has 'm', 'v', which this optimizer does not use\n  create it with init"),
        (ADAM, state_of(OPTIMIZERS["average"]), "the optimizer's state has 'average', which this optimizer does"),
        (OPTIMIZERS["average"], ADAMS, "the optimizer's state has no 'average'; it has: m, step, v"),
        (
            OPTIMIZERS["muon"],
            ADAMS,
            "state has no 'others'; it has: m, step, v\n  it has 'm/b', 'v', which this optimizer does not use\n",
        ),
        (
            ADAM,
            state_of(ADAM, OTHERS),
            "state has 'm/b' as float32[hidden=3], expected float32[hidden=6]\n  it has 'm/w' as float32[io=4 hid",
        ),
        (ADAM, {**ADAMS, "m": {"w": 1.0, "b": ADAMS["m"]["b"]}}, "state has 'm/w' as float, expected float32[io=4 h"),
        (ADAM, [ADAMS], "an optimizer's state is a dict, got list"),
    ],
)
def test_update_error_names_the_entries(optimizer: md.optim.Optimizer, state: Any, message: str) -> None:
    with pytest.raises(md.ShapeError) as caught:
        md.eval_shape(optimizer.update, PARAMS, state, PARAMS)
    assert message in str(caught.value)


def test_update_error_for_parameters_that_are_no_tensors() -> None:
    with pytest.raises(md.ShapeError, match="an update is of a tree of tensors; w is a float"):
        SGD.update({"w": md.ones("a:2")}, SGD.init({"w": md.ones("a:2")}), {"w": 1.0})


def test_update_takes_parameters_that_were_cast() -> None:
    narrow = {path: md.spec(t.dims, "bfloat16") for path, t in PARAMS.items()}
    params, state = md.eval_shape(ADAM.update, PARAMS, ADAMS, narrow)
    assert params == narrow and state == ADAMS
