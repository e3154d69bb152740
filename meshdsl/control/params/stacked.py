"""Parameters with one more dim: of a function that runs once per layer (`md.layers`) or place (`md.vmap`) of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ...dims import Dim
from ...errors import ShapeError, at
from ...ir import Type
from ...ops.creation import zeros_like
from ...trace import Tensor, eval_shape, tree
from .param import Declared, ModelRun, running, value_of


def declared_inside(run: ModelRun, dim: Dim, f: Callable[..., Any], *args: Any) -> tuple[dict[str, Declared], Any]:
    """The parameters that f declares, with `dim` first; and the types of its results."""
    inner = ModelRun(None, path=run.path, stacked=(*run.stacked, dim), compute=run.compute)

    def discover(*args: Any) -> Any:
        with running(inner):
            return f(*args)

    return inner.declared, eval_shape(discover, *args)


def without(dim: Dim, xs: Any) -> Any:
    """The types of the tensors of a pytree, without a dim; other leaves unchanged."""

    def one(leaf: Any) -> Any:
        return Type(tuple(d for d in leaf.dims if d != dim), leaf.dtype) if isinstance(leaf, Tensor) else leaf

    return tree.tree_map(one, xs)


def with_slices(run: ModelRun, dim: Dim, f: Callable[..., Any]) -> Callable[..., Any]:
    """The function of slices along a dim, by path, and f's arguments, that runs f with these parameters."""

    def apply(slices: dict[str, Tensor], *args: Any) -> Any:
        with running(dataclasses.replace(run, declared={}, problems={}, stacked=(*run.stacked, dim), slices=slices)):
            return f(*args)

    return apply


def weights_of(run: ModelRun, declared: Mapping[str, Declared]) -> dict[str, Tensor]:
    """The stacked parameters of a run, by path; zeros while parameters are discovered."""
    weights: dict[str, Tensor] = {}
    for path, d in declared.items():
        if path in run.slices:
            weights[path] = run.slices[path]
        elif run.values is None:
            outer = len(run.stacked)
            weights[path] = zeros_like(Type(d.dims[outer:], d.dtype))
        else:
            weights[path] = value_of(run, path, d.type)
    return weights


def declare(run: ModelRun, declared: Mapping[str, Declared], inside: str) -> None:
    """Add parameters to those that this run of a model has created; raises `ShapeError` for a path twice."""
    for path, d in declared.items():
        if path in run.declared:
            raise at(
                ShapeError(
                    f"the parameter {path!r} is created twice\n"
                    f"  the first is at {run.declared[path].where}, the second inside {inside}\n"
                    "  put one of them in an md.scope"
                ),
                d.where,
            )
        run.declared[path] = d
