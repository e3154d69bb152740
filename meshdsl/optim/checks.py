"""Checks of what an optimizer is called with: rates, gradients, and the state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

import meshdsl as md

from .per_tensor import path_of

LearningRate = float | Callable[[md.Tensor], md.Tensor]


def is_tensor(x: object) -> bool:
    return isinstance(x, md.Tensor)


def checked_rate(learning_rate: LearningRate) -> None:
    """Raises `ShapeError` for a number that is no learning rate; a schedule is checked at its update."""
    if not callable(learning_rate) and not hasattr(learning_rate, "__float__"):
        raise md.ShapeError(f"the learning rate is a number or a function, got {type(learning_rate).__name__}")
    if isinstance(learning_rate, int | float) and not 0 <= learning_rate < math.inf:
        problem = "finite" if learning_rate == math.inf else "at least 0"
        raise md.ShapeError(f"the learning rate must be {problem}, got {learning_rate}")


def checked_decays(**decays: float) -> None:
    """Raises `ShapeError` for a decay rate of moments outside 0 to below 1."""
    for name, value in decays.items():
        if isinstance(value, int | float) and not 0 <= value < 1:
            raise md.ShapeError(f"{name} is from 0 to below 1, got {value}")


def check_state_dtype(dtype: Any) -> None:
    """Raises `ShapeError` unless the dtype of an optimizer's moments is floating, or None."""
    if dtype is not None and not md.spec([], dtype).dtype.name.startswith(("float", "bfloat")):
        raise md.ShapeError(f"state_dtype is the floating dtype of an optimizer's moments, got {dtype!r}")


def check_update(params: Any, grads: Any, state: Any, init: Callable[[Any], Any]) -> None:
    """Raises `ShapeError` unless gradients match parameters in path and dims, and the state what `init` creates.

    Dtypes are free: parameters may have been cast since.
    """
    tensors, gradients = _by_path(params), _by_path(grads)
    for path, p in tensors.items():
        if not is_tensor(p):
            raise md.ShapeError(f"an update is of a tree of tensors; {path or 'params'} is a {type(p).__name__}")
    if tensors.keys() != gradients.keys():
        raise md.ShapeError(
            "an update needs one gradient for each parameter\n"
            f"  parameters without gradient: {_listed(tensors.keys() - gradients.keys())}\n"
            f"  gradients without parameter: {_listed(gradients.keys() - tensors.keys())}\n"
            "  pass the same params to both: grads = md.grad(loss)(params, ...)"
        )
    for path, p in tensors.items():
        g = gradients[path]
        if not is_tensor(g) or set(g.dims) != set(p.dims):
            raise md.ShapeError(
                "a gradient must have the dims of its parameter; "
                f"{path!r} is {p.type} and its gradient is {_type_of(g)}"
            )
    _check_state(state, init, params)


def _check_state(state: Any, init: Callable[[Any], Any], params: Any) -> None:
    if not isinstance(state, dict):
        raise md.ShapeError(f"an optimizer's state is a dict, got {type(state).__name__}\n  {_WAY_OUT}")
    leaves, structure = jax.tree.flatten(params)
    expected = _state_of(init, structure, tuple(md.spec(p.dims, p.dtype) for p in leaves))
    tensors = _by_path(state)
    missing, extra = _entries(expected, tensors), _entries(tensors, expected)
    misfits = [
        path
        for path, x in tensors.items()
        if path in expected and not (is_tensor(x) and set(x.dims) == set(expected[path].dims))
    ]
    problems = [f"has no {_quoted(missing)}; it has: {', '.join(state)}"] if missing else []
    problems += [f"has {_quoted(extra)}, which this optimizer does not use"] if extra else []
    problems += [f"has {path!r} as {_type_of(tensors[path])}, expected {expected[path]}" for path in misfits]
    if problems:
        listed = "\n  it ".join(problems)
        raise md.ShapeError(f"the optimizer's state {listed}\n  {_WAY_OUT}")


_WAY_OUT = "create it with init of the same optimizer, with the same options, from these parameters"


@functools.lru_cache(maxsize=256)
def _state_of(init: Callable[[Any], Any], structure: Any, types: tuple[Any, ...]) -> dict[str, Any]:
    """The types of the state that `init` creates, by path."""
    state = md.eval_shape(init, structure.unflatten(types))
    return {path_of(keys): type for keys, type in jax.tree_util.tree_leaves_with_path(state)}


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_tensor)}


def _entries(paths: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """The paths that are not among the others; an entry of which no path is among them is named once."""
    known = {path.partition("/")[0] for path in others}
    firsts = ((path, path.partition("/")[0]) for path in paths if path not in others)
    return list(dict.fromkeys(path if first in known else first for path, first in firsts))


def _type_of(x: Any) -> str:
    return str(x.type) if is_tensor(x) else type(x).__name__


def _listed(paths: Any) -> str:
    return ", ".join(sorted(paths)) or "none"


def _quoted(paths: list[str]) -> str:
    return ", ".join(map(repr, paths))
