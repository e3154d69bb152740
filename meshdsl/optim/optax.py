"""`from_optax`: optax transformations with elementwise updates as md optimizers.

optax works on arrays without dim names. Its functions are traced to a jaxpr with the shapes of the parameters, and the
jaxpr is rebuilt from md operations, so the update becomes part of the graph. This is correct under every layout only if
each operation is elementwise: a sum, sort or reshape would apply to one device's shard. Other transformations raise an
error that names the function. optax is not imported; any object with its `init` and `update` works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md

from .checks import check_update
from .jaxpr import Flat, flatten
from .optimizers import Optimizer, zero
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

    The state is a dict: `step`, and under `optax` the arrays of optax's state by their path, such as `0/mu/w`. A state
    array has the dims of the parameter that the update combines it with.

    Raises `MeshdslError` at the first `init` or `update` if the transformation combines elements of one tensor
    (`optax.clip_by_global_norm`, and optax's LARS, LAMB, Adafactor and Muon) or branches (`optax.MultiSteps`); the
    error names a replacement. Also raises it if the dims of a state array cannot be inferred.
    """

    if not callable(getattr(transformation, "init", None)) or not callable(getattr(transformation, "update", None)):
        raise md.ShapeError(
            f"md.optim.from_optax takes an optax transformation, such as optax.adam(1e-3); got {transformation!r}"
        )

    @lru_cache(maxsize=8)
    def plan(structure: Any, types: tuple[Any, ...]) -> _Plan:
        return _plan(transformation, structure, types)

    def plan_for(params: Any) -> _Plan:
        leaves, structure = jax.tree.flatten(params)
        return plan(structure, tuple(md.spec(p.dims, p.dtype) for p in leaves))

    def init(params: Any) -> dict[str, Any]:
        traced = plan_for(params)
        state = traced.init.run(jax.tree.leaves(params), traced.state)
        return {"step": zero(), "optax": dict(zip(traced.paths, state, strict=True))}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        traced = plan_for(params)
        leaves, structure = jax.tree.flatten(params)
        old_state = [state["optax"][path] for path in traced.paths]
        dims = [p.dims for p in leaves]
        results = traced.update.run([*jax.tree.leaves(grads), *old_state, *leaves], [*dims, *traced.state])
        new_params = [md.cast(p + u, p.dtype) for p, u in zip(leaves, results, strict=False)]
        inner = dict(zip(traced.paths, results[len(leaves) :], strict=True))
        return structure.unflatten(new_params), {"step": state["step"] + 1, "optax": inner}

    return Optimizer(init, update)


Dims = tuple[md.Dim, ...]


@dataclass(frozen=True)
class _Plan:
    """A transformation traced for given parameter types: both functions, and the paths and dims of its state."""

    init: Flat
    update: Flat
    paths: tuple[str, ...]
    state: tuple[Dims, ...]


def _plan(transformation: Any, structure: Any, types: tuple[Any, ...]) -> _Plan:
    arrays = [jax.ShapeDtypeStruct(tuple(d.size for d in t.dims), t.dtype) for t in types]
    params = structure.unflatten(arrays)
    init_jaxpr, state = jax.make_jaxpr(transformation.init, return_shape=True)(params)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise md.MeshdslError(
                f"{_name(transformation)} cannot be used: its state {path_of(keys)!r} is a random key, {leaf.dtype}\n"
                "  numbers drawn by optax would depend on the shard's shape\n"
                "  draw them with md.random, which gives the same numbers under every layout"
            )
    state_paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(state)]
    update_jaxpr, (_, new_state) = _update(transformation, params, state)
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        raise md.MeshdslError(
            "the update of the optax transformation changes the structure of its state\n"
            f"  before: {jax.tree.structure(state)}\n  after: {jax.tree.structure(new_state)}"
        )
    if len(set(state_paths)) < len(state_paths):
        paths = ", ".join(sorted(state_paths))
        raise md.MeshdslError(f"two arrays of the optax state have the same path; the paths are {paths}")
    init, update = flatten(init_jaxpr, _refusal), flatten(update_jaxpr, _refusal)
    state_dims = _state_dims(update, structure, types, state_paths, _name(transformation))
    return _Plan(init, update, tuple(state_paths), state_dims)


def _update(transformation: Any, params: Any, state: Any) -> Any:
    try:
        return jax.make_jaxpr(transformation.update, return_shape=True)(params, state, params)
    except TypeError as error:
        raise md.MeshdslError(
            f"the optax transformation needs more than gradients, state and parameters: {error}\n"
            "  md optimizers do not receive the loss or the loss function\n"
            "  use a transformation that needs neither, or an optimizer of md.optim"
        ) from error


def _name(transformation: Any) -> str:
    """The optax function that created a transformation, such as "optax.adam"."""
    maker = getattr(transformation.update, "__qualname__", "").partition(".<locals>")[0]
    own = "optax" not in getattr(transformation.update, "__module__", "")
    return "the transformation" if own or not maker else f"optax.{maker}"


def _state_dims(
    update: Flat, structure: Any, types: tuple[Any, ...], state_paths: list[str], maker: str
) -> tuple[Dims, ...]:
    """The dims of each state array, inferred from the parameters that it is combined with."""
    n = len(types)
    names = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(structure.unflatten(range(n)))]
    old_state, new_state = update.ins[n : len(update.ins) - n], update.outs[n:]
    pairs = list(zip(update.ins[:n], update.outs[:n], strict=True))
    pairs += list(zip(update.ins[:n], update.ins[len(update.ins) - n :], strict=True))
    pairs += list(zip(old_state, new_state, strict=True))
    group_of = update.groups(pairs)
    dims_by_group: dict[Any, tuple[Dims, str]] = {}
    for value, kind, name in zip(update.ins, types, names, strict=False):
        dims, other_name = dims_by_group.setdefault(group_of(value), (kind.dims, name))
        if dims != kind.dims and kind.dims:
            raise md.MeshdslError(
                f"the optax transformation combines elements of the parameters {other_name!r} and {name!r}\n"
                f"  their dims are {dims} and {kind.dims}, which a layout may shard differently\n"
                "  write the update with md operations: md.optim.Optimizer(init, update) is two functions"
            )
    dims_of: list[Dims] = []
    for value, path in zip(old_state, state_paths, strict=True):
        if value.shape and group_of(value) not in dims_by_group:
            raise md.MeshdslError(
                f"{maker} cannot be used: the dims of its state array {path!r} of shape {value.shape} are unknown\n"
                "  the update never combines it with a parameter or a gradient elementwise\n"
                f"  {_INSTEAD.get(maker.removeprefix('optax.'), 'remove this part, or use an optimizer of md.optim')}"
            )
        dims_of.append(dims_by_group[group_of(value)][0] if value.shape else ())
    return tuple(dims_of)


_INSTEAD = {
    "clip_by_global_norm": "use md.optim.with_clipping(optimizer, max_norm), which clips by the norm of all elements",
    "scale_by_trust_ratio": "use md.optim.lamb or md.optim.lars, which take norms of whole tensors",
    "scale_by_factored_rms": "use md.optim.adafactor, which takes means of whole tensors",
    "clip_by_block_rms": "use md.optim.adafactor, which clips by the RMS of whole tensors (clip_threshold)",
    "apply_if_finite": "use md.Workload.train_step(guard=True), which skips steps that are not finite",
    "zero_nans": "apply md.where(md.isnan(g), 0.0, g) to each gradient before the update",
    "normalize_by_update_norm": "divide by md.optim.global_norm(grads), the norm of all elements",
    "scale_by_param_block_rms": "use md.optim.adafactor, which scales by the RMS of whole tensors (scale_by_parameter)",
}


_INSTEAD_OF = {
    "cond of": "use md.optim.with_accumulation(optimizer, steps) for optax.MultiSteps; write other branches with "
    "md.cond in an md.optim.Optimizer",
    "with a constant array": "optax.contrib.muon multiplies whole matrices: use md.optim.muon, which is equal under "
    "every layout",
}


def _refusal(what: str, where: Callable[[], tuple[str, str]]) -> md.MeshdslError:
    """The error for an operation that is not elementwise; `where` gives the function and file that uses it."""
    name, file = where()
    source = f"optax.{name}" if "optax" in file else name
    of_kind = [way_out for begins, way_out in _INSTEAD_OF.items() if what.startswith(begins) and "optax" not in file]
    instead = (
        of_kind[0]
        if of_kind
        else _INSTEAD.get(
            name, "write the update with md operations: md.optim.Optimizer(init, update) is two functions"
        )
    )
    return md.MeshdslError(
        f"{source} cannot be used under a layout: it is not elementwise\n"
        f"  it computes {what}, which a device would apply to its own shard only\n"
        f"  {instead}"
    )
