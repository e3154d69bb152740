"""Optimizers around an optimizer: frozen parameters, averages of parameters, one update every k steps."""

from __future__ import annotations

import copy
from typing import Any

import jax

import meshdsl as md

from .checks import check_update
from .optimizers import Optimizer, of_trained, recorded, zero, zeros_like
from .per_tensor import Chosen, wide


def _joined(name: str, state: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with that of its wrapper; raises `ShapeError` if both have an entry of one name."""
    if both := sorted(state.keys() & more.keys()):
        raise md.ShapeError(
            f"md.optim.{name}: the state of the optimizer inside already has {', '.join(map(repr, both))}\n"
            f"  its entries are {', '.join(state)}; wrap an optimizer in md.optim.{name} once"
        )
    return {**state, **more}


@recorded
def with_frozen(optimizer: Optimizer, frozen: Chosen) -> Optimizer:
    """An optimizer that leaves the parameters unchanged for which `frozen(path)` is true.

    >>> import meshdsl as md
    >>> optimizer = md.optim.with_frozen(md.optim.sgd(0.1), lambda path: path.startswith("embed"))
    >>> params = {"embed": md.tensor([1.0], "a"), "w": md.tensor([1.0], "a")}
    >>> optimizer.update(params, optimizer.init(params), params)[0]
    {'embed': tensor(float32[a=1], [1.]), 'w': tensor(float32[a=1], [0.9])}

    It stores no moments for them, and what only their gradients need is not computed: it is removed as dead code. Other
    wrappers respect this in any order: `with_clipping(with_frozen(...))` clips by the norm of the other gradients.
    Raises `ShapeError` at the first `init` if every parameter is frozen.
    """
    inside = optimizer.frozen
    return of_trained(optimizer, lambda path: frozen(path) or inside(path))


@recorded
def with_average(optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """An optimizer whose state has `average`, the exponential moving average of the parameters, for evaluation.

    >>> import meshdsl as md
    >>> optimizer = md.optim.with_average(md.optim.sgd(1.0), decay=0.5)
    >>> params = {"w": md.tensor([1.0], "a")}
    >>> params, state = optimizer.update({"w": md.tensor([1.0], "a")}, optimizer.init(params), params)
    >>> params["w"], state["average"]["w"]
    (tensor(float32[a=1], [0.]), tensor(float32[a=1], [0.5]))

    After each update, `average` becomes `decay * average + (1 - decay) * params`. It begins as the initial parameters,
    in at least float32, and is sharded like them; frozen parameters have none, so evaluate with
    `{**params, **state["average"]}`. Raises `ShapeError` for a decay outside 0 to 1.
    """
    if not 0 <= decay <= 1:
        raise md.ShapeError(f"the decay of md.optim.with_average is from 0 to 1, got {decay}")

    def init(params: Any) -> dict[str, Any]:
        average = jax.tree.map(copy.deepcopy, jax.tree.map(wide, params))  # a step may donate both
        return _joined("with_average", optimizer.init(params), {"average": average})

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        inner = {key: value for key, value in state.items() if key != "average"}
        params, inner = optimizer.update(grads, inner, params)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * md.cast(p, a.dtype), state["average"], params)
        return params, {**inner, "average": average}

    return of_trained(Optimizer(init, update), optimizer.frozen)


@recorded
def with_accumulation(optimizer: Optimizer, steps: int) -> Optimizer:
    """An optimizer that updates once every `steps` calls, with the mean of their gradients (optax's `MultiSteps`).

    >>> import meshdsl as md
    >>> optimizer = md.optim.with_accumulation(md.optim.sgd(1.0), steps=2)
    >>> params = {"w": md.tensor([1.0], "a")}
    >>> state = optimizer.init(params)
    >>> for g in (1.0, 3.0):
    ...     params, state = optimizer.update({"w": md.tensor([g], "a")}, state, params)
    ...     print(params["w"])
    tensor(float32[a=1], [1.])
    tensor(float32[a=1], [-1.])

    `state["step"]` counts updates, `state["part"]` the calls since the last one. Gradients are reduced in every call;
    `md.accumulate` inside one step reduces them once, so prefer it where the batch is at hand. A run may go on with
    other `steps`: an update has the mean of the gradients since the last one. Raises `ShapeError` for steps below 1.
    """
    if isinstance(steps, bool) or steps < 1:
        raise md.ShapeError(f"md.optim.with_accumulation needs steps of at least 1, got {steps!r}")

    def init(params: Any) -> dict[str, Any]:
        total = zeros_like(params)
        return _joined("with_accumulation", optimizer.init(params), {"part": zero(), "total": total})

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        inner = {key: value for key, value in state.items() if key not in ("part", "total")}
        total = jax.tree.map(lambda t, g: t + md.cast(g, t.dtype), state["total"], grads)

        count = state["part"] + 1

        def apply(params: Any, inner: Any, total: Any) -> Any:
            mean = jax.tree.map(lambda t: t / md.cast(count, t.dtype), total)
            params, inner = optimizer.update(mean, inner, params)
            return params, inner, jax.tree.map(lambda t: md.zeros(t.dims, t.dtype), total)

        last = count >= steps  # a state that was saved with more steps may have more parts
        params, inner, total = md.cond(last, apply, lambda *same: same, params, inner, total, frequency=1 / steps)
        return params, {**inner, "part": md.where(last, 0, count), "total": total}

    return of_trained(Optimizer(init, update), optimizer.frozen)
