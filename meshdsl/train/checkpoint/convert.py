"""Import and export of safetensors and orbax, to exchange tensors with other programs. Each format needs an extra.

Dim names and the SHA-256 of each tensor are stored in the format's metadata. For a file without them, the caller gives
the dims, and corruption cannot be detected. Each tensor is held unsharded in one host's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...dims import DimsLike
from ...errors import CheckpointError, SaveError, ShapeError, nearest, short
from ...errors.installed import optional
from ...trace import Tensor, tensor
from .arguments import check_no_url, check_step
from .checkpoints import Checkpoints, OpenStep
from .manifest import StoredTensor
from .object_store import OWN_FORMAT, library_errors, nested

_SAFETENSORS = (  # dtypes that its NumPy interface restores exactly
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)
_METADATA_KEY = "meshdsl"

Dims = Mapping[str, DimsLike]


def export_safetensors(checkpoints: Checkpoints, step: int, file: str | Path, *, prefix: str = "") -> None:
    """Write a step as one safetensors file; needs the extra `safetensors`.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(f"{folder}/run") as checkpoints:
    ...     _ = checkpoints.save(7, {"w": md.tensor([1.0, 2.0], "io")})
    ...     md.export_safetensors(checkpoints, 7, f"{folder}/7.safetensors")
    ...     md.import_safetensors(f"{folder}/7.safetensors")
    {'w': tensor(float32[io=2], [1. 2.])}

    Only tensors whose path starts with `prefix` are written, without it; `prefix="params/"` leaves the optimizer state
    out. Raises `CheckpointError` if the step is corrupt, `ShapeError` for a dtype that safetensors does not support,
    and `SaveError` if the file cannot be written.
    """
    library, file = optional("safetensors.numpy", "safetensors", OWN_FORMAT), Path(file)
    with _step(checkpoints, step) as reader:
        unsupported = [
            f"{p} ({e.type.dtype})"
            for p, e in _entries(reader, prefix).items()
            if e.type.dtype.name not in _SAFETENSORS
        ]
        if unsupported:
            listed = ", ".join(unsupported)
            raise ShapeError(f"safetensors does not support {listed}\n  cast it before saving, or use orbax")
        arrays = {path: reader.whole(entry) for path, entry in _entries(reader, prefix).items()}
        metadata = json.dumps(_metadata(reader, arrays, prefix))
    if file.exists() and not file.is_file():
        raise SaveError(f"{file} exists and is not a regular file\n  give the path of a new file")
    draft = file.with_name(f"{file.name}.draft")
    with library_errors(SaveError, f"{file} cannot be written"):
        try:
            library.save_file(arrays, draft, metadata={_METADATA_KEY: metadata})
            os.replace(draft, file)
        finally:
            draft.unlink(missing_ok=True)


def import_safetensors(file: str | Path, dims: Dims | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. `dims` gives the dims of tensors whose dims the file does not store.

    >>> import tempfile
    >>> import numpy as np
    >>> import safetensors.numpy
    >>> import meshdsl as md
    >>> with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:  # a file without dim names
    ...     safetensors.numpy.save_file({"w": np.ones((2, 3), np.float32)}, file.name)
    ...     md.import_safetensors(file.name, dims={"w": "io hidden"})["w"].dims
    (io=2, hidden=3)

    Needs the extra `safetensors`. The whole file is read into host memory. Raises `CheckpointError` if the
    file cannot be read or a tensor does not match its stored hash, and `ShapeError` if dims are missing.
    """
    library = optional("safetensors", "safetensors", OWN_FORMAT)

    with (
        library_errors(CheckpointError, f"{file} cannot be read"),
        library.safe_open(str(file), framework="numpy") as opened,
    ):
        metadata = (opened.metadata() or {}).get(_METADATA_KEY)
        names = opened.keys()  # safe_open is not a mapping
        arrays = {name: opened.get_tensor(name) for name in names}
    return _named(str(file), arrays, metadata, dims or {})


def export_orbax(checkpoints: Checkpoints, step: int, directory: str | Path, *, prefix: str = "") -> None:
    """Write a step as an orbax checkpoint in a new directory; needs the extra `orbax`.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(f"{folder}/run") as checkpoints:
    ...     _ = checkpoints.save(7, {"layer": {"w": md.tensor([1.0, 2.0], "io")}})
    ...     md.export_orbax(checkpoints, 7, f"{folder}/orbax")
    ...     md.import_orbax(f"{folder}/orbax")
    {'layer/w': tensor(float32[io=2], [1. 2.])}

    `prefix` is that of `export_safetensors`.
    Raises `CheckpointError` if the step is corrupt, `ShapeError` for a tensor of size 0, which orbax does not support,
    and `SaveError` if the directory exists or cannot be written.
    """
    library = optional("orbax.checkpoint", "orbax", OWN_FORMAT)
    with _step(checkpoints, step) as reader:
        arrays = {path: reader.whole(entry) for path, entry in _entries(reader, prefix).items()}
        if empty := [path for path, values in arrays.items() if not values.size]:
            raise ShapeError(f"orbax does not support tensors of size 0: {', '.join(empty)}")
        tree, metadata = nested(arrays), _metadata(reader, arrays, prefix)
    check_no_url(directory)
    path = Path(directory).absolute()
    if path.exists() or not path.parent.is_dir():
        reason = "already exists" if path.exists() else f"cannot be created: there is no folder {path.parent}"
        raise SaveError(f"{directory} {reason}\n  give the path of a new directory in an existing folder")
    with library_errors(SaveError, f"{path} cannot be written"), library.StandardCheckpointer() as orbax:
        orbax.save(path, tree, custom_metadata={_METADATA_KEY: json.dumps(metadata)})


def import_orbax(directory: str | Path, dims: Dims | None = None) -> dict[str, Tensor]:
    """The tensors of an orbax checkpoint, by path. `dims` gives the dims of tensors whose dims it does not store.

    >>> import tempfile
    >>> import numpy as np
    >>> import orbax.checkpoint
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder:  # a checkpoint without dim names
    ...     with orbax.checkpoint.StandardCheckpointer() as other:
    ...         other.save(f"{folder}/there", {"w": np.ones((2, 3), np.float32)})
    ...     md.import_orbax(f"{folder}/there", dims={"w": "io hidden"})["w"].dims
    (io=2, hidden=3)

    Needs the extra `orbax`. The whole checkpoint is read into host memory. Raises `CheckpointError` if it
    cannot be read or a tensor does not match its stored hash, and `ShapeError` if dims are missing.
    """
    library = optional("orbax.checkpoint", "orbax", OWN_FORMAT)

    check_no_url(directory)
    path = Path(directory).absolute()
    with library_errors(CheckpointError, f"{directory} cannot be read"), library.StandardCheckpointer() as orbax:
        leaves = jax.tree_util.tree_flatten_with_path(orbax.restore(path))[0]
        metadata = (orbax.metadata(path).custom_metadata or {}).get(_METADATA_KEY)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}
    return _named(str(directory), arrays, metadata, dims or {})


@contextlib.contextmanager
def _step(checkpoints: Any, step: Any) -> Iterator[OpenStep]:
    """Opens a step of `checkpoints` for reading."""
    if not isinstance(checkpoints, Checkpoints):
        raise ShapeError(f"the first argument must be md.Checkpoints(directory), got {type(checkpoints).__name__}")
    check_step(step)
    checkpoints.wait()
    with checkpoints.store.open(step) as reader:
        yield reader


def _entries(reader: OpenStep, prefix: str) -> dict[str, StoredTensor]:
    """The tensors whose path starts with the prefix, by the rest of their paths."""
    stored = reader.manifest.tensors
    entries = {p.removeprefix(prefix): e for p, e in stored.items() if p.startswith(prefix) and p != prefix}
    if not entries and prefix:
        shown = ", ".join(short(path) for path in list(stored)[:5])
        raise ShapeError(f"no tensor of the step has a path that starts with {prefix!r}; its first are: {shown}")
    return entries


def _metadata(reader: OpenStep, arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, Any]:
    header, entries = reader.manifest.header, _entries(reader, prefix)
    tensors = {path: [[d.name for d in entry.type.dims], _sha256(arrays[path])] for path, entry in entries.items()}
    return {"step": header.step, "config": header.config, "data": header.data, "key": header.key, "tensors": tensors}


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def _named(name: str, arrays: Mapping[str, np.ndarray], metadata: Any, dims: Dims) -> dict[str, Tensor]:
    """The arrays as tensors. Dims in the file's metadata are verified and take precedence over `dims`."""
    dims_by_path: Mapping[str, list[str]] = {}
    if metadata is not None:
        dims_by_path = _dims_by_path(metadata, f"{name}: metadata", arrays)
    unknown = [path for path in dims if path not in arrays]
    if unknown:
        raise ShapeError(f"dims= names {short(unknown[0])}, which {name} lacks; {nearest(unknown[0], arrays)}")
    sixty_four_bit = [path for path, x in arrays.items() if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype]
    if sixty_four_bit:
        listed = ", ".join(short(path)[1:-1] for path in sixty_four_bit[:5])
        raise ShapeError(f"{listed} of {name}: JAX keeps 64-bit types only with jax_enable_x64")
    unnamed = [path for path in arrays if path not in dims_by_path and path not in dims]
    if unnamed:
        raise ShapeError(
            f"{name} does not store the dims of {short(unnamed[0])}, an array of shape {arrays[unnamed[0]].shape}\n"
            f"  pass dims={{{short(unnamed[0])}: 'a b c'}}; {nearest(unnamed[0], dims)}"
        )
    return {path: tensor(values, dims_by_path.get(path) or dims.get(path, ())) for path, values in arrays.items()}


def _dims_by_path(metadata: str, where: str, arrays: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """The dim names of every tensor; raises `CheckpointError` if a tensor does not match its hash."""
    try:
        stored = {path: (dims, digest) for path, (dims, digest) in json.loads(metadata)["tensors"].items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: it is malformed: {type(error).__name__}: {str(error)[:200]!a}") from None
    for path, values in arrays.items():
        if path not in stored or _sha256(values) != stored[path][1]:
            raise CheckpointError(f"{where}.tensors.{short(path)}: the tensor is corrupt: its SHA-256 differs")
    return {path: stored[path][0] for path in arrays}
