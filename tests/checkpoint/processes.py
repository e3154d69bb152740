"""Checkpoints restored by another number of processes: `python -m tests.checkpoint.processes PORT RANK COUNT ...`.

For each pair of layouts (all drawn from its seed) there are three programs: A saves to `FOLDER/SEED/a`, B, with other
processes, mesh and layout, restores it, compares every value on its own devices bit for bit, and saves what it has to
`FOLDER/SEED/b`, C restores and compares that. One program of several processes does its part of many pairs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshdsl as md
from tests.together import free_port, run_together

from . import trees


def layouts(seed: int, devices: Sequence[int]) -> list[tuple[md.Mesh, md.Layout]]:
    """A mesh of all devices of each program (every process has a part of it), and a layout."""
    draw, found = random.Random(seed), []
    for count in devices:
        meshes = {8: ["a:8", "a:4 b:2", "b:2 a:4", "a:2 b:2 c:2"], 1: ["a:1"], 6: ["a:3 b:2", "a:6"], 4: ["a:4"]}
        mesh = md.Mesh(draw.choice(meshes[count]))
        axes, rules = list(mesh.axes), {}
        draw.shuffle(axes)
        for axis in axes:
            if draw.random() < 0.8:
                rules.setdefault(draw.choice(list(trees.SIZES)[:-1]), []).append(axis)
        found.append((mesh, md.Layout(rules)))
    return found


def compare_here(found: Any, values: Any) -> None:
    """Check that the blocks on this process's devices have the expected bits."""
    for x, wanted in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(values), strict=True):
        for shard in x.stored.addressable_shards:
            real = wanted[tuple(slice(s.start or 0, s.stop) for s in shard.index)]
            here = np.asarray(shard.data)[tuple(slice(0, n) for n in real.shape)]
            assert np.array_equal(trees.bits(here), trees.bits(real)), (x.type, shard.index)


def save(folder: Path, seed: int, mesh: md.Mesh, layout: md.Layout) -> None:
    """Program A."""
    specs = trees.specs(seed)
    tree = trees.tensors(specs, trees.values_for(specs, seed), mesh, layout)
    with md.Checkpoints(folder, chunk_bytes=64) as checkpoints:
        assert checkpoints.save(seed, tree, data=seed, key=md.random.key(seed))


def restore(folder: Path, seed: int, mesh: md.Mesh, layout: md.Layout) -> Any:
    """Programs B and C."""
    specs = trees.specs(seed)
    found = md.Checkpoints(folder).restore(like=specs, mesh=mesh, layout=layout)
    assert found.step == seed and found.data == seed
    compare_here(found.tree, trees.values_for(specs, seed))
    return found.tree


def move(source: Path, target: Path, seed: int, mesh: md.Mesh, layout: md.Layout) -> None:
    """Program B."""
    tree = restore(source, seed, mesh, layout)
    with md.Checkpoints(target, chunk_bytes=64) as checkpoints:
        assert checkpoints.save(seed, tree, data=seed, key=md.random.key(seed), wait=False)


def failures(folder: Path) -> None:
    """An error in one process reaches all processes, and they continue."""
    mesh, layout = md.Mesh("a:8"), md.Layout("hidden:a")
    specs = {"w": md.spec("io:4 hidden:16", "int32")}
    values = trees.values_for(specs, 0)
    tree = trees.tensors(specs, values, mesh, layout)
    said: list[str] = []
    checkpoints = md.Checkpoints(folder, chunk_bytes=64, report=said.append)
    checkpoints.save(1, tree)
    checkpoints.save(2, tree)
    checkpoints.wait()
    me = jax.process_index()
    if me == 1:  # the parts of the other process are sound
        part = folder / "step-00000002" / "part-00001.bin"
        part.write_bytes(bytes(part.stat().st_size))
    found = checkpoints.restore(like=specs, mesh=mesh, layout=layout)
    assert found.step == 1 and "step-00000002" in said[0], said
    compare_here(found.tree, values)
    try:
        checkpoints.restore(2, like=specs, mesh=mesh, layout=layout)
        raise AssertionError("it was restored")
    except md.CheckpointError as error:
        assert "step-00000002" in str(error)
    from meshdsl.train.checkpoint import write

    real = write.write_durably

    def full(path: Path, parts: Any) -> None:
        if me == 1 and path.name == "part-00001.bin":
            raise OSError(28, "No space left on device")
        real(path, parts)

    write.write_durably = full
    checkpoints.save(3, tree)
    try:
        checkpoints.wait()
        raise AssertionError("it was saved")
    except md.SaveError as error:
        wanted = "No space left" if me == 1 else "process 1 could not write its part"
        assert wanted in str(error) and "step-00000003" in str(error), error
    write.write_durably = real
    checkpoints.save(4, tree)
    checkpoints.close()
    other = md.Checkpoints(folder)
    try:
        other.save(4, tree)
        raise AssertionError("it was saved twice")
    except md.SaveError as error:
        assert ("step-00000004 already exists" in str(error)) == (me == 0), error
    other.close()
    # step 2 is corrupt and older: it stays until it is retired
    assert md.Checkpoints(folder).restore(like=specs, mesh=mesh, layout=layout).step == 4


def run(command: str, folder: Path, seeds: Sequence[int], counts: Sequence[int]) -> None:
    """Each program's part of each pair, in this process; or what can go wrong, once."""
    if command == "failures":
        failures(folder / "failures")
        return
    for seed in seeds:
        a, b, c = layouts(seed, counts)
        at = folder / str(seed)
        if command == "save":
            save(at / "a", seed, *a)
        elif command == "move":
            move(at / "a", at / "b", seed, *b)
        elif command == "restore":
            restore(at / "b", seed, *c)


def spawn(command: str, folder: Path, seeds: Sequence[int], counts: Sequence[int], processes: int, each: int) -> None:
    """The same in a program of so many processes with so many devices each."""
    port = free_port()
    words = [command, str(folder), ",".join(map(str, seeds)), ",".join(map(str, counts))]
    start = [sys.executable, "-m", "tests.checkpoint.processes"]
    numbers = [map(str, (port, rank, processes, each)) for rank in range(processes)]
    run_together([[*start, *own, *words] for own in numbers], seconds=600)


def main(port: str, rank: str, processes: str, each: str, command: str, folder: str, seeds: str, counts: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", int(each))
    if int(processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(rank), initialization_timeout=120)
    for part in command.split(","):
        run(part, Path(folder), [*map(int, seeds.split(","))], [*map(int, counts.split(","))])
    if int(processes) > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
