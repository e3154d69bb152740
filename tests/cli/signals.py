"""Runs of `meshdsl train` that get a signal while they start, or whose output nobody reads.

`python -m tests.cli.signals [start N] [pipes N] SEED`: 60 of each by default. `start` sends SIGTERM or SIGINT at a
random moment after the settings are read: the exit code is 75 or 130, and nothing is printed that looks like a crash.
`pipes` stops runs under `tee`, with readers that are gone, and with a full device: each has saved. The last line of
each is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshdsl.train.checkpoint.directory import step_numbers

ROOT = Path(__file__).parent.parent.parent
TINY = str(ROOT / "tests" / "train" / "tiny.py") + ":tiny"
COMMAND = [sys.executable, "-m", "meshdsl"]
DEFAULT = {"start": 60, "pipes": 60}

# How the run is started, who gets the signal, and the exit code. `log` has lines once the run prints.
DEAD = {
    "interrupt under tee": ("$RUN 2>&1 | tee log >/dev/null; exit ${PIPESTATUS[0]}", "group", signal.SIGINT, 130),
    "reader of both is gone": ("$RUN 2>&1 | head -n 3 > log; exit ${PIPESTATUS[0]}", "run", signal.SIGTERM, 75),
    "stdout is full": ("$RUN > /dev/full 2> log", "run", signal.SIGTERM, 75),
}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Processes started inside take SIGINT, which the background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def endless(folder: Path, script: str, **options: Any) -> subprocess.Popen[str]:
    """A run that only a signal ends, in a process group of its own, started by a shell script with `$RUN`."""
    line = (
        f"train {TINY} --steps 1000000000 --eval-batches 0 --save-every 100000000 --log-every 1 --checkpoints {folder}"
    )
    env = {**os.environ, "RUN": f"{sys.executable} -m meshdsl {line}"}
    with interruptible():
        return subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=env, start_new_session=True, **options)


def run_id(group: int, patience: float = 60) -> int:
    """The process id of the run in this process group."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"meshdsl" in words and b"bash" not in words[0]:
                        return int(entry.name)
            except OSError:
                continue
        time.sleep(0.05)
    raise AssertionError("the run did not start")


def until(condition: Callable[[], bool], patience: float = 120) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def saves_when_nobody_reads(folder: Path, name: str, seconds: float) -> None:
    """Stop a run of `DEAD` so long after it has taken the directory; raises `AssertionError` unless it saved."""
    script, whom, number, code = DEAD[name]
    process = endless(folder / "run", script.replace("log", str(folder / "log")))
    try:
        child = run_id(process.pid)
        until(lambda: (folder / "run" / "lock").exists())
        time.sleep(seconds)  # the first steps, and the pipe is full or dead
        (os.killpg(process.pid, number) if whom == "group" else os.kill(child, number))
        until(lambda: has_ended(child))
        assert process.wait(60) == code, (name, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(step_numbers(folder / "run")) == 1, f"{name}, {seconds} s: it did not save"
    assert not (folder / "run" / "lock").exists(), f"{name}, {seconds} s: the lock is left"


def _handles(pid: int, number: int) -> bool:
    """True once a handler of this signal is installed."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


def exits_while_starting(folder: Path, number: int, seconds: float) -> None:
    """Stop a run so long after its settings are read; raises `AssertionError` unless it exits with 75 or 130."""
    arguments = ["train", TINY, "--steps", "1000000000", "--checkpoints", str(folder)]
    with interruptible():
        process = subprocess.Popen(
            [*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT
        )
    with process:
        until(lambda: _handles(process.pid, signal.SIGTERM))
        time.sleep(seconds)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read()
    expected = 75 if number == signal.SIGTERM else 130
    assert process.returncode == expected and "Traceback" not in said, (number, seconds, process.returncode, said)


def start(count: int, draw: random.Random) -> dict[str, Any]:
    """Signals at random moments from the settings to some steps; a quarter within 0.1 s."""
    began, longest = time.monotonic(), 0.0
    for n in range(count):
        with tempfile.TemporaryDirectory(prefix="start") as folder:
            seconds = draw.uniform(0, draw.choice([0.1, 3.0, 3.0, 3.0]))
            exits_while_starting(Path(folder) / "run", (signal.SIGTERM, signal.SIGINT)[n % 2], seconds)
            longest = max(longest, seconds)
    return {"stopped": count, "latest_seconds": round(longest, 2), "seconds": round(time.monotonic() - began)}


def pipes(count: int, draw: random.Random) -> dict[str, Any]:
    began, kinds = time.monotonic(), list(DEAD)
    for n in range(count):
        with tempfile.TemporaryDirectory(prefix="pipes") as folder:
            saves_when_nobody_reads(Path(folder), kinds[n % len(kinds)], draw.uniform(0, 3))
    return {"stopped": count, "kinds": len(kinds), "seconds": round(time.monotonic() - began)}


def main(words: list[str]) -> None:
    seed = int(words.pop()) if len(words) % 2 else random.SystemRandom().randrange(10**6)
    plan = dict(zip(words[::2], map(int, words[1::2]), strict=True)) or DEFAULT
    for what, count in plan.items():
        result = {"start": start, "pipes": pipes}[what](count, random.Random(f"{what} {seed}"))
        print(json.dumps({"what": what, "seed": seed, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
