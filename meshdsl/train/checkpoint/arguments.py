"""Checks what the user passes to checkpoints: options and steps, trees of tensors by path, configurations, keys."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...errors import LayoutError, ShapeError, nearest, shown
from ...ir import Type
from ...layouts import Layout, Mesh
from ...lowering import Program
from ...trace import KEY_WORD, Tensor, as_tensor, tree
from .manifest import DTYPES, PATH_LIMIT, STEP_LIMIT, Manifest


def check_options(directory: Any, keep: Any, chunk_bytes: Any, report: Any, seconds: Any) -> None:
    """Raises `ShapeError` unless these are valid options of `Checkpoints`."""
    if keep is not None and not _is_count(keep):
        raise ShapeError(f"keep must be an integer from 1, or None to keep all steps; got {keep!r}")
    if not _is_count(chunk_bytes):
        raise ShapeError(f"chunk_bytes must be an integer from 1, got {chunk_bytes!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ShapeError(f"seconds must be a number above 0, got {seconds!r}")
    if report is not None and not callable(report):
        raise ShapeError(f"report must be a function of one text, got {report!r}")
    if not isinstance(directory, str | Path) or "\0" in str(directory):
        raise ShapeError(f"directory must be a path, got {directory!r}")


def is_url(directory: Any) -> bool:
    """True for an address such as `gs://bucket/run`."""
    return isinstance(directory, str | Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(directory)) is not None


def check_no_url(directory: str | Path) -> None:
    """Raises `ShapeError` for the URL of an object store, which a file system would take for a folder `gs:`."""
    if is_url(directory):
        raise ShapeError(
            f"directory is the URL {str(directory)!r}; this reads and writes files of a directory\n"
            "  mount the bucket as a directory (gcsfuse, mountpoint-s3), or write to a disk and copy what is complete"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_step(step: Any) -> None:
    """Raises `ShapeError` unless the value is a valid step number."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_LIMIT:
        raise ShapeError(f"a step must be an integer from 0 to {STEP_LIMIT}, got {step!r}")


def parse_target(mesh: Any, layout: Any, program: Any) -> tuple[Mesh | None, Layout | None, Program | None]:
    """Mesh, layout and program of a restore; text is converted to `Mesh` and `Layout` as in `md.compile`."""
    if program is None:
        mesh = None if mesh is None else Mesh(mesh)
        layout = layout if layout is None or isinstance(layout, Layout) else Layout(layout)
        return mesh, layout, None
    if not isinstance(program, Program):
        raise ShapeError(f"program= must be the result of compiled.program(*args), got {type(program).__name__}")
    if mesh is not None or layout is not None:
        raise LayoutError("a program already has a mesh and a layout\n  pass program=, or mesh= and layout=, not both")
    return None, None, program


def warn(message: str) -> None:
    """Warn with this text, at the line that called `Checkpoints`."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def flat(values: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, such as `params/mlp/w1`. Raises `ShapeError` if two have the same path.

    >>> flat({"params": {"w": 1}, "step": 2})
    {'params/w': 1, 'step': 2}
    """
    by_path: dict[str, Any] = {}
    try:
        leaves = tree.tree_flatten_with_path(values)[0]
    except (SystemError, RecursionError):
        raise ShapeError("this tree is nested thousands of levels deep\n  save a flatter tree") from None
    except ValueError as error:  # keys of one dict that cannot be sorted, such as 1 and "1"
        raise ShapeError(f"this is not a tree of tensors: {str(error).splitlines()[0]}") from None
    for keys, leaf in leaves:
        path = tree.keystr(keys, simple=True, separator="/") or "value"
        if path in by_path:
            raise ShapeError(
                f"two tensors of the tree have the path {path!r}\n"
                "  a checkpoint identifies tensors by path; rename the key that contains '/'"
            )
        by_path[path] = leaf
    return by_path


def _tensors_of(values: Any) -> dict[str, Tensor]:
    """The tensors of a tree to save, by path, sorted by path; numbers become scalar tensors.

    Raises `ShapeError` for other leaves, and `TraceError` for traced tensors.
    """
    tensors: dict[str, Tensor] = {}
    for path, leaf in flat(values).items():
        if isinstance(leaf, Type):
            raise ShapeError(f"{path} is the spec {leaf}, which has no values to save; pass the tensor")
        try:
            x = as_tensor(leaf)
        except ShapeError as error:
            raise ShapeError(f"{path}: {error.args[0]}") from None
        except TypeError:
            raise ShapeError(
                f"{path}: expected a tensor or a number, got {type(leaf).__name__} of {leaf.dtype}\n"
                "  for a JAX random key, save jax.random.key_data(key) with dims, or use md.random.key"
            ) from None
        if isinstance(x.stored, jax.Array) and x.stored.is_deleted():
            raise ShapeError(
                f"{path} is {x.type}, and its memory was donated to a compiled function (donate=)\n"
                "  save the tensor that this function returned instead"
            )
        if x.dtype.name not in DTYPES:
            raise ShapeError(f"{path} is {x.type}, and checkpoints support only {', '.join(DTYPES)}; cast it first")
        if len(path) > PATH_LIMIT:
            raise ShapeError(f"the path {path[:60]!r}... has {len(path)} characters; the limit is {PATH_LIMIT}")
        tensors[path] = Tensor(x.dims, x.dtype, array=jax.numpy.asarray(x.stored))
    return dict(sorted(tensors.items()))


def _json_value(value: Any, where: str) -> Any:
    """The value as plain JSON types; tuples become lists. Raises `ShapeError` if JSON cannot store it exactly.

    >>> _json_value({"betas": (0.9, 0.999)}, "config")
    {'betas': [0.9, 0.999]}
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, where) for item in value]
    if isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ShapeError(
        f"{where} is {shown(value)}, and config and data of a checkpoint are stored as JSON: finite numbers, text, "
        "true, false, null, lists, and objects whose keys are text"
    )


def checked_state(values: Any, config: Any, data: Any, key: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON values of a step and its tensors by path; raises `ShapeError` for values that cannot be stored."""
    words = None if key is None else _key_words(key)
    fields = {"config": _json_value(config, "config"), "data": _json_value(data, "data"), "key": words}
    return fields, _tensors_of(values)


def _key_words(key: Any) -> tuple[int, ...]:
    """The words of a random key. Raises `ShapeError` for anything else."""
    if not isinstance(key, Tensor) or key.dims != (KEY_WORD,) or key.dtype != np.uint32:
        got = key.type if isinstance(key, Tensor) else type(key).__name__
        raise ShapeError(f"key= must be a random key, as from md.random.key(seed), got {got}")
    return tuple(key.numpy().tolist())


def check_fit(stored: Manifest, like: Mapping[str, Type], step: int) -> None:
    """Raises `ShapeError` listing every tensor of `like` that the checkpoint lacks or stores with another type."""
    problems: list[str] = []
    for path, spec in like.items():
        entry = stored.tensors.get(path)
        if entry is None:
            problems.append(f"{path}: is missing; {nearest(path, [ascii(p)[1:-1] for p in stored.tensors])}")
        elif (set(entry.type.dims), entry.type.dtype) != (set(spec.dims), spec.dtype):
            problems.append(f"{path}: is {entry.type} in the checkpoint and {spec} in like=")
        elif jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            problems.append(f"{path}: is {spec}, and JAX keeps 64-bit types only with jax_enable_x64")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ShapeError(
            f"the checkpoint of step {step} does not match like=\n{listed}\n"
            "  restore(step, like=None) restores everything that is stored, by path"
        )
