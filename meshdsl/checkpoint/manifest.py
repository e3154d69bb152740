"""The manifest of one step: what is stored, where each chunk lies, and what its bytes hash to.

It is one JSON document, laid out so that it can be checked line by line, before the next line is read:

    {"header": {"format": "meshdsl-checkpoint", "version": 1, "step": 12, ...},
    "tensors": [
    {"path": "params/w", "dtype": "float32", "dims": [["io", 6]], "cuts": [[0, 3, 6]], "chunks": [[0, 0, "ab.."], ..]},
    ...
    ],
    "sha256": "..."}

The last line hashes all lines before it. `files` gives the bytes of `part-00000.bin` and so on; a chunk is `[file,
offset, SHA-256]` and holds one cell of the tensor's grid (`grid`), row-major, little-endian, without padding. Its size
is that of the cell. Chunks cover each file exactly: no gap, no overlap, nothing behind the last one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..dims import Dim, Shape
from ..errors import ShapeError
from ..ir import Type
from .files import opened, read_at, regular_size
from .grid import Cuts, cell, cell_count
from .strict import items, keys, parse, refuse, show, text, whole

__all__ = [
    "DTYPES",
    "MANIFEST",
    "PATH_LIMIT",
    "STEP_LIMIT",
    "Chunk",
    "Entry",
    "Header",
    "Manifest",
    "dump",
    "load",
    "part_name",
]

MANIFEST = "manifest.json"
FORMAT, VERSION = "meshdsl-checkpoint", 1
STEP_LIMIT = 10**15

_NATIVE = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_MORE = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn float6_e2m3fn float6_e3m2fn int2 int4 uint2 uint4"
)
DTYPES: dict[str, np.dtype] = {  # by name; those of less than a byte take a byte for each element
    **{name: np.dtype(name) for name in _NATIVE.split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _MORE.split()},
}

_TAIL = len('"sha256": ""}\n') + 64
_FILES = 100_000  # processes that wrote
PATH_LIMIT = 1024  # characters
_DIMS = 64  # of a tensor
_HEADER = ("format", "version", "step", "save", "files", "config", "data", "key")
_TENSOR = ("path", "dtype", "dims", "cuts", "chunks")
_HEX = re.compile(r"[0-9a-f]{64}")


class Chunk(NamedTuple):
    """Where the bytes of one cell lie, and their SHA-256."""

    file: int
    offset: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor."""

    path: str
    type: Type
    cuts: Cuts
    chunks: tuple[Chunk, ...]  # one for each cell, in order


@dataclass(frozen=True)
class Header:
    """What is known of a step besides its tensors."""

    step: int
    save: str  # an id of the save, different each time
    files: tuple[int, ...]  # bytes of each part
    config: Any = None
    data: Any = None
    key: tuple[int, ...] | None = None  # the words of a random key


@dataclass(frozen=True)
class Manifest:
    """A step's header and its tensors, by path."""

    header: Header
    tensors: dict[str, Entry]


def part_name(number: int) -> str:
    """The file that process `number` wrote.

    >>> part_name(3)
    'part-00003.bin'
    """
    return f"part-{number:05d}.bin"


def dump(manifest: Manifest) -> Iterator[bytes]:
    """The manifest's lines."""
    h = manifest.header
    fields = {"format": FORMAT, "version": VERSION, **{name: getattr(h, name) for name in _HEADER[2:]}}
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
    yield f'"sha256": "{total.hexdigest()}"}}\n'.encode("ascii")


def _written(entry: Entry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "dtype": entry.type.dtype.name,
        "dims": [[d.name, d.size] for d in entry.type.shape],
        "cuts": entry.cuts,
        "chunks": [[chunk.file, chunk.offset, chunk.sha256.hex()] for chunk in entry.chunks],
    }


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def load(folder: int, step: int) -> Manifest:
    """The manifest of the step whose directory is open. Nothing of it is used before its hash and every field fit.

    Raises `CheckpointError`, naming the file and the key, when anything does not.
    """
    stored = _stored_bytes(folder)
    with opened(MANIFEST, folder) as fd:
        size = os.fstat(fd).st_size
        if not _TAIL < size <= _largest(stored):
            refuse(MANIFEST, f"it has {size} bytes; beside {stored} bytes of tensors, {_largest(stored)} are the most")
        _check_hash(fd, size)
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            return _read(_Lines(file, size - _TAIL, _longest(stored)), folder, step)


def _stored_bytes(folder: int) -> int:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if re.fullmatch(r"part-\d{5,6}\.bin", entry.name)]
    return sum(regular_size(name, folder) for name in names)


def _largest(stored: int) -> int:
    return (16 << 20) + stored // 4


def _longest(stored: int) -> int:
    return (1 << 20) + stored // 64


def _check_hash(fd: int, size: int) -> None:
    total, block, at = hashlib.sha256(), memoryview(bytearray(min(size, 1 << 18))), 0
    while at < size - _TAIL:
        part = block[: min(len(block), size - _TAIL - at)]
        read_at(fd, part, at, MANIFEST)
        total.update(part)
        at += len(part)
    tail = memoryview(bytearray(_TAIL))
    read_at(fd, tail, at, MANIFEST)
    if bytes(tail) != f'"sha256": "{total.hexdigest()}"}}\n'.encode("ascii"):
        refuse(MANIFEST, "it does not end in the SHA-256 of what stands before; it was changed or cut off")


class _Lines:
    """The lines of the first `size` bytes of a file, none of them longer than `longest`."""

    def __init__(self, file: Any, size: int, longest: int):
        self.file, self.left, self.longest = file, size, longest

    def take(self, where: str) -> bytes:
        limit = min(self.left, self.longest)
        line = self.file.readline(limit)
        if not line.endswith(b"\n"):
            why = "the file ends in the middle of it" if limit == self.left else f"it is longer than {limit} bytes"
            refuse(f"{MANIFEST}: {where}", why)
        self.left -= len(line)
        return line[:-1]

    def expect(self, wanted: bytes, where: str) -> None:
        line = self.take(where)
        if line != wanted:
            refuse(f"{MANIFEST}: {where}", f"expected the line {wanted.decode()!r}, got {show(line)}")


def _read(lines: _Lines, folder: int, step: int) -> Manifest:
    where = f"{MANIFEST}: header"
    first = lines.take("header")
    if not (first.startswith(b'{"header": ') and first.endswith(b",")):
        refuse(where, f'expected a line that begins {{"header": and ends in a comma, got {show(first[:60])}')
    header = _header(parse(first[len(b'{"header": ') : -1], where), where)
    if header.step != step:
        refuse(f"{where}.step", f"it says step {header.step}, and the directory is that of step {step}")
    for n, size in enumerate(header.files):
        there = regular_size(part_name(n), folder)
        if there != size:
            refuse(f"{where}.files[{n}]", f"it says {size} bytes, and {part_name(n)} has {there}")
    lines.expect(b'"tensors": [', "tensors")
    tensors: dict[str, Entry] = {}
    more = True
    while (line := lines.take(f"tensors[{len(tensors)}]")) != b"],":
        place = f"{MANIFEST}: tensors[{len(tensors)}]"
        if not more:
            refuse(place, "the line before it ends the list")
        more = line.endswith(b",")
        entry = _entry(parse(line.removesuffix(b","), place), place, header.files)
        if entry.path in tensors:
            refuse(f"{place}.path", f"{show(entry.path)} is there twice")
        tensors[entry.path] = entry
    if more and tensors:
        refuse(f"{MANIFEST}: tensors", "the list ends in a comma")
    if lines.left:
        refuse(f"{MANIFEST}: tensors", "something stands between the tensors and the hash")
    _check_cover(header.files, tensors.values())
    return Manifest(header, tensors)


def _header(value: Any, where: str) -> Header:
    if isinstance(value, dict) and (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        there = f"{show(value.get('format'))} version {show(value.get('version'))}"
        refuse(f"{where}.version", f"it is {there}; this meshdsl reads {FORMAT} version {VERSION}")
    fields = keys(value, _HEADER, where)
    files = items(fields["files"], f"{where}.files")
    if not 1 <= len(files) <= _FILES:
        refuse(f"{where}.files", f"there are {len(files)}, and 1 to {_FILES} are possible")
    key = fields["key"]
    if key is not None:
        key = tuple(whole(word, f"{where}.key", high=2**32 - 1) for word in items(key, f"{where}.key", 2))
    return Header(
        step=whole(fields["step"], f"{where}.step", high=STEP_LIMIT),
        save=text(fields["save"], f"{where}.save", 64),
        files=tuple(whole(size, f"{where}.files[{n}]") for n, size in enumerate(files)),
        config=fields["config"],
        data=fields["data"],
        key=key,
    )


def _entry(value: Any, where: str, files: Sequence[int]) -> Entry:
    fields = keys(value, _TENSOR, where)
    path = text(fields["path"], f"{where}.path", PATH_LIMIT)
    name = text(fields["dtype"], f"{where}.dtype", 32)
    if name not in DTYPES:
        refuse(f"{where}.dtype", f"{show(name)} is unknown; there are: {', '.join(DTYPES)}")
    dims = items(fields["dims"], f"{where}.dims")
    if len(dims) > _DIMS:
        refuse(f"{where}.dims", f"there are {len(dims)}, and {_DIMS} are the most")
    pairs = [items(pair, f"{where}.dims[{n}]", 2) for n, pair in enumerate(dims)]
    sized = [
        (text(pair[0], f"{where}.dims[{n}]", 256), whole(pair[1], f"{where}.dims[{n}]")) for n, pair in enumerate(pairs)
    ]
    try:
        kind = Type(tuple(Dim(*pair) for pair in sized), DTYPES[name])
    except ShapeError as error:
        refuse(f"{where}.dims", show(str(error.args[0]).partition("\n")[0]))
    wanted, stored = math.prod(size for _, size in sized) * kind.dtype.itemsize, sum(files)
    if wanted > stored:
        refuse(f"{where}.dims", f"the tensor has {show(wanted)} bytes, and {stored} are stored in all")
    if math.prod(max(1, size) for _, size in sized) * kind.dtype.itemsize > 2**62:
        refuse(f"{where}.dims", "sizes beside a size of 0 are too large for any array")
    cuts = _cuts(fields["cuts"], kind.shape, f"{where}.cuts")
    chunks = items(fields["chunks"], f"{where}.chunks", cell_count(cuts))
    return Entry(path, kind, cuts, tuple(_chunk(c, f"{where}.chunks[{n}]", len(files)) for n, c in enumerate(chunks)))


def _cuts(value: Any, shape: Shape, where: str) -> Cuts:
    lists = items(value, where, len(shape))
    found = tuple(tuple(whole(cut, where) for cut in items(dim, where)) for dim in lists)
    for dim, places in zip(shape, found, strict=True):
        rises = all(a < b for a, b in itertools.pairwise(places))
        if not places or not rises or (places[0], places[-1]) != (0, dim.size):
            refuse(where, f"the cuts of dim {dim.name!r} do not rise from 0 to {dim.size}: {show(list(places))}")
    return found


def _chunk(value: Any, where: str, files: int) -> Chunk:
    file, offset, digest = items(value, where, 3)
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        refuse(where, f"a SHA-256 is 64 hexadecimal digits, got {show(digest)}")
    return Chunk(whole(file, where, high=files - 1), whole(offset, where), bytes.fromhex(digest))


def _check_cover(files: Sequence[int], entries: Iterable[Entry]) -> None:
    """Every byte of every file belongs to exactly one chunk."""
    spans = sorted(
        (chunk.file, chunk.offset, cell(entry.cuts, n).elements * entry.type.dtype.itemsize, entry.path, n)
        for entry in entries
        for n, chunk in enumerate(entry.chunks)
    )
    ends = [0] * len(files)
    for file, offset, size, path, n in spans:
        if offset != ends[file]:
            what = "overlaps the chunk before it" if offset < ends[file] else "leaves bytes before it to no chunk"
            refuse(f"{MANIFEST}: {show(path)}, chunk {n}", f"at byte {offset} of {part_name(file)} it {what}")
        ends[file] += size
    for n, (end, size) in enumerate(zip(ends, files, strict=True)):
        if end != size:
            refuse(f"{MANIFEST}: header.files[{n}]", f"{part_name(n)} has {size} bytes, and its chunks {end}")
