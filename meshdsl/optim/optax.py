"""optax's transformations as optimizers, where every element of the update depends on that element alone.

optax works on arrays without names. Its functions are traced to a jaxpr on the shapes of the parameters, and the
jaxpr is run again with the operations of the language, so the update is part of the graph like any other. That is
right under every layout exactly when each operation on an array is elementwise: one that sums, sorts or reshapes an
array would do so to a device's shard. Such a transformation is refused, by the name of the function that asks for it.
optax itself is not imported; anything with its `init` and `update` will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md

from .jaxpr import Flat, flatten
from .optimizers import Optimizer, fitting, zero
from .per_tensor import path_of

__all__ = ["from_optax"]


def from_optax(transformation: Any) -> Optimizer:
    """An optimizer from an optax `GradientTransformation` whose update is elementwise.

    >>> import optax
    >>> import meshdsl as md
    >>> optimizer = md.optim.from_optax(optax.lion(0.1))
    >>> params = {"w": md.tensor([[1.0, 2.0]], "io hidden")}
    >>> params, state = optimizer.update(params, optimizer.init(params), params)
    >>> params["w"], {path: x.dims for path, x in state["optax"].items()}
    (tensor(float32[io=1 hidden=2], [[0.8999 1.8998]]), {'0/count': (), '0/mu/w': (io=1, hidden=2)})

    The state is a dict too: `step`, and under `optax` the arrays of optax's own state by their path in it, such as
    `0/mu/w`. An array of the state has the dims of the parameter that it meets in the update.

    Raises `MeshdslError` at the first `init` or `update` when the transformation looks across the elements of a tensor
    (`optax.clip_by_global_norm`, and what optax has of LARS, LAMB and Adafactor), with what to use instead; and when
    the dims of an array of its state cannot be told.
    """

    @lru_cache(maxsize=8)
    def plan(structure: Any, types: tuple[Any, ...]) -> _Plan:
        return _plan(transformation, structure, types)

    def plan_for(params: Any) -> _Plan:
        leaves, structure = jax.tree.flatten(params)
        return plan(structure, tuple(md.spec(p.dims, p.dtype) for p in leaves))

    def init(params: Any) -> dict[str, Any]:
        made = plan_for(params)
        state = made.init.run(jax.tree.leaves(params), made.state)
        return {"step": zero(), "optax": dict(zip(made.paths, state, strict=True))}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        fitting(params, grads, state, "optax")
        made = plan_for(params)
        leaves, structure = jax.tree.flatten(params)
        before = [state["optax"][path] for path in made.paths]
        dims = [p.dims for p in leaves]
        results = made.update.run([*jax.tree.leaves(grads), *before, *leaves], [*dims, *made.state])
        after = [md.cast(p + u, p.dtype) for p, u in zip(leaves, results, strict=False)]
        inner = dict(zip(made.paths, results[len(leaves) :], strict=True))
        return structure.unflatten(after), {"step": state["step"] + 1, "optax": inner}

    return Optimizer(init, update)


Dims = tuple[md.Dim, ...]


@dataclass(frozen=True)
class _Plan:
    """A transformation on parameters of given types: both functions, and the paths and dims of its state."""

    init: Flat
    update: Flat
    paths: tuple[str, ...]
    state: tuple[Dims, ...]


def _plan(transformation: Any, structure: Any, types: tuple[Any, ...]) -> _Plan:
    arrays = [jax.ShapeDtypeStruct(tuple(d.size for d in t.shape), t.dtype) for t in types]
    params = structure.unflatten(arrays)
    made, state = jax.make_jaxpr(transformation.init, return_shape=True)(params)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise md.MeshdslError(
                f"{_name(transformation)} cannot be used: its state at {path_of(keys)!r} is no number: {leaf.dtype}\n"
                "  noise drawn by optax would depend on the shard's shape\n"
                "  draw it with md.random, which draws the same numbers under every layout"
            )
    kept = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(state)]
    moved, (_, after) = _update(transformation, params, state)
    if jax.tree.structure(after) != jax.tree.structure(state):
        raise md.MeshdslError(
            "the optax transformation returns a state of another structure than it was given\n"
            f"  it was {jax.tree.structure(state)}\n  it becomes {jax.tree.structure(after)}"
        )
    if len(set(kept)) < len(kept):
        raise md.MeshdslError(f"two arrays of the optax state have one path; the paths are {', '.join(sorted(kept))}")
    init, update = flatten(made, _refusal), flatten(moved, _refusal)
    return _Plan(init, update, tuple(kept), _state_dims(update, structure, types, kept, _name(transformation)))


def _update(transformation: Any, params: Any, state: Any) -> Any:
    try:
        return jax.make_jaxpr(transformation.update, return_shape=True)(params, state, params)
    except TypeError as error:
        raise md.MeshdslError(
            f"the optax transformation is not a function of gradients, state and parameters alone: {error}\n"
            "  an update here knows no loss and cannot compute one again\n"
            "  use one that needs neither, or an optimizer of md.optim"
        ) from error


def _name(transformation: Any) -> str:
    """What made a transformation, as its user calls it."""
    maker = getattr(transformation.update, "__qualname__", "").partition(".<locals>")[0]
    own = "optax" not in getattr(transformation.update, "__module__", "")
    return "the transformation" if own or not maker else f"optax.{maker}"


def _state_dims(update: Flat, structure: Any, types: tuple[Any, ...], kept: list[str], maker: str) -> tuple[Dims, ...]:
    """The dims of each array of the state, from the arrays that it meets."""
    n = len(types)
    names = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(structure.unflatten(range(n)))]
    before, after = update.ins[n : len(update.ins) - n], update.outs[n:]
    together = list(zip(update.ins[:n], update.outs[:n], strict=True))
    together += list(zip(update.ins[:n], update.ins[len(update.ins) - n :], strict=True))
    together += list(zip(before, after, strict=True))
    alike = update.groups(together)
    found: dict[Any, tuple[Dims, str]] = {}
    for value, kind, name in zip(update.ins, types, names, strict=False):
        dims, other = found.setdefault(alike(value), (kind.shape, name))
        if dims != kind.shape and kind.shape:
            raise md.MeshdslError(
                f"the optax transformation combines elements of the parameters {other!r} and {name!r}\n"
                f"  their dims are {dims} and {kind.shape}; what lies beside what on a device is up to the layout\n"
                "  write the update with md operations: md.optim.Optimizer(init, update) is two functions"
            )
    dims_of: list[Dims] = []
    for value, path in zip(before, kept, strict=True):
        if value.shape and alike(value) not in found:
            raise md.MeshdslError(
                f"{maker} cannot be used: its state has an array of shape {value.shape} at {path!r}, and nothing tells "
                "its dims\n"
                "  the update never combines it with a parameter or a gradient elementwise\n"
                f"  {_INSTEAD.get(maker.removeprefix('optax.'), 'leave its part out, or use an optimizer of md.optim')}"
            )
        dims_of.append(found[alike(value)][0] if value.shape else ())
    return tuple(dims_of)


_INSTEAD = {
    "clip_by_global_norm": "md.optim.with_clipping(optimizer, max_norm) clips by the norm of all elements",
    "scale_by_trust_ratio": "md.optim.lamb and md.optim.lars take the norms of whole tensors",
    "scale_by_factored_rms": "md.optim.adafactor takes the means of whole tensors",
    "clip_by_block_rms": "md.optim.adafactor clips by the RMS of whole tensors (clip_threshold)",
    "apply_if_finite": "md.Workload.train_step(guard=True) leaves a step out that is not finite",
    "zero_nans": "md.where(md.isnan(g), 0.0, g), on each gradient before the update",
    "normalize_by_update_norm": "md.optim.global_norm(grads) is the norm of all elements, to divide by",
    "scale_by_param_block_rms": "md.optim.adafactor scales by the RMS of whole tensors (scale_by_parameter)",
}


def _refusal(what: str, where: Callable[[], tuple[str, str]]) -> md.MeshdslError:
    """The error for an operation, and the function and file that asked for it."""
    name, file = where()
    source = f"optax.{name}" if "optax" in file else name
    instead = _INSTEAD.get(
        name, "write the update with md operations: md.optim.Optimizer(init, update) is two functions"
    )
    return md.MeshdslError(
        f"{source} cannot be used under a layout: it is not elementwise\n"
        f"  it computes {what}, and a device would do so with its own shard alone\n"
        f"  {instead}"
    )
