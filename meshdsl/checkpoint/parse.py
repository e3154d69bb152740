"""Reading a manifest that anyone may have written.

The text is read and hashed once, and stays the only copy: lines are checked one by one, then parsed again when their
tensor is asked for. So a manifest needs little more memory than its own bytes, whatever it says, and every size and
offset was held against the files before anything is allocated for it.
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

from ..dims import Dim, Shape
from ..errors import ShapeError
from ..ir import Type
from .files import opened, read_at, regular_size
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
    Entry,
    Header,
    Manifest,
    header_limit,
    part_name,
    signature,
)
from .strict import items, keys, parse, plain, refuse, show, text, whole

__all__ = ["load"]

_FILES = 100_000  # processes that wrote
_DIMS = 64  # of a tensor
_HEX = re.compile(r"[0-9a-f]{64}")


def load(folder: int, step: int) -> Manifest:
    """The manifest of the step whose directory is open. Nothing of it is used before its hash and every field fit.

    Raises `CheckpointError`, naming the file and the key, when anything does not.
    """
    stored = _stored_bytes(folder)
    with opened(MANIFEST, folder) as fd:
        size, largest = os.fstat(fd).st_size, (4 << 20) + stored // 4
        if not len(signature(b"")) < size <= largest:
            refuse(MANIFEST, f"it has {size} bytes; beside {stored} bytes of tensors, {largest} are the most")
        raw = bytearray(size)
        read_at(fd, memoryview(raw), 0, MANIFEST)
    end = size - len(signature(b""))
    if raw[end:] != signature(memoryview(raw)[:end]):
        refuse(MANIFEST, "it does not end in the SHA-256 of what stands before; it was changed or cut off")
    return _read(_Lines(raw, end, header_limit(stored)), folder, step)


def _stored_bytes(folder: int) -> int:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if re.fullmatch(r"part-\d{5,6}\.bin", entry.name)]
    return sum(regular_size(name, folder) for name in names)


class _Lines:
    """The lines of the first `end` bytes, none of them longer than `longest`."""

    def __init__(self, raw: bytearray, end: int, longest: int):
        self.raw, self.at, self.end, self.longest = raw, 0, end, longest

    def take(self, where: str) -> bytes:
        limit = min(self.end, self.at + self.longest)
        stop = self.raw.find(b"\n", self.at, limit)
        if stop < 0:
            why = "the file ends in it" if limit == self.end else f"it is longer than {self.longest} bytes"
            refuse(f"{MANIFEST}: {where}", why)
        line = bytes(memoryview(self.raw)[self.at : stop])
        self.at = stop + 1
        return line


class _Tensors(Mapping[str, Entry]):
    """Entries by path, parsed when they are asked for. Their lines stand in the order of their paths."""

    def __init__(self, raw: bytearray, files: int):
        self._raw, self._files, self._starts = raw, files, array("q")

    def add(self, start: int) -> None:
        """One more line, which begins here."""
        self._starts.append(start)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[str]:
        return (self._line(n)["path"] for n in range(len(self)))

    def __getitem__(self, path: str) -> Entry:
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
        refuse(where, f'expected a line that begins {{"header": and ends in a comma, got {show(first[:60])}')
    header = _header(parse(first[len(b'{"header": ') : -1], where), where)
    if header.step != step:
        refuse(f"{where}.step", f"it says step {header.step}, and the directory is that of step {step}")
    for n, size in enumerate(header.files):
        there = regular_size(part_name(n), folder)
        if there != size:
            refuse(f"{where}.files[{n}]", f"it says {size} bytes, and {part_name(n)} has {there}")
    opening = lines.take("tensors")
    if opening != b'"tensors": [':
        refuse(f"{MANIFEST}: tensors", f"expected the line '\"tensors\": [', got {show(opening[:60])}")
    return Manifest(header, _tensors(lines, header.files))


def _tensors(lines: _Lines, files: Sequence[int]) -> _Tensors:
    """The tensors' lines, each of them checked, and together: no path twice, no byte of a file twice or never."""
    found, spans, stored = _Tensors(lines.raw, len(files)), _Spans(), sum(files)
    before, more = "", True
    start = lines.at
    while (line := lines.take(f"tensors[{len(found)}]")) != b"],":
        where = f"{MANIFEST}: tensors[{len(found)}]"
        if not more:
            refuse(where, "the line before it ends the list")
        more = line.endswith(b",")
        entry = _entry(parse(line.removesuffix(b","), where), where, len(files))
        if entry.path <= before:
            refuse(f"{where}.path", f"{show(entry.path)} does not come after {show(before)}; paths rise")
        spans.add(entry, where, stored)
        found.add(start)
        before, start = entry.path, lines.at
    if more and found:
        refuse(f"{MANIFEST}: tensors", "the list ends in a comma")
    if lines.at != lines.end:
        refuse(f"{MANIFEST}: tensors", "something stands between the tensors and the hash")
    spans.check(files)
    return found


class _Spans:
    """Which bytes of which file every chunk takes."""

    def __init__(self) -> None:
        self.files, self.offsets, self.sizes, self.tensors = array("q"), array("q"), array("q"), array("q")
        self.count, self.bytes = 0, 0

    def add(self, entry: Entry, where: str, stored: int) -> None:
        """The chunks of one more tensor. Refuses one that, with those before it, has more than `stored` bytes."""
        for n, chunk in enumerate(entry.chunks):
            size = cell(entry.cuts, n).elements * entry.type.dtype.itemsize
            self.bytes += size
            if chunk.offset > stored:
                refuse(f"{where}.chunks[{n}]", f"it begins at byte {chunk.offset}, and {stored} are stored in all")
            if self.bytes > stored:
                refuse(f"{where}.dims", f"the tensors up to this one have more than the {stored} bytes that are stored")
            self.files.append(chunk.file)
            self.offsets.append(chunk.offset)
            self.sizes.append(size)
            self.tensors.append(self.count)
        self.count += 1

    def check(self, files: Sequence[int]) -> None:
        """Every byte of every file belongs to exactly one chunk."""
        number, offset, size = (np.frombuffer(a, np.int64) for a in (self.files, self.offsets, self.sizes))
        order = np.lexsort((offset, number))
        number, begin = number[order], offset[order]
        end = begin + size[order]
        for n, wanted in enumerate(files):
            first, last = np.searchsorted(number, [n, n + 1])
            expected = np.concatenate([[0], end[first:last]])
            wrong = np.flatnonzero(np.append(begin[first:last], wanted) != expected)
            if wrong.size == 0:
                continue
            at = int(wrong[0])
            if first + at == last:
                why = f"{part_name(n)} has {wanted} bytes, its chunks {expected[at]}"
                refuse(f"{MANIFEST}: header.files[{n}]", why)
            what = "overlaps the chunk before it" if begin[first + at] < expected[at] else "leaves bytes to no chunk"
            tensor = self.tensors[int(order[first + at])]
            place = f"{MANIFEST}: tensors[{tensor}].chunks"
            refuse(place, f"what begins at byte {begin[first + at]} of {part_name(n)} {what}")


def _header(value: Any, where: str) -> Header:
    if isinstance(value, dict) and (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        there = f"{show(value.get('format'))} version {show(value.get('version'))}"
        refuse(f"{where}.version", f"it is {there}; this meshdsl reads {FORMAT} version {VERSION}")
    fields = keys(value, HEADER_KEYS, where)
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
        config=plain(fields["config"], f"{where}.config"),
        data=plain(fields["data"], f"{where}.data"),
        key=key,
    )


def _entry(value: Any, where: str, files: int) -> Entry:
    fields = keys(value, TENSOR_KEYS, where)
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
        refuse(f"{where}.dims", ascii(str(error.args[0]).partition("\n")[0][:120])[1:-1])
    if math.prod(max(1, size) for _, size in sized) * kind.dtype.itemsize > 2**62:
        refuse(f"{where}.dims", f"the sizes {show([d.size for d in kind.shape])} are too large for any array")
    cuts = _cuts(fields["cuts"], kind.shape, f"{where}.cuts")
    chunks = items(fields["chunks"], f"{where}.chunks", cell_count(cuts))
    return Entry(path, kind, cuts, tuple(_chunk(c, f"{where}.chunks[{n}]", files) for n, c in enumerate(chunks)))


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
