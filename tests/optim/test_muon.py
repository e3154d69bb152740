"""Muon: singular values near 1, optax's updates, matrices of several dims, and what a sharded weight sends.

Its updates under every layout, stacked layers and dtypes are rows of `test_per_tensor.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshdsl as md
from tests.optim.simulated import drawn, simulated


def zero_state(optimizer: md.optim.Optimizer, params: Any) -> dict[str, Any]:
    """The state after `init`; every element is zero."""
    specs = md.eval_shape(optimizer.init, params)
    return jax.tree.map(lambda s: md.tensor(np.zeros([d.size for d in s.dims], s.dtype), s.dims), specs)


def change(optimizer: md.optim.Optimizer, params: Any, grads: Any) -> dict[str, np.ndarray]:
    after, _ = simulated(optimizer.update, "one:1", "")(grads, zero_state(optimizer, params), params)
    return {path: params[path].numpy() - after[path].numpy() for path in params}


@pytest.mark.parametrize("shape", ["io:6 hidden:9", "io:9 hidden:6", "io:1 hidden:4"])
def test_muon_singular_values_are_near_one(shape: str):
    step = change(md.optim.muon(1.0, rms=1.0), drawn(0, {"w": shape}), drawn(1, {"w": shape}))["w"]
    singular = np.linalg.svd(step / np.sqrt(max(step.shape)), compute_uv=False)
    assert 0.6 < singular.min() <= singular.max() < 1.25


@pytest.mark.parametrize(
    ("ours", "theirs"), [({}, {}), ({"rms": 0.2, "weight_decay": 0.1}, {"consistent_rms": 0.2, "weight_decay": 0.1})]
)
def test_muon_equals_optax(ours: dict[str, Any], theirs: dict[str, Any]):
    """Without `nesterov`: there optax also divides m and g by bias corrections, which Jordan et al. do not."""
    shapes = {"w": "io:5 hidden:7", "v": "hidden:7 io:5", "bias": "hidden:7"}
    optimizer, reference = (
        md.optim.muon(0.1, nesterov=False, **ours), optax.contrib.muon(0.1, nesterov=False, **theirs)
    )  # fmt: skip
    params = drawn(0, shapes)
    state = zero_state(optimizer, params)
    expected: Any = {path: p.array for path, p in params.items()}
    their_state = reference.init(expected)
    update, their_update = simulated(optimizer.update, "one:1", ""), jax.jit(reference.update)
    for seed in (1, 2, 3):
        grads = drawn(seed, shapes)
        params, state = update(grads, state, params)
        updates, their_state = their_update({path: g.array for path, g in grads.items()}, their_state, expected)
        expected = optax.apply_updates(expected, updates)
        for path, p in params.items():
            np.testing.assert_allclose(p.numpy(), expected[path], rtol=1e-6, atol=1e-6)  # eps beside other scales


def test_muon_matrices_of_several_dims():
    """Heads by head size are one side of a matrix; each expert has a matrix of its own; an embedding goes to Adam."""
    shapes = {"attention/q": "model:6 heads:2 head:4", "moe/in": "expert:3 model:6 d_ff:5", "embed": "vocab:9 model:6"}
    params, grads = drawn(0, shapes), drawn(1, shapes)
    rules = {"*/q": "model -> heads head", "moe/*": "model -> d_ff", "embed": None}
    found = change(md.optim.muon(0.1, matrices=rules), params, grads)

    def alone(x: np.ndarray, g: np.ndarray) -> np.ndarray:
        weight, grad = ({"w": md.tensor(array, "io hidden")} for array in (x, g))
        return change(md.optim.muon(0.1), weight, grad)["w"]

    x, g = [tree["attention/q"].numpy().reshape(6, 8) for tree in (params, grads)]
    np.testing.assert_allclose(found["attention/q"].reshape(6, 8), alone(x, g), rtol=1e-12)
    for expert, step in enumerate(found["moe/in"]):
        x, g = (tree["moe/in"].numpy()[expert] for tree in (params, grads))
        np.testing.assert_allclose(step, alone(x, g), rtol=1e-12)
    adam = change(md.optim.adam(0.1), {"w": params["embed"]}, {"w": grads["embed"]})["w"]
    np.testing.assert_allclose(found["embed"], adam, rtol=1e-12)


@pytest.mark.parametrize(("options", "message"), [
    ({"matrices": {"head": "model -> vocab"}}, "'head' of matrices= matches no parameter\n  parameters: bias, w"),
    ({"matrices": {"w": "io -> model"}}, "'io -> model' does not describe matrices of 'w', which is .*io=4 hidden=8"),
    ({"matrices": {"w": "io hidden"}}, "write .inputs -> outputs. with different dims of io, hidden on each side"),
    ({"matrices": {"w": "io -> io"}}, "does not describe matrices"),
    ({"matrices": {"w": None}}, "no parameter is a matrix\n  parameters: bias float32.hidden=8., w float32"),
])  # fmt: skip
def test_muon_errors(options: dict[str, Any], message: str):
    params = {"w": md.spec("io:4 hidden:8"), "bias": md.spec("hidden:8")}
    with pytest.raises(md.ShapeError, match=message):
        md.eval_shape(md.optim.muon(0.1, **options).init, params)


def test_muon_gathers_the_smaller_side_once():
    params = {"w": md.spec("io:64 hidden:256")}
    optimizer = md.optim.muon(0.1)
    program = md.compile(optimizer.update, "r:2 c:4", "io:r hidden:c").program(
        params, md.eval_shape(optimizer.init, params), params
    )
    sent = sorted((c.kind, c.bytes) for c in program.collectives if c.bytes > 8)
    assert sent == [("all_gather", 64 * 64 * 4)] + 5 * [("all_reduce", 64 * 64 * 4)]


def test_muon_update_is_sharded():
    """Each device stores a part of the momentum, although renamed dims are contracted; stacked layers send no more."""

    def step(params: Any, state: Any, x: md.Tensor) -> Any:
        grads = md.grad(lambda p, x: md.mean(md.square(md.einsum(x, p["w"], out="batch layer hidden"))))(params, x)
        return optimizer.update(grads, state, params)

    optimizer, params = md.optim.muon(0.1), {"w": md.spec("layer:4 io:64 hidden:256")}
    compiled = md.compile(step, "rows:4", "batch:rows", weight_update="sharded")
    program = compiled.program(params, md.eval_shape(optimizer.init, params), md.spec("batch:32 io:64"))
    assert [d.sharded for d in compiled.weight_update.decisions] == [True]
    assert [c.kind for c in program.collectives] == ["all_gather", "reduce_scatter"]
    assert program.local_shape(next(v for v in program.ins if v.name == "state/m/w")) == (1, 64, 256)
