"""The manifest of one step: the stored tensors, the location of each chunk, and its SHA-256.

It is a JSON document with one line per tensor, so that a reader can check each line before it reads the next:

    {"header": {"format": "meshdsl-checkpoint", "version": 1, "step": 12, ...},
    "tensors": [
    {"path": "params/w", "dtype": "float32", "dims": [["io", 6]], "cuts": [[0, 3, 6]], "chunks": [[0, 0, "ab.."], ..]},
    ...
    ],
    "sha256": "..."}

The last line is the hash of all lines before it. Paths increase from line to line. `files` lists the sizes of
`part-00000.bin` and so on in bytes. A chunk is `[file, offset, SHA-256]` and stores one cell of the tensor's grid (see
`grid`), row-major, little-endian, without padding. The chunks cover each file exactly, without gaps or overlaps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...ir import Type
from .grid import Cuts

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
HEADER_KEYS = ("format", "version", "step", "save", "files", "config", "data", "key")
TENSOR_KEYS = ("path", "dtype", "dims", "cuts", "chunks")


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
    files: tuple[int, ...]  # size of each part file in bytes
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


def header_limit(stored: int) -> int:
    """The maximum length of a manifest line that a reader accepts, given the stored bytes of tensors."""
    return (64 << 10) + stored // 64


def dump(manifest: Manifest) -> Iterator[bytes]:
    """The lines of the manifest, encoded."""
    h = manifest.header
    fields = {"format": FORMAT, "version": VERSION, **{name: getattr(h, name) for name in HEADER_KEYS[2:]}}
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


def signature(body: bytes | memoryview) -> bytes:
    """The last line of a manifest, with the hash of the other lines `body`."""
    return _last(hashlib.sha256(body).hexdigest())


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
