"""The arguments of an imported function as trees: arrays, and leaves that are no arrays, which stay as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl as md

from .hints import is_annotated

tree = jax.tree_util


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


class Arguments:
    """The structure of the arguments that a function was imported for. Arrays are numbered in the order of leaves.

    `arrays` are those that were given, `labels` their paths, such as `params/layers/0/w`, `annotations` what has words
    for their axes: the container of each, or the array itself.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any]) -> None:
        self.called = getattr(f, "__name__", "the imported function")
        with_paths, self.structure = tree.tree_flatten_with_path(tuple(args))
        self.static = {i: x for i, (_, x) in enumerate(with_paths) if not is_array(x)}
        self.leaf_of = [i for i in range(len(with_paths)) if i not in self.static]
        self.arrays = [with_paths[i][1] for i in self.leaf_of]
        paths, annotations = _annotated(args)
        parameters = _parameters(f)
        self.labels = [_label(parameters, paths[i]) for i in self.leaf_of]
        self.annotations = [annotations[i] for i in self.leaf_of]

    def filled(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with other arrays, and the leaves that are no arrays."""
        full = {**self.static, **dict(zip(self.leaf_of, arrays, strict=True))}
        return tree.tree_unflatten(self.structure, [full[i] for i in range(len(full))])

    def placed(self, values: Mapping[int, Any], argument: int | None = None) -> Any:
        """The arguments, or one of them, with values in the place of some arrays, by number, and None elsewhere."""
        full: list[Any] = [None] * self.structure.num_leaves
        for number, value in values.items():
            full[self.leaf_of[number]] = value
        args = tree.tree_unflatten(self.structure, full)
        return args if argument is None else args[argument]

    def taken(self, args: Sequence[Any]) -> list[Any]:
        """The arrays of other arguments; raises `ShapeError` if they are not alike."""
        leaves, structure = tree.tree_flatten(tuple(args))
        if structure != self.structure or [i for i, x in enumerate(leaves) if is_array(x)] != self.leaf_of:
            raise md.ShapeError(f"{self.called} was imported for {self.structure}, and these are {structure}")
        for i, x in self.static.items():
            if not (leaves[i] is x or leaves[i] == x):
                raise md.ShapeError(
                    f"{self.called} was imported with {x!r}, and this is {leaves[i]!r}\n"
                    "  import it again, or pass an array: jnp.asarray(x)"
                )
        arrays = [leaves[i] for i in self.leaf_of]
        for known, x, label in zip(self.arrays, arrays, self.labels, strict=True):
            if np.shape(x) != np.shape(known):
                raise md.ShapeError(f"{label} has the shape {np.shape(known)}, got {np.shape(x)}")
        return arrays


def _annotated(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """For each leaf, its path, which ends at a container of it alone, and that container or the leaf."""
    paths, annotations = list[Any](), list[Any]()
    for path, box in tree.tree_flatten_with_path(tuple(args), is_leaf=is_annotated)[0]:
        inside = tree.tree_flatten_with_path(box)[0]
        alone = len(inside) == 1
        paths += [path if alone else (*path, *rest) for rest, _ in inside]
        annotations += [box if alone else x for _, x in inside]
    return paths, annotations


def _parameters(f: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return []


def _label(parameters: Sequence[str], path: Any) -> str:
    """The path of an input, such as `params/layers/0/w`; that of a Flax variable ends before its value."""
    first, *rest = path
    if rest and getattr(rest[-1], "name", "") in ("value", "raw_value"):
        rest = rest[:-1]
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))).lstrip(".") for k in rest]
    start = [*parameters, *map(str, range(len(parameters), first.idx + 1))][first.idx]
    return "/".join([start, *keys])
