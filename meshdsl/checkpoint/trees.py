"""What a user hands over, checked: trees of tensors by path, configurations, random keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..errors import CheckpointError, ShapeError, nearest
from ..ir import Type
from ..ops.random import WORD
from ..trace import as_tensor, tree
from ..values import Tensor
from .manifest import DTYPES, PATH_LIMIT, Manifest, header_limit
from .strict import plain

__all__ = ["check_fit", "check_header", "flat", "json_value", "key_words", "tensors_of"]

_AT = "\n  at "


def flat(values: Any) -> dict[str, Any]:
    """The leaves of a pytree by path; `params/mlp/w1`. Raises `ShapeError` when two have the same path.

    >>> flat({"params": {"w": 1}, "step": 2})
    {'params/w': 1, 'step': 2}
    """
    found: dict[str, Any] = {}
    try:
        leaves = tree.tree_flatten_with_path(values)[0]
    except ValueError as error:  # keys of one dict that cannot be sorted, such as 1 and "1"
        raise ShapeError(f"this is no tree of tensors: {str(error).splitlines()[0]}") from None
    for keys, leaf in leaves:
        path = tree.keystr(keys, simple=True, separator="/") or "value"
        if path in found:
            raise ShapeError(
                f"two tensors of the tree have the path {path!r}\n"
                "  a checkpoint knows tensors by their paths; rename a key that contains '/'"
            )
        found[path] = leaf
    return found


def tensors_of(values: Any) -> dict[str, Tensor]:
    """The tensors of a tree that is saved, by path, in the order of paths; numbers become tensors without dims.

    Raises `ShapeError` for anything else, `TraceError` for a traced tensor.
    """
    found: dict[str, Tensor] = {}
    for path, leaf in flat(values).items():
        if isinstance(leaf, Type):
            raise ShapeError(f"{path} is the spec {leaf}, which has no values to save; pass the tensor")
        try:
            x = as_tensor(leaf)
        except ShapeError as error:  # its second line names the user's line already, and the boundary will again
            raise ShapeError(f"{path}: {str(error.args[0]).partition(_AT)[0]}") from None
        except TypeError:
            raise ShapeError(
                f"{path}: expected a tensor or a number, got {type(leaf).__name__} of {leaf.dtype}\n"
                "  of a random key of JAX, save jax.random.key_data(key) with dims, or use md.random.key"
            ) from None
        if isinstance(x.stored, jax.Array) and x.stored.is_deleted():
            raise ShapeError(
                f"{path} is {x.type}, and its memory is gone: a compiled function took it over (donate=)\n"
                "  save what that call returned in its place"
            )
        if x.dtype.name not in DTYPES:
            raise ShapeError(f"{path} is {x.type}, and checkpoints hold: {', '.join(DTYPES)}; cast it first")
        if len(path) > PATH_LIMIT:
            raise ShapeError(f"the path {path[:60]!r}... has {len(path)} characters, and {PATH_LIMIT} are the most")
        found[path] = Tensor(x.dims, x.dtype, array=jax.numpy.asarray(x.stored))
    return dict(sorted(found.items()))


def json_value(value: Any, what: str) -> Any:
    """A copy of what JSON can hold and give back; tuples become lists. Raises `ShapeError` for anything else."""
    try:
        return plain(value, what)
    except CheckpointError as error:
        raise ShapeError(f"the {what} of a checkpoint is kept as JSON; {error.args[0]}") from None


def check_header(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises `ShapeError` when configuration and data are longer than a reader takes from a stranger."""
    stored = sum(x.dtype.itemsize * math.prod(x.shape) for x in tensors.values())
    there, most = len(json.dumps(fields)), header_limit(stored) // 2  # the other half is for the sizes of the files
    if there > most:
        raise ShapeError(
            f"config and data take {there} bytes as JSON; beside {stored} bytes of tensors, {most} are the most\n"
            "  keep what is large in a file of its own, and its name here"
        )


def key_words(key: Any) -> tuple[int, ...]:
    """The words of a random key. Raises `ShapeError` when it is none."""
    if not isinstance(key, Tensor) or key.dims != (WORD,) or key.dtype != np.uint32:
        there = key.type if isinstance(key, Tensor) else type(key).__name__
        raise ShapeError(f"key= is a random key of md.random.key(seed), got {there}")
    return tuple(key.numpy().tolist())


def check_fit(stored: Manifest, wanted: Mapping[str, Type], step: int) -> None:
    """Raises `ShapeError` with everything about `like` that is not in the checkpoint, or is another type there."""
    problems: list[str] = []
    for path, kind in wanted.items():
        entry = stored.tensors.get(path)
        if entry is None:
            problems.append(f"{path}: is not there; {nearest(path, stored.tensors)}")
        elif (set(entry.type.shape), entry.type.dtype) != (set(kind.shape), kind.dtype):
            problems.append(f"{path}: is {entry.type} there, and like= says {kind}")
        elif jax.dtypes.canonicalize_dtype(kind.dtype) != kind.dtype:
            problems.append(f"{path}: is {kind}, and JAX keeps 64-bit types only with jax_enable_x64")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ShapeError(
            f"the checkpoint of step {step} does not fit what is asked for\n{listed}\n"
            "  restore(step, like=None) gives what is there, by path"
        )
