"""Kill a program that saves, at any moment: `python -m tests.checkpoint.crash KILLS SEED`.

The program (a fork of this one, so that it starts quickly) saves again and again into one directory. For every save it
has been promised (`wait` returned) it says so through a pipe. After each kill the newest sound step is at least the
last promised one, bit for bit, and the next program takes the directory over. Its last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from meshdsl.errors import CheckpointError
from meshdsl.trace import tensor
from meshdsl.train.checkpoint import Checkpoints
from meshdsl.train.checkpoint.grid import Box
from meshdsl.train.checkpoint.read import ReadRequest, open_step

SIZES = {"a": 30_000, "b": 7, "c": 1000}


def values(path: str, step: int) -> np.ndarray:
    """The values of a tensor at a step."""
    return np.random.default_rng([step, ord(path)]).integers(0, 2**31, SIZES[path]).astype(np.int32)


def save_forever(folder: Path, pipe: int) -> None:
    """The work of the child process until it is killed."""
    checkpoints = Checkpoints(folder, keep=2, chunk_bytes=8192)
    step = (checkpoints.latest() or 0) + 1
    tensor(values("a", step), "io").block_until_ready()  # JAX takes its time to start
    os.write(pipe, b"+")
    while True:
        checkpoints.save(step, {path: tensor(values(path, step), "io") for path in SIZES}, data=step)
        checkpoints.wait()
        os.write(pipe, step.to_bytes(8, "little"))
        step += 1


def newest_sound(folder: Path) -> int:
    """The newest step that is sound, after comparing every value of it; 0 when there is none."""
    for step in reversed(Checkpoints(folder).steps()):
        try:
            with open_step(folder, step) as reader:
                reader.verify()
                for path, entry in reader.manifest.tensors.items():
                    found = np.zeros(SIZES[path], np.int32)
                    reader.read(entry, [ReadRequest(Box((0,), found.shape), found)])
                    assert np.array_equal(found, values(path, step)), f"{path} of step {step} is wrong"
                assert reader.manifest.header.data == step and len(reader.manifest.tensors) == len(SIZES)
                return step
        except CheckpointError as error:
            raise AssertionError(f"a published step is not sound: {error}") from None
    return 0


def kill_once(folder: Path, delay: float, promised: int) -> tuple[int, bool]:
    """One program, killed `delay` seconds after its first save began; the last step promised, and if it was saving."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            save_forever(folder, writing)
        finally:
            os._exit(3)
    os.close(writing)
    began = os.read(reading, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    said = b""
    while block := os.read(reading, 1 << 16):
        said += block
    os.close(reading)
    assert began == b"+" and os.WIFSIGNALED(status), f"the program ended by itself: {began!r} {status}"
    if len(said) >= 8:
        last = said[: len(said) // 8 * 8][-8:]
        promised = int.from_bytes(last, "little")
    return promised, any(name.endswith(".unfinished") for name in os.listdir(folder))


def main(kills: int, seed: int) -> None:
    warnings.filterwarnings("ignore", message=r".*fork\(\)")
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="crash"))
    promised, interrupted = 0, 0
    for n in range(kills):
        promised, cut = kill_once(folder, draw.choice([0.1, 0.4, 1.2]) * draw.random(), promised)
        interrupted += cut
        newest = newest_sound(folder)
        assert newest >= promised, f"kill {n} of seed {seed}: step {promised} was promised, {newest} is there"
    shutil.rmtree(folder)
    print(json.dumps({"kills": kills, "while_writing": interrupted, "steps_promised": promised}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6))
