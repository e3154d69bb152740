"""Reads a manifest from an untrusted source.

The text is read and hashed once, and kept as the only copy: each line is checked on reading and parsed again when its
tensor is requested. A manifest therefore takes little more memory than its own bytes, whatever its content. Every size
and offset is checked against the files before memory is allocated for it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...dims import Dim, Shape
from ...errors import ShapeError
from ...ir import Type
from .files import opened, read_text, regular_size
from .grid import Cuts, cell, cell_count
from .manifest import (
    DTYPES,
    FORMAT,
    HEADER_KEYS,
    MANIFEST,
    PATH_LIMIT,
    STEP_LIMIT,
    TENSOR_KEYS,
    VERSION,
    Chunk,
    Header,
    Manifest,
    StoredTensor,
    header_limit,
    part_name,
    signature,
)
from .strict import integer, items, keys, parse, plain, refuse, show, text

_FILES = 100_000  # maximum number of part files
_DIMS = 64  # maximum number of dims of a tensor
_HEX = re.compile(r"[0-9a-f]{64}")


def load(folder: int, step: int) -> Manifest:
    """Reads and checks the manifest of the step whose directory is open.

    Raises `CheckpointError` naming the file and the key if the hash or a field is wrong.
    """
    stored = _stored_bytes(folder)
    with opened(MANIFEST, folder) as fd:
        size, largest = os.fstat(fd).st_size, (4 << 20) + stored // 4
        if not len(signature(b"")) < size <= largest:
            refuse(MANIFEST, f"it has {size} bytes; the limit for {stored} bytes of tensors is {largest}")
        raw = read_text(fd, size, MANIFEST)
    end = size - len(signature(b""))
    if raw[end:] != signature(memoryview(raw)[:end]):
        refuse(MANIFEST, "it does not end with the SHA-256 of its content; it was changed or truncated")
    return _read(_Lines(raw, end, header_limit(stored)), folder, step)


def _stored_bytes(folder: int) -> int:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if re.fullmatch(r"part-\d{5,6}\.bin", entry.name)]
    return sum(regular_size(name, folder) for name in names)


class _Lines:
    """Reads lines up to byte `end`; refuses lines longer than `longest`."""

    def __init__(self, raw: bytearray, end: int, longest: int):
        self.raw, self.at, self.end, self.longest = raw, 0, end, longest

    def take(self, where: str) -> bytes:
        limit = min(self.end, self.at + self.longest)
        stop = self.raw.find(b"\n", self.at, limit)
        if stop < 0:
            reason = "the file ends in it" if limit == self.end else f"it is longer than {self.longest} bytes"
            refuse(f"{MANIFEST}: {where}", reason)
        line = bytes(memoryview(self.raw)[self.at : stop])
        self.at = stop + 1
        return line


class _Tensors(Mapping[str, StoredTensor]):
    """Entries by path, parsed on access. The lines are sorted by path."""

    def __init__(self, raw: bytearray, files: int):
        self._raw, self._files, self._starts = raw, files, array("q")

    def add(self, start: int) -> None:
        """Add the line that starts at this byte."""
        self._starts.append(start)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[str]:
        return (self._line(n)["path"] for n in range(len(self)))

    def __getitem__(self, path: str) -> StoredTensor:
        n = bisect.bisect_left(range(len(self)), path, key=lambda n: self._line(n)["path"])
        if n == len(self) or (line := self._line(n))["path"] != path:
            raise KeyError(path)
        return _entry(line, f"{MANIFEST}: tensors[{n}]", self._files)

    def _line(self, n: int) -> dict[str, Any]:
        start = self._starts[n]
        line = bytes(memoryview(self._raw)[start : self._raw.index(b"\n", start)])
        return parse(line.removesuffix(b","), f"{MANIFEST}: tensors[{n}]")


def _read(lines: _Lines, folder: int, step: int) -> Manifest:
    where, first = f"{MANIFEST}: header", lines.take("header")
    if not (first.startswith(b'{"header": ') and first.endswith(b",")):
        refuse(where, f'expected a line that starts with {{"header": and ends with a comma, got {show(first[:60])}')
    header = _header(parse(first[len(b'{"header": ') : -1], where), where)
    if header.step != step:
        refuse(f"{where}.step", f"it is {header.step}, and the directory is of step {step}")
    for n, size in enumerate(header.files):
        actual_size = regular_size(part_name(n), folder)
        if actual_size != size:
            refuse(f"{where}.files[{n}]", f"it is {size} bytes, and {part_name(n)} has {actual_size}")
    opening = lines.take("tensors")
    if opening != b'"tensors": [':
        refuse(f"{MANIFEST}: tensors", f"expected the line '\"tensors\": [', got {show(opening[:60])}")
    return Manifest(header, _tensors(lines, header.files))


def _tensors(lines: _Lines, files: Sequence[int]) -> _Tensors:
    """Reads and checks the lines of all tensors. Paths must be unique, and chunks must cover the files exactly."""
    entries, spans, stored = _Tensors(lines.raw, len(files)), _Spans(), sum(files)
    previous_path, expects_more = "", True
    start = lines.at
    while (line := lines.take(f"tensors[{len(entries)}]")) != b"],":
        where = f"{MANIFEST}: tensors[{len(entries)}]"
        if not expects_more:
            refuse(where, "the line before it ends the list")
        expects_more = line.endswith(b",")
        entry = _entry(parse(line.removesuffix(b","), where), where, len(files))
        if entry.path <= previous_path:
            refuse(
                f"{where}.path", f"{show(entry.path)} does not sort after {show(previous_path)}; paths must increase"
            )
        spans.add(entry, where, stored)
        entries.add(start)
        previous_path, start = entry.path, lines.at
    if expects_more and entries:
        refuse(f"{MANIFEST}: tensors", "the list ends with a comma")
    if lines.at != lines.end:
        refuse(f"{MANIFEST}: tensors", "unexpected text between the tensors and the hash")
    spans.check(files)
    return entries


class _Spans:
    """The byte range of every chunk in its file."""

    def __init__(self) -> None:
        self.files, self.offsets, self.sizes, self.tensors = array("q"), array("q"), array("q"), array("q")
        self.count, self.bytes = 0, 0

    def add(self, entry: StoredTensor, where: str, stored: int) -> None:
        """Add the chunks of a tensor; refuses it if the tensors so far have more than `stored` bytes."""
        for n, chunk in enumerate(entry.chunks):
            size = cell(entry.cuts, n).elements * entry.type.dtype.itemsize
            self.bytes += size
            if chunk.offset > stored:
                refuse(f"{where}.chunks[{n}]", f"it starts at byte {chunk.offset}; only {stored} bytes are stored")
            if self.bytes > stored:
                refuse(f"{where}.dims", f"the tensors up to this one have more than the {stored} stored bytes")
            self.files.append(chunk.file)
            self.offsets.append(chunk.offset)
            self.sizes.append(size)
            self.tensors.append(self.count)
        self.count += 1

    def check(self, files: Sequence[int]) -> None:
        """Refuse unless every byte of every file belongs to exactly one chunk."""
        number, offset, size = (np.frombuffer(a, np.int64) for a in (self.files, self.offsets, self.sizes))
        order = np.lexsort((offset, number))
        number, begin = number[order], offset[order]
        end = begin + size[order]
        for n, file_size in enumerate(files):
            first, last = np.searchsorted(number, [n, n + 1])
            expected = np.concatenate([[0], end[first:last]])
            wrong = np.flatnonzero(np.append(begin[first:last], file_size) != expected)
            if wrong.size == 0:
                continue
            first_wrong = int(wrong[0])
            if first + first_wrong == last:
                reason = f"{part_name(n)} has {file_size} bytes; its chunks have {expected[first_wrong]}"
                refuse(f"{MANIFEST}: header.files[{n}]", reason)
            start = begin[first + first_wrong]
            overlaps = start < expected[first_wrong]
            problem = "overlaps the chunk before it" if overlaps else "leaves a gap after the chunk before it"
            tensor = self.tensors[int(order[first + first_wrong])]
            location = f"{MANIFEST}: tensors[{tensor}].chunks"
            refuse(location, f"the chunk at byte {start} of {part_name(n)} {problem}")


def _header(value: Any, where: str) -> Header:
    if isinstance(value, dict) and (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        actual_format = f"{show(value.get('format'))} version {show(value.get('version'))}"
        refuse(f"{where}.version", f"it is {actual_format}; this meshdsl reads {FORMAT} version {VERSION}")
    fields = keys(value, HEADER_KEYS, where)
    files = items(fields["files"], f"{where}.files")
    if not 1 <= len(files) <= _FILES:
        refuse(f"{where}.files", f"got {len(files)} files, expected 1 to {_FILES}")
    key = fields["key"]
    if key is not None:
        key = tuple(integer(word, f"{where}.key", high=2**32 - 1) for word in items(key, f"{where}.key", 2))
    return Header(
        step=integer(fields["step"], f"{where}.step", high=STEP_LIMIT),
        save=text(fields["save"], f"{where}.save", 64),
        files=tuple(integer(size, f"{where}.files[{n}]") for n, size in enumerate(files)),
        config=plain(fields["config"], f"{where}.config"),
        data=plain(fields["data"], f"{where}.data"),
        key=key,
    )


def _entry(value: Any, where: str, files: int) -> StoredTensor:
    fields = keys(value, TENSOR_KEYS, where)
    path = text(fields["path"], f"{where}.path", PATH_LIMIT)
    name = text(fields["dtype"], f"{where}.dtype", 32)
    if name not in DTYPES:
        refuse(f"{where}.dtype", f"{show(name)} is unknown; known: {', '.join(DTYPES)}")
    dims = items(fields["dims"], f"{where}.dims")
    if len(dims) > _DIMS:
        refuse(f"{where}.dims", f"got {len(dims)} dims; the limit is {_DIMS}")
    pairs = [items(pair, f"{where}.dims[{n}]", 2) for n, pair in enumerate(dims)]
    sized = [
        (text(pair[0], f"{where}.dims[{n}]", 256), integer(pair[1], f"{where}.dims[{n}]"))
        for n, pair in enumerate(pairs)
    ]
    try:
        tensor_type = Type(tuple(Dim(*pair) for pair in sized), DTYPES[name])
    except ShapeError as error:
        refuse(f"{where}.dims", ascii(str(error.args[0]).partition("\n")[0][:120])[1:-1])
    if math.prod(max(1, size) for _, size in sized) * tensor_type.dtype.itemsize > 2**62:
        refuse(f"{where}.dims", f"the sizes {show([d.size for d in tensor_type.dims])} are too large for any array")
    cuts = _cuts(fields["cuts"], tensor_type.dims, f"{where}.cuts")
    chunks = items(fields["chunks"], f"{where}.chunks", cell_count(cuts))
    return StoredTensor(
        path, tensor_type, cuts, tuple(_chunk(c, f"{where}.chunks[{n}]", files) for n, c in enumerate(chunks))
    )


def _cuts(value: Any, shape: Shape, where: str) -> Cuts:
    lists = items(value, where, len(shape))
    cuts = tuple(tuple(integer(cut, where) for cut in items(dim, where)) for dim in lists)
    for dim, positions in zip(shape, cuts, strict=True):
        increases = all(a < b for a, b in itertools.pairwise(positions))
        if not positions or not increases or (positions[0], positions[-1]) != (0, dim.size):
            refuse(where, f"the cuts of dim {dim.name!r} do not increase from 0 to {dim.size}: {show(list(positions))}")
    return cuts


def _chunk(value: Any, where: str, files: int) -> Chunk:
    file, offset, digest = items(value, where, 3)
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        refuse(where, f"expected a SHA-256 of 64 hexadecimal digits, got {show(digest)}")
    return Chunk(integer(file, where, high=files - 1), integer(offset, where), bytes.fromhex(digest))
