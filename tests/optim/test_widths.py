"""Optimizers of parameters in 16 bits compute as those of float32 parameters, and round each parameter once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md

OPTIMIZERS: dict[str, Callable[..., md.optim.Optimizer]] = {
    "sgd": lambda **_: md.optim.sgd(0.1),
    "momentum": lambda **more: md.optim.momentum(0.1, nesterov=True, **more),
    "adam": lambda **more: md.optim.adam(0.01, **more),
    "adamw": lambda **more: md.optim.adamw(0.01, weight_decay=0.1, **more),
    "lars": lambda **more: md.optim.lars(0.1, nesterov=True, **more),
    "lamb": lambda **more: md.optim.lamb(0.01, **more),
    "muon": lambda **more: md.optim.muon(0.01, weight_decay=0.1, **more),
    "adafactor": lambda **_: md.optim.adafactor(0.01, momentum=0.9, min_dim_to_factor=2),
}
WRAPPERS: dict[str, Callable[[md.optim.Optimizer], md.optim.Optimizer]] = {
    "average": lambda optimizer: md.optim.with_average(optimizer, 0.5),
    "accumulation": lambda optimizer: md.optim.with_accumulation(optimizer, 3),
    "frozen": lambda optimizer: md.optim.with_frozen(optimizer, lambda path: path == "b"),
}
STEPS = 3


def trees(dtype: str) -> tuple[dict[str, md.Tensor], list[dict[str, md.Tensor]]]:
    """Parameters and the gradients of some steps, which 16 bits represent."""
    rng, dims = np.random.default_rng(3), {"w": "io:4 hidden:6", "b": "hidden:6"}

    def tree() -> dict[str, md.Tensor]:
        values = {k: rng.integers(-8, 9, [d.size for d in md.dims(text)]) / 8 for k, text in dims.items()}
        return {k: md.cast(md.tensor(x.astype("float32"), dims[k].split()), dtype) for k, x in values.items()}

    return tree(), [tree() for _ in range(STEPS)]


def as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: md.cast(x, "float32") if x.dtype.itemsize == 2 else x, tree)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *WRAPPERS])
def test_optimizers_of_16_bit_parameters_round_each_once_a_step(name: str, dtype: str) -> None:
    optimizer = WRAPPERS[name](md.optim.adam(0.01)) if name in WRAPPERS else OPTIMIZERS[name]()
    params, gradients = trees(dtype)
    state = optimizer.init(params)
    for x in jax.tree.leaves(state):
        assert x.dtype.name in ("float32", "int32"), state
    for grads in gradients:
        wide, wanted_state = optimizer.update(as_float32(grads), state, as_float32(params))
        params, state = optimizer.update(grads, state, params)
        for path, x in params.items():
            assert x.dtype == dtype
            np.testing.assert_array_equal(x.numpy(), wide[path].numpy().astype(x.dtype))
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
            if "average" not in state:  # that of the rounded parameters
                np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_optimizers_of_16_bit_parameters_forget_old_gradients() -> None:
    """In bfloat16, 0.999 v rounds to v."""
    optimizer = md.optim.adam(1e-3)
    params = {"w": md.cast(md.ones("a:1"), "bfloat16")}
    state, one, zero = optimizer.init(params), {"w": md.cast(md.ones("a:1"), "bfloat16")}, {"w": md.zeros("a:1")}
    update = md.compile(optimizer.update, "", "")
    for i in range(200):
        params, state = update(one if i < 20 else jax.tree.map(lambda x: md.cast(x, "bfloat16"), zero), state, params)
    assert float(state["v"]["w"].numpy()[0]) == pytest.approx((1 - 0.999**20) * 0.999**180, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("sgd", "adafactor")])
def test_optimizers_store_moments_in_the_state_dtype(name: str) -> None:
    params, gradients = trees("float32")
    wide, narrow = OPTIMIZERS[name](), OPTIMIZERS[name](state_dtype="bfloat16")
    state = narrow.init(params)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.dims} == {"bfloat16"}
    after, state = narrow.update(gradients[0], state, params)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.dims} == {"bfloat16"}
    wanted, _ = wide.update(gradients[0], wide.init(params), params)
    for path, x in after.items():  # only the stored moments are rounded
        np.testing.assert_array_equal(x.numpy(), wanted[path].numpy())
    with pytest.raises(md.ShapeError, match="state_dtype is the floating dtype"):
        OPTIMIZERS[name](state_dtype="int8")
