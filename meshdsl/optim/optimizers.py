"""An optimizer is two functions: `init(params) -> state` and `update(grads, state, params) -> (params, state)`.

The state is a dict: `step`, the number of updates done (int32), and for each moment a tree shaped like the parameters.
`update` raises `ShapeError` for a state with other entries than `init` creates.
A learning rate is a number or a schedule: a function of `step`, which is 0 at the first update.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec

import jax

import meshdsl as md

from .checks import LearningRate, check_state_dtype, check_update, checked_decays, checked_rate, is_tensor
from .per_tensor import Chosen, every, none, path_of, wide

P = ParamSpec("P")


@dataclass(frozen=True)
class Optimizer:
    """`init(params) -> state`; `update(grads, state, params) -> (params, state)`. Both can be traced and compiled.

    To write your own, pass two functions of trees of tensors. This one steps along the sign of the gradient:

    >>> import jax
    >>> import meshdsl as md
    >>> def update(grads, state, params):
    ...     return jax.tree.map(lambda p, g: p - 0.1 * md.sign(g), params, grads), state
    >>> optimizer = md.optim.Optimizer(lambda params: {}, update)
    >>> params = {"w": md.tensor([1.0, 2.0], "io")}
    >>> optimizer.update({"w": md.tensor([3.0, -4.0], "io")}, optimizer.init(params), params)[0]
    {'w': tensor(float32[io=2], [0.9 2.1])}

    `frozen(path)` is true for parameters that `update` leaves unchanged, whatever their gradients: `with_frozen` sets
    it, and wrappers pass it on. They keep no state for these parameters and clip without their gradients. A step of a
    workload does not compute these gradients, and passes the others only.
    """

    init: Callable[[Any], dict[str, Any]]
    update: Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]
    frozen: Chosen = none

    def __reduce__(self) -> Any:
        """For `pickle` and copies: the call that made it, or its functions."""
        functions = inspect.unwrap(self.init), inspect.unwrap(self.update), self.frozen
        return getattr(self, "made", None) or (Optimizer, functions)


def name_of(optimizer: Optimizer) -> str:
    """The functions that made an optimizer, such as `with_clipping(adam)`.

    >>> import meshdsl as md
    >>> name_of(md.optim.with_clipping(md.optim.adam(1e-3), 1.0))
    'with_clipping(adam)'
    """
    made = getattr(optimizer, "made", None)
    if made is None:
        return "Optimizer"
    inside = [name_of(x) for x in (*made[0].args, *made[0].keywords.values()) if isinstance(x, Optimizer)]
    return made[0].func.__name__ + (f"({', '.join(inside)})" if inside else "")


def trained(frozen: Chosen, tree: Any) -> Any:
    """The leaves that are not frozen, by path; the tree itself if `frozen` accepts no path."""
    if frozen is none:
        return tree
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_tensor)
    return {path_of(keys): x for keys, x in leaves if not frozen(path_of(keys))}


def of_trained(optimizer: Optimizer, frozen: Chosen) -> Optimizer:
    """The optimizer of the parameters that are not frozen: it never sees the others, nor their gradients."""
    if frozen is none:
        return optimizer

    def init(params: Any) -> dict[str, Any]:
        moving = trained(frozen, params)
        if jax.tree.leaves(params) and not moving:
            raise md.ShapeError("md.optim.with_frozen: every parameter is frozen, so that nothing would be trained")
        return optimizer.init(moving)

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        new, state = optimizer.update(trained(frozen, grads), state, trained(frozen, params))
        return jax.tree_util.tree_map_with_path(lambda keys, p: new.get(path_of(keys), p), params), state

    return Optimizer(init, update, frozen)


def recorded(make: Callable[P, Optimizer]) -> Callable[P, Optimizer]:
    """The same function; what it returns can be pickled, because it knows the call that made it.

    >>> import copy
    >>> import meshdsl as md
    >>> copy.deepcopy(md.optim.adam(1e-3)).init({"w": md.ones("io:2")})["step"]
    tensor(int32[], 0)
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Optimizer:
        optimizer = make(*args, **kwargs)
        object.__setattr__(optimizer, "made", (functools.partial(call, *args, **kwargs), ()))
        return optimizer

    return call


@recorded
def sgd(learning_rate: LearningRate) -> Optimizer:
    """Stochastic gradient descent: p - learning_rate * g.

    >>> import meshdsl as md
    >>> optimizer = md.optim.sgd(0.1)
    >>> params = {"w": md.tensor([1.0], "a")}
    >>> params, state = optimizer.update({"w": md.tensor([2.0], "a")}, optimizer.init(params), params)
    >>> params["w"], state["step"]
    (tensor(float32[a=1], [0.8]), tensor(int32[], 1))
    """

    checked_rate(learning_rate)

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero()}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        rate = rate_of(learning_rate, state["step"])
        return subtract(params, jax.tree.map(lambda g: rate * wide(g), grads)), {"step": state["step"] + 1}

    return Optimizer(init, update)


@recorded
def momentum(
    learning_rate: LearningRate, decay: float = 0.9, nesterov: bool = False, *, state_dtype: Any = None
) -> Optimizer:
    """SGD with momentum (Polyak, 1964): m = g + decay * m; p - learning_rate * m.

    With `nesterov`, p - learning_rate * (g + decay * m) (Sutskever et al., 2013, section 3).

    >>> import meshdsl as md
    >>> optimizer = md.optim.momentum(0.1)
    >>> grads = params = {"w": md.tensor([1.0], "io")}
    >>> state = optimizer.init(params)
    >>> for step in range(2):
    ...     params, state = optimizer.update(grads, state, params)
    >>> params["w"], state["m"]["w"]
    (tensor(float32[io=1], [0.71]), tensor(float32[io=1], [1.9]))

    m has `state_dtype`; see `adamw`.
    """

    checked_rate(learning_rate)
    checked_decays(decay=decay)
    check_state_dtype(state_dtype)

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero(), "m": zeros_like(params, state_dtype)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        rate = rate_of(learning_rate, state["step"])
        grads = jax.tree.map(wide, grads)
        m = jax.tree.map(lambda g, m: g + decay * wide(m), grads, state["m"])
        direction = jax.tree.map(lambda g, m: g + decay * m, grads, m) if nesterov else m
        state = {"step": state["step"] + 1, "m": cast_as(m, state["m"])}
        return subtract(params, jax.tree.map(lambda d: rate * d, direction)), state

    return Optimizer(init, update)


@recorded
def adam(
    learning_rate: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, state_dtype: Any = None
) -> Optimizer:
    """Adam (Kingma and Ba, 2015, algorithm 1), with bias correction; the first step has size learning_rate.

    >>> import meshdsl as md
    >>> optimizer = md.optim.adam(0.1)
    >>> params = {"w": md.tensor([1.0], "a")}
    >>> params, state = optimizer.update({"w": md.tensor([2.0], "a")}, optimizer.init(params), params)
    >>> params["w"]
    tensor(float32[a=1], [0.9])
    >>> sorted(state)
    ['m', 'step', 'v']

    m and v have `state_dtype`; see `adamw`.
    """
    return adamw(learning_rate, b1, b2, eps, weight_decay=0.0, state_dtype=state_dtype)


@recorded
def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decays: Chosen = every,
    *,
    state_dtype: Any = None,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    The decay `learning_rate * weight_decay * p` applies to parameters for which `decays(path)` is true. For example,
    `decays=lambda path: not path.endswith("bias")` excludes biases.

    >>> import meshdsl as md
    >>> optimizer = md.optim.adamw(0.1, weight_decay=0.5)
    >>> params = {"w": md.tensor([1.0], "io")}
    >>> optimizer.update({"w": md.tensor([2.0], "io")}, optimizer.init(params), params)[0]["w"]
    tensor(float32[io=1], [0.85])

    The moments m and v are float32, or wider if a parameter is; the update is computed in that dtype, and a narrower
    parameter is rounded once. `state_dtype` is another dtype for their storage: "bfloat16" halves it, but a v that
    decays by 0.999 a step then no longer decays. Raises `ShapeError` for a `state_dtype` that is not floating.
    """

    checked_rate(learning_rate)
    checked_decays(b1=b1, b2=b2)
    if isinstance(weight_decay, int | float) and not 0 <= weight_decay < math.inf:
        raise md.ShapeError(f"weight_decay is a finite number of at least 0, got {weight_decay}")
    check_state_dtype(state_dtype)

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero(), "m": zeros_like(params, state_dtype), "v": zeros_like(params, state_dtype)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        rate = rate_of(learning_rate, state["step"])
        state, (m, v), (correction_1, correction_2) = moments(grads, state, b1, b2)

        def move(path: Any, p: md.Tensor, m: md.Tensor, v: md.Tensor) -> md.Tensor:
            if weight_decay and decays(path_of(path)):
                delta = rate * ((m / correction_1) / (md.sqrt(v / correction_2) + eps) + weight_decay * wide(p))
            else:
                delta = rate * (m / correction_1) / (md.sqrt(v / correction_2) + eps)
            return md.cast(p - delta, p.dtype)

        return jax.tree_util.tree_map_with_path(move, params, m, v), state

    return Optimizer(init, update)


def moments(
    grads: Any, state: dict[str, Any], b1: float, b2: float
) -> tuple[dict[str, Any], tuple[Any, Any], tuple[md.Tensor, md.Tensor]]:
    """The state of Adam after these gradients, m and v in at least float32, and the corrections that divide them."""
    step = state["step"] + 1
    count = count_of(step, jax.tree.leaves(grads))
    grads = jax.tree.map(wide, grads)
    m = jax.tree.map(lambda m, g: b1 * wide(m) + (1 - b1) * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * wide(v) + (1 - b2) * (g * g), state["v"], grads)
    stored = {"step": step, "m": cast_as(m, state["m"]), "v": cast_as(v, state["v"])}
    return stored, (m, v), (1 - b1**count, 1 - b2**count)


def count_of(step: md.Tensor, leaves: Iterable[md.Tensor]) -> md.Tensor:
    """The number of updates as float32, or as float64 if a leaf is wider than 4 bytes."""
    return md.cast(step, "float64" if any(x.dtype.itemsize > 4 for x in leaves) else "float32")


def rate_of(learning_rate: LearningRate, step: md.Tensor) -> Any:
    rate: Any = learning_rate(step) if callable(learning_rate) else learning_rate
    checked_rate(rate)
    if isinstance(rate, str):
        raise md.ShapeError(f"the learning rate must be a number or a function of the step, got {rate!r}")
    return rate


def subtract(params: Any, deltas: Any) -> Any:
    return jax.tree.map(lambda p, d: md.cast(p - d, p.dtype), params, deltas)


def zero() -> md.Tensor:
    return md.cast(0, "int32")


def cast_as(tree: Any, like: Any) -> Any:
    """The tensors of a tree, each in the dtype of the one at its place in the other."""
    return jax.tree.map(lambda x, y: md.cast(x, y.dtype), tree, like)


def zeros_like(params: Any, dtype: Any = None) -> Any:
    """Zeros with the dims of the parameters; without a dtype, in that of each parameter or float32, if it is wider."""
    for keys, p in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_tensor):
        if not is_tensor(p):
            raise md.ShapeError(
                f"an optimizer's state is created for a tree of tensors; {path_of(keys) or 'params'} is a "
                f"{type(p).__name__}\n  params = model.init(key, *inputs); state = optimizer.init(params)"
            )
    return jax.tree.map(lambda p: md.broadcast(md.cast(0, dtype or wide(p).dtype), p.dims), params)
