"""The manifest of one step: the stored tensors, the location of each chunk, and its SHA-256.

It is a JSON document with one line per tensor:

    {"header": {"format": "meshdsl-checkpoint", "version": 1, "step": 12, ...},
    "tensors": [
    {"path": "params/w", "dtype": "float32", "dims": [["io", 6]], "cuts": [[0, 3, 6]], "chunks": [[0, 0, "ab.."], ..]},
    ...
    ],
    "sha256": "..."}

The last line is the hash of all lines before it. Paths increase from line to line. `files` lists the sizes of
`part-00000.bin` and so on in bytes. A chunk is `[file, offset, SHA-256]` and stores one cell of the tensor's grid (see
`grid`), row-major, little-endian, without padding. The chunks cover each file exactly, without gaps or overlaps.

A reader refuses a manifest whose hash differs, part files of other sizes, and chunks outside their file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...dims import Dim
from ...errors import CheckpointError, short
from ...ir import Type
from .files import read_at, regular_size
from .grid import Cuts, cell, cell_count

MANIFEST = "manifest.json"
FORMAT, VERSION = "meshdsl-checkpoint", 1
STEP_LIMIT = 10**15

_NATIVE = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_MORE = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn float6_e2m3fn float6_e3m2fn int2 int4 uint2 uint4"
)
DTYPES: dict[str, np.dtype] = {  # by name; sub-byte types are stored as one byte per element
    **{name: np.dtype(name) for name in _NATIVE.split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _MORE.split()},
}

PATH_LIMIT = 1024  # characters


class Chunk(NamedTuple):
    """The location of one cell's bytes, and their SHA-256."""

    file: int
    offset: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a step: its type, where its dims are cut, and the file, place and hash of each chunk."""

    path: str
    type: Type
    cuts: Cuts
    chunks: tuple[Chunk, ...]  # one per cell, in order


@dataclass(frozen=True)
class Header:
    """The fields of a manifest other than its tensors."""

    step: int
    save: str  # a unique id of the save
    files: Sequence[int]  # size of each part file in bytes
    config: Any = None
    data: Any = None
    key: tuple[int, ...] | None = None  # the words of a random key


@dataclass(frozen=True)
class Manifest:
    """A step's header and its tensors by path, sorted by path."""

    header: Header
    tensors: Mapping[str, StoredTensor]


def part_name(number: int) -> str:
    """The name of the file written by process `number`.

    >>> part_name(3)
    'part-00003.bin'
    """
    return f"part-{number:05d}.bin"


def dump(manifest: Manifest) -> Iterator[bytes]:
    """The lines of the manifest, encoded."""
    fields = {"format": FORMAT, "version": VERSION, **vars(manifest.header)}
    total = hashlib.sha256()
    entries = list(manifest.tensors.values())
    lines = itertools.chain(
        [f'{{"header": {_json(fields)},', '"tensors": ['],
        (_json(_written(entry)) + "," * (n + 1 < len(entries)) for n, entry in enumerate(entries)),
        ["],"],
    )
    for line in lines:
        encoded = line.encode("ascii") + b"\n"
        total.update(encoded)
        yield encoded
    yield _last(total.hexdigest())


def load(folder: Path, step: int) -> Manifest:
    """Reads and checks the manifest of the step whose directory is open.

    Raises `CheckpointError` naming the file if the hash is wrong, or a size, or if it is malformed.
    """
    sizes = {p.name: regular_size(p) for p in folder.iterdir() if re.fullmatch(r"part-\d{5,6}\.bin", p.name)}
    size, largest = regular_size(folder / MANIFEST), (16 << 20) + sum(sizes.values()) // 4
    if size > largest:
        raise CheckpointError(f"{MANIFEST}: it has {size} bytes; the limit for these part files is {largest}")
    raw = read_at(folder / MANIFEST)
    end = raw.rfind(b'"sha256": ')
    if end < 0 or raw[end:] != _last(hashlib.sha256(memoryview(raw)[:end]).hexdigest()):
        raise CheckpointError(f"{MANIFEST}: it does not end with the SHA-256 of its content")
    try:
        document = json.loads(raw)
        fields = document["header"]
        written = fields.pop("format"), fields.pop("version")
        if written != (FORMAT, VERSION):
            raise ValueError(f"it is {short(written)}; this meshdsl reads {FORMAT} version {VERSION}")
        key = fields.pop("key")
        header = Header(**fields, key=None if key is None else tuple(key))
        if header.step != step or [sizes[part_name(n)] for n in range(len(header.files))] != header.files:
            raise ValueError("its step or the sizes of its part files differ from the directory's")
        tensors = {entry["path"]: _tensor(entry, header.files) for entry in document["tensors"]}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST}: it is malformed: {type(error).__name__}: {str(error)[:200]!a}") from None
    return Manifest(header, tensors)


def _tensor(entry: Mapping[str, Any], files: Sequence[int]) -> StoredTensor:
    """One tensor; its chunks must fill its grid and lie inside their files."""
    tensor_type = Type(tuple(Dim(name, size) for name, size in entry["dims"]), DTYPES[entry["dtype"]])
    cuts = tuple(tuple(dim) for dim in entry["cuts"])
    chunks = tuple(Chunk(file, offset, bytes.fromhex(digest)) for file, offset, digest in entry["chunks"])
    for dim, d in zip(cuts, tensor_type.dims, strict=True):
        if (dim[0], dim[-1]) != (0, d.size) or list(dim) != sorted(set(dim)):
            raise ValueError(f"the cuts of {d} do not increase from 0 to its size")
    for number, chunk in zip(range(cell_count(cuts)), chunks, strict=True):
        size = cell(cuts, number).elements * tensor_type.dtype.itemsize
        if not 0 <= chunk.offset <= files[chunk.file] - size:
            raise ValueError(f"chunk {number} of {entry['path']} lies outside its file")
    return StoredTensor(entry["path"], tensor_type, cuts, chunks)


def _last(digest: str) -> bytes:
    return f'"sha256": "{digest}"}}\n'.encode("ascii")


def _written(entry: StoredTensor) -> dict[str, Any]:
    return {
        "path": entry.path,
        "dtype": entry.type.dtype.name,
        "dims": [[d.name, d.size] for d in entry.type.dims],
        "cuts": entry.cuts,
        "chunks": [[chunk.file, chunk.offset, chunk.sha256.hex()] for chunk in entry.chunks],
    }


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
