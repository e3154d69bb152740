"""To and from other formats, for other programs: safetensors and orbax, each an extra. Never used by meshdsl itself.

Dim names, and the SHA-256 of each tensor, go into the metadata that both formats have; a file without them is given its
dims by the caller, and nothing can then tell whether a bit of it changed. Tensors pass whole through one host.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from ..dims import DimsLike
from ..errors import CheckpointError, MeshdslError, SaveError, ShapeError, at, caller, nearest
from ..values import Tensor, tensor
from .read import StepReader, open_step
from .store import Checkpoints, check_step
from .strict import items, keys, parse, show, text

__all__ = ["export_orbax", "export_safetensors", "import_orbax", "import_safetensors"]

_SAFETENSORS = (  # what its NumPy interface gives back as it was
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)
_NOTE = "meshdsl"  # the key of the metadata
_FIELDS = ("step", "config", "data", "key", "tensors")

Dims = Mapping[str, DimsLike]


def export_safetensors(checkpoints: Checkpoints, step: int, file: str | Path) -> None:
    """Write a step as one safetensors file; needs `pip install meshdsl[safetensors]`.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(f"{folder}/run") as checkpoints:
    ...     _ = checkpoints.save(7, {"w": md.tensor([1.0, 2.0], "io")})
    ...     md.export_safetensors(checkpoints, 7, f"{folder}/7.safetensors")
    ...     md.import_safetensors(f"{folder}/7.safetensors")
    {'w': tensor(float32[io=2], [1. 2.])}

    Raises `CheckpointError` when the step is not sound, `ShapeError` for a dtype that safetensors lacks, and
    `SaveError` when the file cannot be written.
    """
    library, file = _extra("safetensors.numpy", "safetensors"), Path(file)
    try:
        with _step(checkpoints, step) as reader:
            bad = [f"{p} ({e.type.dtype})" for p, e in _entries(reader) if e.type.dtype.name not in _SAFETENSORS]
            if bad:
                raise ShapeError(f"safetensors does not hold {', '.join(bad)}\n  cast it before saving, or use orbax")
            arrays = {path: reader.whole(entry) for path, entry in _entries(reader)}
            note = json.dumps(_note(reader, arrays))
        if file.exists() and not file.is_file():
            raise SaveError(f"{file} is there, and is no plain file\n  name a file that is not there yet")
        draft = file.with_name(f"{file.name}.draft")
        with _writing(file):
            try:
                library.save_file(arrays, draft, metadata={_NOTE: note})
                os.replace(draft, file)
            finally:
                draft.unlink(missing_ok=True)
    except MeshdslError as error:
        raise at(error, caller()) from None


def import_safetensors(file: str | Path, dims: Dims | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. `dims` names the dims of those that the file does not name itself.

    >>> import tempfile
    >>> import numpy as np
    >>> import safetensors.numpy
    >>> import meshdsl as md
    >>> with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:  # another program's, without names of dims
    ...     safetensors.numpy.save_file({"w": np.ones((2, 3), np.float32)}, file.name)
    ...     md.import_safetensors(file.name, dims={"w": "io hidden"})["w"].dims
    (io=2, hidden=3)

    Needs `pip install meshdsl[safetensors]`. The file is read whole, through the host.
    Raises `CheckpointError` when the file cannot be read or is not what meshdsl wrote, `ShapeError` for missing dims.
    """
    library = _extra("safetensors", "safetensors")

    def read() -> tuple[dict[str, np.ndarray], Any]:
        with library.safe_open(str(file), framework="numpy") as opened:
            note = (opened.metadata() or {}).get(_NOTE)
            names = opened.keys()  # it is no mapping
            return {name: opened.get_tensor(name) for name in names}, note

    arrays, note = _foreign(str(file), read)
    return _named(str(file), arrays, note, dims or {})


def export_orbax(checkpoints: Checkpoints, step: int, directory: str | Path) -> None:
    """Write a step as an orbax checkpoint, in a new directory; needs `pip install meshdsl[orbax]`.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(f"{folder}/run") as checkpoints:
    ...     _ = checkpoints.save(7, {"layer": {"w": md.tensor([1.0, 2.0], "io")}})
    ...     md.export_orbax(checkpoints, 7, f"{folder}/orbax")
    ...     md.import_orbax(f"{folder}/orbax")
    {'layer/w': tensor(float32[io=2], [1. 2.])}

    Raises `CheckpointError` when the step is not sound, `ShapeError` for a tensor of size 0, which orbax lacks, and
    `SaveError` when the directory is there already or cannot be written.
    """
    library = _extra("orbax.checkpoint", "orbax")
    try:
        with _step(checkpoints, step) as reader:
            arrays = {path: reader.whole(entry) for path, entry in _entries(reader)}
            if empty := [path for path, values in arrays.items() if not values.size]:
                raise ShapeError(f"orbax does not hold tensors of size 0: {', '.join(empty)}")
            nested, note = _nested(arrays), _note(reader, arrays)
        place = Path(directory).absolute()
        if place.exists() or not place.parent.is_dir():
            there = "is there already" if place.exists() else f"has no folder {place.parent} to lie in"
            raise SaveError(f"{directory} {there}\n  orbax makes a new directory, in one that is there")
        with _writing(place), library.StandardCheckpointer() as orbax:
            orbax.save(place, nested, custom_metadata={_NOTE: json.dumps(note)})
    except MeshdslError as error:
        raise at(error, caller()) from None


def import_orbax(directory: str | Path, dims: Dims | None = None) -> dict[str, Tensor]:
    """The tensors of an orbax checkpoint, by path. `dims` names the dims of those that it does not name itself.

    >>> import tempfile
    >>> import numpy as np
    >>> import orbax.checkpoint
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder:  # another program's, without names of dims
    ...     with orbax.checkpoint.StandardCheckpointer() as other:
    ...         other.save(f"{folder}/there", {"w": np.ones((2, 3), np.float32)})
    ...     md.import_orbax(f"{folder}/there", dims={"w": "io hidden"})["w"].dims
    (io=2, hidden=3)

    Needs `pip install meshdsl[orbax]`. The checkpoint is read whole, through the host.
    Raises `CheckpointError` when it cannot be read or is not what meshdsl wrote, `ShapeError` for missing dims.
    """
    library = _extra("orbax.checkpoint", "orbax")

    def read() -> tuple[dict[str, np.ndarray], Any]:
        place = Path(directory).absolute()
        with library.StandardCheckpointer() as orbax:
            leaves = jax.tree_util.tree_flatten_with_path(orbax.restore(place))[0]
            note = (orbax.metadata(place).custom_metadata or {}).get(_NOTE)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}
        return named, note

    arrays, note = _foreign(str(directory), read)
    return _named(str(directory), arrays, note, dims or {})


def _extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise at(
            MeshdslError(
                f"{module} cannot be imported: {error}\n"
                f"  it is an extra: pip install 'meshdsl[{extra}]'; meshdsl's own format needs nothing"
            ),
            caller(),
        ) from None


@contextlib.contextmanager
def _step(checkpoints: Any, step: Any) -> Iterator[StepReader]:
    """A step of a run, to be read."""
    if not isinstance(checkpoints, Checkpoints):
        raise ShapeError(f"what is exported is a step of md.Checkpoints(directory), got {type(checkpoints).__name__}")
    check_step(step)
    checkpoints.wait()
    with open_step(checkpoints.directory, step) as reader:
        yield reader


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    """What a library writes; whatever it raises is about the place."""
    try:
        yield
    except Exception as error:  # each library has errors of its own
        raise SaveError(f"{place} cannot be written: {type(error).__name__}: {str(error)[:300]}") from error


def _entries(reader: StepReader) -> Any:
    return reader.manifest.tensors.items()


def _note(reader: StepReader, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    header = reader.manifest.header
    tensors = {path: [[d.name for d in entry.type.shape], _sha256(arrays[path])] for path, entry in _entries(reader)}
    return {"step": header.step, "config": header.config, "data": header.data, "key": header.key, "tensors": tensors}


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arrays as dicts in dicts, which is what orbax names its files by."""
    made: dict[str, Any] = {}
    for path, values in arrays.items():
        *folders, name = path.split("/")
        inner = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                raise ShapeError(f"orbax cannot hold both {path!r} and a tensor that is a part of this path")
        inner[name] = values
    return made


def _foreign(name: str, read: Callable[[], Any]) -> Any:
    """What a library reads; whatever it raises is about the file."""
    try:
        return read()
    except Exception as error:
        problem = f"{name} cannot be read: {type(error).__name__}: {str(error)[:300]}"
        raise at(CheckpointError(problem), caller()) from error


def _named(name: str, arrays: Mapping[str, np.ndarray], note: Any, dims: Dims) -> dict[str, Tensor]:
    """The arrays as tensors. What the file's own note says of a tensor is checked, and comes before `dims`."""
    try:
        said = None if note is None else parse(str(note).encode("utf-8", "replace"), f"{name}: metadata.{_NOTE}")
        noted = {} if said is None else _noted(said, f"{name}: metadata", arrays)
        unknown = [path for path in dims if path not in arrays]
        if unknown:
            raise ShapeError(f"{name} has no {unknown[0]!r}, which dims= names; {nearest(unknown[0], arrays)}")
        wide = [path for path, x in arrays.items() if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype]
        if wide:
            raise ShapeError(f"{', '.join(wide)} of {name}: JAX keeps 64-bit types only with jax_enable_x64")
        bare = [path for path in arrays if path not in noted and path not in dims]
        if bare:
            raise ShapeError(
                f"{name} does not name the dims of {bare[0]}, an array of shape {arrays[bare[0]].shape}\n"
                f"  pass dims={{{bare[0]!r}: 'a b c'}}; {nearest(bare[0], dims)}"
            )
        return {path: tensor(values, noted.get(path) or dims.get(path, ())) for path, values in arrays.items()}
    except MeshdslError as error:
        raise at(error, caller()) from None


def _noted(said: Any, where: str, arrays: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """The names of the dims of every tensor, after comparing its values with their hash."""
    tensors = keys(keys(said, _FIELDS, where)["tensors"], tuple(arrays), f"{where}.tensors")
    found: dict[str, list[str]] = {}
    for path, pair in tensors.items():
        place = f"{where}.tensors.{show(path)}"
        names, digest = items(pair, place, 2)
        if _sha256(arrays[path]) != digest:
            raise CheckpointError(f"{place}: the tensor is not what meshdsl wrote: its SHA-256 differs")
        found[path] = [text(one, place, 256) for one in items(names, place, arrays[path].ndim)]
    return found
