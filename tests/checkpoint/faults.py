"""Damage to a saved step. After each, the step says that it is damaged, or gives exactly what was saved; and the
step before it is found.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshdsl as md

from . import trees

GOOD, DAMAGED = 1, 2


class Bench:
    """A directory with two sound steps, and what they hold; a damaged copy is made for every case."""

    def __init__(self, folder: Path, seed: int = 0, chunk_bytes: int = 64):
        self.pristine, self.work = folder / "pristine", folder / "work"
        specs = trees.specs(seed)
        mesh, layout = md.Mesh("a:4 b:2"), md.Layout("hidden:a io:b")
        self.values: dict[int, dict[str, np.ndarray]] = {}
        self.run = {GOOD: {"lr": 0.5, "name": "good"}, DAMAGED: {"lr": 0.25, "name": "damaged"}}
        with md.Checkpoints(self.pristine, chunk_bytes=chunk_bytes) as checkpoints:
            for step in (GOOD, DAMAGED):
                values = trees.values_for(specs, 100 * step)
                checkpoints.save(step, trees.tensors(specs, values, mesh, layout), config=self.run[step], data=[step])
                paths = [jax.tree_util.keystr(k, simple=True, separator="/") for k, _ in _leaves(values)]
                self.values[step] = dict(zip(paths, (v for _, v in _leaves(values)), strict=True))

    @property
    def step(self) -> Path:
        """The directory that is damaged."""
        return self.work / f"step-{DAMAGED:08d}"

    def fresh(self) -> None:
        """A copy that is not damaged yet."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.pristine, self.work)

    def holds(self, found: md.Restored) -> bool:
        """True if all restored tensors equal those saved as that step."""
        values = self.values[found.step]
        return (
            found.config == self.run[found.step]
            and found.data == [found.step]
            and found.tree.keys() == values.keys()
            and all(np.array_equal(trees.bits(x.numpy()), trees.bits(values[path])) for path, x in found.tree.items())
        )

    def check(self, what: str) -> str:
        """`detected`, or `harmless` when all of it was restored all the same. Anything else is an `AssertionError`."""
        said: list[str] = []
        checkpoints = md.Checkpoints(self.work, report=said.append)
        result = "detected"
        try:
            found = checkpoints.restore(DAMAGED)
            assert self.holds(found), f"{what}: SILENT: wrong values"
            result = "harmless"
        except md.CheckpointError as error:
            assert f"step-{DAMAGED:08d}" in str(error), f"{what}: the step has no name in {error}"
        newest = checkpoints.restore()
        assert self.holds(newest), f"{what}: SILENT: wrong values from the newest sound step"
        assert newest.step == (DAMAGED if result == "harmless" else GOOD), what
        assert result == "harmless" or any(f"step-{DAMAGED:08d}" in line for line in said), f"{what}: not reported"
        return result


def _leaves(values: Any) -> Any:
    return jax.tree_util.tree_flatten_with_path(values)[0]


def _files(step: Path) -> list[Path]:
    return sorted(step.iterdir())


def flip(bench: Bench, draw: random.Random) -> str:
    """One bit of one file, each bit of the step as likely as any other."""
    files = _files(bench.step)
    bit = draw.randrange(8 * sum(file.stat().st_size for file in files))
    for file in files:
        bits = 8 * file.stat().st_size
        if bit < bits:
            raw = bytearray(file.read_bytes())
            raw[bit // 8] ^= 1 << bit % 8
            file.write_bytes(raw)
            return f"bit {bit} of {file.name}"
        bit -= bits
    raise AssertionError("no such bit")


def truncate(bench: Bench, draw: random.Random) -> str:
    """A file loses its end."""
    file = draw.choice(_files(bench.step))
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} cut to {size} bytes"


def extend(bench: Bench, draw: random.Random) -> str:
    """Something is written behind a file's end."""
    file = draw.choice(_files(bench.step))
    with file.open("ab") as out:
        out.write(draw.choice([b"\0", b"\n", b"{}", b"\0" * 4096]))
    return f"{file.name} extended"


def delete(bench: Bench, draw: random.Random) -> str:
    """A file of the step is gone, or all of it."""
    target = draw.choice([*_files(bench.step), bench.step])
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return f"{target.name} deleted"


def swap_chunks(bench: Bench, draw: random.Random) -> str:
    """Two equally long pieces of the data change places."""
    file = bench.step / "part-00000.bin"
    raw = bytearray(file.read_bytes())
    length = draw.choice([1, 4, 8, 16, 32, 64])
    a, b = sorted(draw.sample(range(0, len(raw) - length + 1, length), 2))
    raw[a : a + length], raw[b : b + length] = raw[b : b + length], raw[a : a + length]
    file.write_bytes(raw)
    return f"{length} bytes at {a} and {b} swapped"


def swap_files(bench: Bench, draw: random.Random) -> str:
    """A file of the step changes places with that of the other step, or both directories do, or one is a link."""
    other = bench.work / f"step-{GOOD:08d}"
    kind = draw.choice(["part-00000.bin", "manifest.json", "copy", "link"])
    if kind == "copy":
        shutil.rmtree(bench.step)
        shutil.copytree(other, bench.step)
    elif kind == "link":
        file = draw.choice(_files(bench.step))
        moved = bench.work / "elsewhere"
        file.rename(moved)
        file.symlink_to(moved)
    else:
        (bench.step / kind).write_bytes((other / kind).read_bytes())
    return f"{kind} of the other step"


def zero(bench: Bench, draw: random.Random) -> str:
    """A run of bytes reads as zero, as after a lost write."""
    file = draw.choice(_files(bench.step))
    raw = bytearray(file.read_bytes())
    start = draw.randrange(len(raw))
    length = min(draw.choice([16, 512, 4096]), len(raw) - start)
    raw[start : start + length] = bytes(length)
    file.write_bytes(raw)
    return f"{length} bytes of {file.name} at {start} are zero"


FAULTS: dict[str, Callable[[Bench, random.Random], str]] = {
    f.__name__: f for f in (flip, truncate, extend, delete, swap_chunks, swap_files, zero)
}


def many(bench: Bench, name: str, count: int, seed: int) -> dict[str, int]:
    """So many faults of a kind; how many were detected, and how many changed nothing."""
    draw = random.Random(f"{name} {seed}")
    results = {"detected": 0, "harmless": 0}
    for _ in range(count):
        bench.fresh()
        results[bench.check(FAULTS[name](bench, draw))] += 1
    return results


def hint(folder: Path, name: str, every: int) -> int:
    """Flip every so many bits of `newest`, a hint, or of the `lock` of a writer that has ended; returns how many.

    Raises `AssertionError` if one of them keeps a run from going on.
    """
    with md.Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": 1.0})
        checkpoints.wait()
        honest = (folder / name).read_bytes()
    bits = range(0, 8 * len(honest), every)
    for bit in bits:
        raw = bytearray(honest)
        raw[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(raw)
        assert md.Checkpoints(folder, report=lambda line: None).restore().step == 2, f"bit {bit} of {name}"
    for text in (b"", b"[]", b"3", b'{"step": "2"}', b'{"step": true}', b'{"step": 1e400}', b"\0" * 99):
        (folder / name).write_bytes(text)
        assert md.Checkpoints(folder, report=lambda line: None).restore().step == 2, text
    return len(bits)
