"""Manifests that someone made to do harm: well signed (the hash at the end is right), wrong in every way inside.

Reading one either gives a `CheckpointError` or succeeds; it takes no time and no memory to speak of, runs nothing and
opens nothing outside the step.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.train.checkpoint.manifest import MANIFEST
from meshdsl.train.checkpoint.read import open_step

SECONDS = 2.0  # of this process
ALLOWANCE = 1 << 20  # bytes of memory that have nothing to do with the file: message texts, the interpreter's own

NUMBERS = [-1, 0, 1, 2, 63, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e308, True]
TEXTS = [
    *("", "\0", "../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "a" * 2000, "\ud800", "__class__", "ä", "💥"),
    *("float32\0", "object", "O", "V8", "datetime64[ns]", "str", "complex256", ">f4", "float33", "__import__('os')"),
    *("step-00000001", "params/w0", "io", "0" * 64, "z" * 64, "A" * 64, "1_000", "١", "%s%n", "{0.__class__}"),
]
RAW = [  # what stands in the place of a value, as text: JSON's and not
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 5000, "0x10", "01", "+1", ".5", "1.", "--1"),
    *("[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900, "[" * 40 + "]" * 40, '"\\ud800"', '"\\u0000"', '"\\x"'),
    *('{"a": 1, "a": 2}', "[1, 2,]", "{}", "[]", "null", "true", "", "//", "'a'", '"unterminated', "\x00", "\x1f", "é"),
    *("[" + "{}," * 20_000 + "{}]", "[" + "0," * 50_000 + "0]", '"' + "x" * 200_000 + '"', '{"__proto__": 1}'),
]


class Target:
    """A sound step of some size, and the manifest to write in place of its own."""

    def __init__(self, folder: Path, megabytes: float = 1.0):
        side = int((megabytes * 2**20 / 4 / 2) ** 0.5)
        names = {"a": "io:{0} hidden:{0}", "b/c": "io:{0} hidden:{0}"}
        tree: dict[str, Any] = {
            path: md.tensor(np.full((side, side), n, np.float32), [md.Dim("io", side), md.Dim("hidden", side)])
            for n, path in enumerate(names)
        }
        tree |= {"scale": md.tensor(np.arange(5.0), "layer"), "flag": md.tensor([True, False], "two"), "n": 3}
        with md.Checkpoints(folder, chunk_bytes=256 << 10) as checkpoints:
            checkpoints.save(1, tree, config={"lr": 0.1, "deep": {"list": [1, 2]}}, data=[1], key=md.random.key(1))
        self.folder, self.step = folder, folder / "step-00000001"
        self.original = (self.step / MANIFEST).read_bytes()
        self.document = json.loads(self.original)
        self.part_size = (self.step / "part-00000.bin").stat().st_size
        self.honest = sum(file.stat().st_size for file in self.step.iterdir())

    def write(self, body: bytes) -> None:
        """The manifest, with the hash of this body at its end."""
        signed = body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode("ascii")
        (self.step / MANIFEST).write_bytes(signed)

    def restore(self) -> str:
        """`refused` or `accepted`; anything else raises. All of it is restored, unless it has very many tensors."""
        try:
            with open_step(self.folder, 1) as reader:
                reader.verify()
                few = len(reader.manifest.tensors) < 100
            if few:
                md.Checkpoints(self.folder).restore(1)
        except md.CheckpointError as error:
            text = str(error)
            text.encode("utf-8")  # it can be printed
            assert "step-00000001" in text and len(text) < 2000, text
            return "refused"
        return "accepted"

    def punch(self, draw: random.Random) -> None:
        """Make the manifest, or the data, much larger without writing: what follows is a hole."""
        name = draw.choice([MANIFEST, "part-00000.bin"])
        os.truncate(self.step / name, (self.step / name).stat().st_size + draw.choice([10**6, 10**9, 10**11, 10**13]))

    def mend(self) -> None:
        """The data without its hole."""
        os.truncate(self.step / "part-00000.bin", self.part_size)


def lay_out(document: dict[str, Any]) -> bytes:
    """A document as lines, as meshdsl lays it out, with no regard to what it says."""
    lines = ['{"header": ' + json.dumps(document.get("header")) + ",", '"tensors": [']
    tensors = document.get("tensors", [])
    lines += [json.dumps(t) + "," * (n + 1 < len(tensors)) for n, t in enumerate(tensors)]
    return ("\n".join([*lines, "],"]) + "\n").encode("ascii")


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in _places(item, (*at, key)))]


def _pick(document: Any, draw: random.Random) -> tuple[Any, Any]:
    """A container and a key in it; places deep in long lists are no more likely than the others."""
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.15:
            return place, key
        place = inner


def _value(draw: random.Random) -> Any:
    return draw.choice([*NUMBERS, *TEXTS, None, [], {}, [[]], [0, 0], {"a": 1}])


def _number(document: Any, draw: random.Random) -> None:
    for _ in range(200):
        place, key = _pick(document, draw)
        if isinstance(place[key], int):
            place[key] = draw.choice([*NUMBERS, place[key] + 1, place[key] - 1, place[key] * 2, -place[key]])
            return


def _replace(document: Any, draw: random.Random) -> None:
    place, key = _pick(document, draw)
    place[key] = _value(draw)


def _drop(document: Any, draw: random.Random) -> None:
    place, key = _pick(document, draw)
    del place[key]


def _repeat(document: Any, draw: random.Random) -> None:
    place, key = _pick(document, draw)
    if isinstance(place, list):
        place.insert(key, copy.deepcopy(place[key]))
    else:
        place[draw.choice(TEXTS)] = copy.deepcopy(place[key])


def _swap(document: Any, draw: random.Random) -> None:
    (a, i), (b, j) = _pick(document, draw), _pick(document, draw)
    a[i], b[j] = copy.deepcopy(b[j]), copy.deepcopy(a[i])


def _chunk(document: Any, draw: random.Random) -> None:
    """Chunks that overlap, are missing, moved, or of another tensor."""
    tensor, other = draw.choice(document["tensors"]), draw.choice(document["tensors"])
    chunk, stolen = draw.choice(tensor["chunks"]), draw.choice(other["chunks"])
    kind = draw.randrange(6)
    if kind == 0:
        chunk[:] = stolen
    elif kind == 1:
        chunk[1] = stolen[1]
    elif kind == 2:
        chunk[1] += draw.choice([-1, 1, 4, 1 << 20, 2**62])
    elif kind == 3:
        tensor["chunks"].remove(chunk)
    elif kind == 4:
        tensor["chunks"].append(stolen)
    else:
        draw.shuffle(tensor["chunks"])


def _dims(document: Any, draw: random.Random) -> None:
    """Sizes that promise more than is there, dims twice, many dims."""
    tensor = draw.choice(document["tensors"])
    kind = draw.randrange(4)
    if kind == 0:
        factor = draw.choice([2, 1 << 20, 2**40])
        tensor["dims"] = [[n, s * factor] for n, s in tensor["dims"]]
        tensor["cuts"] = [[c * factor for c in cuts] for cuts in tensor["cuts"]]
    elif kind == 1:
        tensor["dims"].append(draw.choice([["huge", 2**62], ["none", 0], ["io", 1]]))
        tensor["cuts"].append(draw.choice([[0, tensor["dims"][-1][1]], [0], []]))
    elif kind == 2:
        extra = draw.choice([30, 64, 500])
        tensor["dims"] += [[f"d{n}", 1] for n in range(extra)]
        tensor["cuts"] += [[0, 1]] * extra
    else:
        tensor["dtype"] = draw.choice(["float64", "uint8", "bool", "complex128", "int4", "bfloat16", "object", "V4"])


DOCUMENTS: list[Callable[[Any, random.Random], None]] = [
    *(_number, _number, _replace, _replace, _drop, _repeat, _swap, _chunk, _chunk, _dims, _dims)
]


def raw_mutation(body: bytes, draw: random.Random) -> bytes:
    """The text itself is damaged: other values, bytes, lines."""
    kind = draw.randrange(6)
    if kind == 0:  # another value in the place of a number or a text
        marks = [n for n in range(len(body)) if body[n : n + 1] in b"0123456789" and not body[n - 1 : n].isalnum()]
        start = draw.choice(marks)
        end = start
        while body[end : end + 1].isalnum():
            end += 1
        return body[:start] + draw.choice(RAW).encode("utf-8", "surrogatepass") + body[end:]
    if kind == 1:
        raw = bytearray(body)
        for _ in range(draw.choice([1, 2, 10])):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        return bytes(raw)
    lines = body.splitlines(keepends=True)
    if kind == 2:
        del lines[draw.randrange(len(lines))]
    elif kind == 3:
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
    elif kind == 4:
        draw.shuffle(lines)
    else:
        cut = draw.randrange(len(body))
        return body[:cut]
    return b"".join(lines)


def big(draw: random.Random, honest: bytes) -> bytes:
    """Long: many tensors, long lists, long lines, much space."""
    kind = draw.randrange(5)
    if kind == 0:
        entry = '{"path": "%d", "dtype": "int8", "dims": [["a", 0]], "cuts": [[0]], "chunks": []},\n'
        return honest.replace(b'"tensors": [\n', b'"tensors": [\n' + "".join(entry % n for n in range(20_000)).encode())
    if kind == 1:
        return honest.replace(b'"cuts": [[', b'"cuts": [[' + b"0, " * draw.choice([1000, 300_000]), 1)
    if kind == 2:
        return honest.replace(b'"chunks": [', b'"chunks": [' + b"[]," * draw.choice([1000, 300_000]), 1)
    if kind == 3:
        return honest + b"\n" * (20 << 20)
    return honest.replace(b'"files": [', b'"files": [' + b"0, " * 100_001, 1)


class Watch:
    """The audit events of Python that reading a manifest must not cause."""

    RUNS = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
    RUNS += ("marshal.loads", "ctypes.dlopen", "socket.connect", "import", "os.remove", "os.rename", "os.mkdir")

    def __init__(self) -> None:
        self.on, self.seen, self.allowed = False, set[str](), set[str]()
        sys.addaudithook(self._hook)

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *error: object) -> None:
        self.on = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in self.RUNS:
            self.seen.add(f"{event} {args[:1]}")
        if event == "open" and isinstance(args[0], str) and not self._inside(args[0]):
            self.seen.add(f"open {args[0]}")

    def _inside(self, name: str) -> bool:
        base = os.path.basename(name)
        return name in self.allowed or (base == name and base.startswith(("manifest.json", "part-", "step-")))


def _made(target: Target, body: bytes, draw: random.Random) -> bytes:
    kind = draw.random()
    if kind > 0.98:
        return big(draw, body)
    if kind > 0.7:
        return raw_mutation(body, draw)
    document = copy.deepcopy(target.document)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # damaged already
            draw.choice(DOCUMENTS)(document, draw)
    return lay_out(document) if isinstance(document.get("tensors", []), list) else b"{}\n"


def many(folder: Path, count: int, seed: int, megabytes: float = 1.0) -> dict[str, Any]:
    """So many hostile manifests; counts, and the worst time and memory. Raises `AssertionError` on any misbehaviour."""
    draw = random.Random(seed)
    target, watch = Target(folder, megabytes), Watch()
    watch.allowed = {str(folder), str(target.step), __file__}  # errors show the line of the caller
    body = lay_out(target.document)
    assert target.original.startswith(body), "the layout of this file is the layout of meshdsl"
    assert target.restore() == "accepted"
    results: dict[str, Any] = {"refused": 0, "accepted": 0, "seconds": 0.0, "bytes_over_honest": 0.0}
    for n in range(count):
        made = _made(target, body, draw)
        target.write(made)
        honest = target.honest - len(target.original) + len(made)
        del made
        has_hole = draw.random() < 0.05
        if has_hole:
            target.punch(draw)
        keep = f"case {n} of seed {seed}, in {target.step / MANIFEST}"
        began = time.process_time()
        with watch:
            outcome = target.restore()
        seconds = time.process_time() - began
        tracemalloc.start()  # a second time, because watching memory makes it several times slower
        try:
            assert target.restore() == outcome
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert seconds < SECONDS, f"{keep}: {seconds} s"
        assert peak < 2 * honest + ALLOWANCE, f"{keep}: {peak} bytes, {honest} are honest"
        assert not watch.seen, f"{keep}: {watch.seen}"
        if has_hole:
            assert outcome == "refused", f"{keep}: a hole was accepted"
            target.mend()
        results[outcome] += 1
        results["seconds"] = max(results["seconds"], seconds)
        results["bytes_over_honest"] = max(results["bytes_over_honest"], peak / honest)
    shutil.rmtree(folder)
    return results
