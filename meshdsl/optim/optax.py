"""`from_optax`: optax transformations with elementwise updates as md optimizers.

optax works on arrays without dim names. Its functions are traced to a jaxpr with the shapes of the parameters, and the
jaxpr is rebuilt from md operations, so the update becomes part of the graph. This is correct under every layout only if
each operation is elementwise: a sum, sort or reshape would apply to one device's shard. Other transformations raise an
error that names the function. optax is not imported; any object with its `init` and `update` works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md

from .checks import check_update
from .elementwise import Kind, check_elementwise, run
from .optimizers import Optimizer, recorded, zero
from .per_tensor import path_of


@recorded
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
    array has the dims of the parameter at the end of its path.

    What follows from the step and constants alone, such as a schedule, may be any function. Raises `MeshdslError` at
    the first `init` or `update` if the transformation combines elements of one tensor (`optax.clip_by_global_norm`, and
    optax's LARS, LAMB, Adafactor and Muon) or branches over tensors (`optax.MultiSteps`); the error names another.
    Also raises it if a state array is in the place of no parameter of its shape.
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
        state = traced.init(jax.tree.leaves(params), list(traced.state.values()))
        return {"step": zero(), "optax": dict(zip(traced.state, state, strict=True))}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        traced = plan_for(params)
        leaves, structure = jax.tree.flatten(params)
        old_state = [state["optax"][path] for path in traced.state]
        dims = [*(p.dims for p in leaves), *traced.state.values()]
        results = traced.update([*jax.tree.leaves(grads), *old_state, *leaves], dims)
        new_params = [md.cast(p + u, p.dtype) for p, u in zip(leaves, results, strict=False)]
        inner = dict(zip(traced.state, results[len(leaves) :], strict=True))
        return structure.unflatten(new_params), {"step": state["step"] + 1, "optax": inner}

    return Optimizer(init, update)


Dims = tuple[md.Dim, ...]
Run = Callable[[Sequence[md.Tensor], Sequence[Dims]], list[md.Tensor]]  # of tensors, with the dims of results


@dataclass(frozen=True)
class _Plan:
    """A transformation traced for given parameter types: both functions, and the dims of its state by path."""

    init: Run
    update: Run
    state: dict[str, Dims]


def _plan(transformation: Any, structure: Any, types: tuple[Any, ...]) -> _Plan:
    arrays = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
    params = structure.unflatten(arrays)
    init_jaxpr, state = jax.make_jaxpr(transformation.init, return_shape=True)(params)
    leaves = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise md.MeshdslError(
                f"{_name(transformation)} cannot be used: its state {path_of(keys)!r} is a random key, {leaf.dtype}\n"
                "  numbers drawn by optax would depend on the shard's shape\n"
                "  draw them with md.random, which gives the same numbers under every layout"
            )
        if path_of(keys) in leaves:
            raise md.MeshdslError(f"two arrays of the optax state have the same path, {path_of(keys)}")
        leaves[path_of(keys)] = leaf
    update_jaxpr, (_, new_state) = _update(transformation, params, state)
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        raise md.MeshdslError(
            "the update of the optax transformation changes the structure of its state\n"
            f"  before: {jax.tree.structure(state)}\n  after: {jax.tree.structure(new_state)}"
        )
    for jaxpr in (init_jaxpr, update_jaxpr):
        if Kind.ARRAY in check_elementwise(jaxpr, _refusal):
            raise _refusal("with a constant array in its state", "the transformation", "")
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(structure.unflatten(range(len(types))))]
    named = {path: t.dims for path, t in zip(paths, types, strict=True)}
    state_dims = {path: _state_dims(path, leaf.shape, named, _name(transformation)) for path, leaf in leaves.items()}

    def rebuilt(jaxpr: Any) -> Run:
        return lambda tensors, dims: run(jaxpr, tensors, dims, lambda a, b: _combined(named, a, b))

    plan = _Plan(rebuilt(init_jaxpr), rebuilt(update_jaxpr), state_dims)
    state_types = [md.spec(state_dims[path], leaf.dtype) for path, leaf in leaves.items()]
    dims = [*named.values(), *state_dims.values()]
    md.eval_shape(lambda *xs: plan.update(xs, dims), *types, *state_types, *types)
    return plan


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


def _state_dims(path: str, shape: tuple[int, ...], params: dict[str, Dims], maker: str) -> Dims:
    """The dims of a state array: those of the parameter in whose place it is, or of all parameters of its shape."""
    fitting = {name: dims for name, dims in params.items() if tuple(d.size for d in dims) == tuple(shape)}
    here = [dims for name, dims in fitting.items() if f"/{path}".endswith(f"/{name}")]
    choices = set(here or fitting.values())
    if shape and len(choices) != 1:
        raise md.MeshdslError(
            f"{maker} cannot be used: the dims of its state array {path!r} of shape {tuple(shape)} are unknown\n"
            "  it is in the place of no parameter of this shape\n"
            f"  {_INSTEAD.get(maker.removeprefix('optax.'), 'remove this part, or use an optimizer of md.optim')}"
        )
    return choices.pop() if shape else ()


def _combined(params: dict[str, Dims], a: Dims, b: Dims) -> md.MeshdslError:
    """The error for an update that combines tensors of these dims."""
    names = sorted(next(name for name, dims in params.items() if dims == own) for own in (a, b))
    return md.MeshdslError(
        f"the optax transformation combines elements of the parameters {names[0]!r} and {names[1]!r}\n"
        f"  their dims are {params[names[0]]} and {params[names[1]]}, which a layout may shard differently\n"
        "  write the update with md operations: md.optim.Optimizer(init, update) is two functions"
    )


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


def _refusal(what: str, name: str, file: str) -> md.MeshdslError:
    """The error for an operation that is not elementwise, in this function and file."""
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
