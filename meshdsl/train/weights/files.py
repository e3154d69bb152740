"""safetensors files: a header of JSON, then the tensors, row-major and little-endian.

A tensor is a view of its file, so reading a block of it reads only the pages of that block. Headers are checked before
anything is read: names, dtypes, shapes and offsets that do not fit the file raise `CheckpointError`.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ...errors import CheckpointError, short

DTYPES: dict[str, np.dtype] = {  # by their names in headers
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST = 100_000_000  # bytes of a header or of a JSON file, as in the safetensors library


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype and shape, the byte at which it starts, and the size and time of the file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    version: tuple[int, int]

    def view(self, mode: Any = "r") -> np.ndarray:
        """The tensor, mapped into memory: "r" to read it, "r+" to write it in place.

        Raises `CheckpointError` if the file has changed: a program that reads what was cut off is killed.
        """
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        if mode == "r":
            try:
                status = self.file.stat()
            except OSError as error:
                raise CheckpointError(f"{self.file} cannot be read: {error.strerror}") from None
            if (status.st_size, status.st_mtime_ns) != self.version:
                raise CheckpointError(f"{self.file} was written to or replaced while it was read\n  import it again")
        return np.memmap(self.file, self.dtype, mode, self.start, self.shape)


def open_directory(directory: Path) -> dict[str, Stored]:
    """The tensors of a model's directory by name, in one safetensors file or in those of its index."""
    if (directory / INDEX).is_file():
        return _of_index(directory)
    if (directory / SINGLE).is_file():
        return header_of(directory / SINGLE)
    files = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    if not files:
        raise CheckpointError(f"there is no directory {str(directory)!r} with files in it")
    pickled = "\n  pytorch_model.bin is a pickle, which may run code: convert it with save_pretrained in transformers"
    way_out = pickled if any(name.endswith(".bin") for name in files) else f"\n  it has {', '.join(files[:8])}"
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}{way_out}")


def _of_index(directory: Path) -> dict[str, Stored]:
    by_name = read_json(directory / INDEX).get("weight_map")
    if not isinstance(by_name, dict) or not all(isinstance(v, str) for v in by_name.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map must map the names of tensors to names of files")
    headers: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(by_name.values())):
        if Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{directory / INDEX} names {short(file)}, which is not a file of the directory")
        headers[file] = header_of(directory / file)
    missing = [f"{short(name)} in {file}" for name, file in by_name.items() if name not in headers[file]]
    if missing:
        raise CheckpointError(f"{directory / INDEX} names tensors that its files lack: {', '.join(missing[:5])}")
    return {name: headers[file][name] for name, file in by_name.items()}


def header_of(file: Path) -> dict[str, Stored]:
    """The tensors of one file, without reading their elements."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file} is not a regular file")
        size = status.st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_LONGEST, size - 8):
                raise CheckpointError(f"{file} is not a safetensors file, or is cut short: its header has no end")
            header = _parse(stream.read(length), file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    version = size, status.st_mtime_ns
    return {name: _entry(file, name, entry, 8 + length, version) for name, entry in header.items()}


def _entry(file: Path, name: str, entry: Any, start: int, version: tuple[int, int]) -> Stored:
    """One tensor of a header, which must lie inside the file."""
    try:
        dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        integers = all(type(n) is int and n >= 0 for n in (*shape, first, end))
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{file}: the header of {short(name)} needs dtype, shape and data_offsets") from None
    if not integers:
        raise CheckpointError(f"{file}: {short(name)} has sizes or offsets that are not integers from 0")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {short(name)} has dtype {short(dtype)}; supported: {', '.join(DTYPES)}")
    if end - first != math.prod(shape) * DTYPES[dtype].itemsize or start + end > version[0]:
        raise CheckpointError(f"{file}: {short(name)} of shape {shape} does not fit its bytes {first} to {end}")
    return Stored(file, DTYPES[dtype], shape, start + first, version)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file whose value is an object."""
    try:
        with file.open("rb") as stream:
            return _parse(stream.read(_LONGEST), file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _parse(text: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {short(str(error))}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must be a JSON object")
    return value


def write_header(file: Path, types: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Create a file with the header and the size for these tensors; their elements are zeros."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in types.items():
        first, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
