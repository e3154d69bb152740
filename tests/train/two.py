"""A run of two processes of four devices each, of which one gets a signal: both save the same step and exit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.together import free_port

ROOT = Path(__file__).parent.parent.parent
SECONDS = 240
EVENTS = ("", "start", "step", "eval", "save")  # "": as soon as process 0 says anything, which gloo does


class Ended(NamedTuple):
    codes: list[int]
    said: list[str]


def stopped(folder: Path, event: str, rank: int, number: int = signal.SIGTERM, *options: str) -> Ended:
    """Train until process 0 has said the event, then send the signal to process `rank` alone."""
    port = free_port()
    command = [sys.executable, "-m", "meshdsl", "train", "tests/train/tiny.py:tiny", "--checkpoints", str(folder)]
    command += ["--steps", "1000000", "--save-every", "20", "--eval-every", "10", "--eval-batches", "2", "--json"]
    command += ["--mesh", "rows:4 cols:2", "--layout", "batch:rows; hidden:cols", "--devices", "8"]
    command += ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", *options]
    processes = [
        subprocess.Popen(
            [*command, "--process", str(i)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if not event or (line.startswith("{") and json.loads(line)["event"] == event):  # gloo talks on stdout too
                break
        processes[rank].send_signal(number)
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Ended([process.returncode for process in processes], said)


def two(count: int, seed: int, until: float) -> dict[str, Any]:
    """So many runs, each stopped after another event; every second one goes on from what the one before it saved."""
    from meshdsl.train.checkpoint.directory import step_numbers
    from meshdsl.train.checkpoint.read import open_step

    draw, home, done = random.Random(seed), Path(tempfile.mkdtemp(prefix="two")), 0
    newest = -1
    for n in range(count):
        if time.monotonic() > until:
            break
        if n % 2 == 0:
            shutil.rmtree(home, ignore_errors=True)
            newest = -1
        number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
        ended = stopped(home / "run", EVENTS[n % len(EVENTS)], draw.randrange(2), number)
        assert ended.codes == [75 if number == signal.SIGTERM else 130] * 2, (n, ended)
        step = step_numbers(home / "run")[-1]
        with open_step(home / "run", step) as reader:
            reader.verify()
        assert all(f"step {step} is saved" in text for text in ended.said), (step, ended)
        assert step >= newest, (step, newest)
        newest, done = step, done + 1
        print(f"two {n}, after {EVENTS[n % len(EVENTS)] or 'anything'}: step {step}", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    return {"stopped": done}
