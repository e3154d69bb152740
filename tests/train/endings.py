"""A table of runs in which one process fails: `python -m tests.train.endings` prints how and when all of them end.

Each case has one fault in one process, once the run is in step 3. All must end within ten seconds of the fault: that
process with its own code, the others with 69, and each says what happened and which step is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import meshdsl as md
from tests.together import ROOT, free_port
from tests.train.tiny import Config, loss
from tests.train.tiny import tiny as plain

SLOW = ("sleep", "loader", "stuck")  # what --step-timeout is for; "stuck" is "stop" with it
FAULTS = ("raise", "exit", "nan", "kill", "stop", "terminate", "seed", "rate", "source", "program", "data", *SLOW)


def _data(config: object, seed: int):
    """The data of `faulty`: batches of ones; in step 3, the process with the variable FAULT does what it says."""
    import numpy as np

    def batches(split: str, step: int) -> dict[str, np.ndarray]:
        x, fault = np.ones((4, 3), np.float32), os.environ.get("FAULT")
        if split == "train" and step >= 3:
            time.sleep(0.2)  # so that the run is in this step when a signal comes
        if split == "train" and step == 4 and fault == "raise":
            raise ValueError("row 7 of shard 2 is broken")
        if split == "train" and step == 4 and fault == "exit":
            sys.exit("the reader gives up")
        if split == "train" and step == 4 and fault == "data":
            return {"x": 2 * x}
        if split == "train" and step == 8 and fault == "sleep":
            time.sleep(10_000)
        if split == "train" and step == 8 and fault == "loader":
            queue.Queue[object]().get()  # of a worker that is gone
        return {"x": x * np.nan if split == "train" and step == 4 and fault == "nan" else x}

    return batches


def _loss(config: Config) -> Callable[..., md.Tensor]:
    """The loss of `tiny`; with the fault "program", one more sum over the batch."""
    of_tiny = loss(config)

    def faulty(params: dict[str, md.Tensor], batch: dict[str, md.Tensor], key: md.Tensor) -> md.Tensor:
        shift = md.mean(batch["x"], "batch") if os.environ.get("FAULT") == "program" else 0.0
        return of_tiny(params, {"x": batch["x"] + shift}, key)

    return faulty


faulty = plain.__class__(**{**vars(plain), "name": "faulty", "data": _data, "loss": _loss})


class Ended(NamedTuple):
    seconds: float  # from the fault to the end of the last process
    codes: list[int]
    said: list[str]


def ended(fault: str, where: int, folder: Path, count: int = 2, limit: float = 150.0) -> Ended:
    """Start a run of so many processes with a fault in process `where`, and wait until all have ended."""
    command = [sys.executable, "-m", "meshdsl", "train", "tests/train/endings.py:faulty", "--steps", "10000"]
    command += ["--save-every", "2", "--checkpoints", str(folder / "run"), "--eval-batches", "0", "--json"]
    command += ["--mesh", "all:4", "--devices", "4"]
    command += [] if fault == "data" else ["--layout", "batch:all"]  # copies of weights see their own data
    command += ["--step-timeout", "5"] if fault in SLOW else []
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    options = {"seed": ["--seed", "1"], "rate": ["--set", "learning_rate=0.5"]}
    if fault == "source":
        (folder / "other.py").write_text(f"from tests.train.endings import faulty\n# of process {where}\n")
    processes = []
    for rank in range(count):
        mine = [*command, "--process", str(rank), *(options.get(fault, []) if rank == where else [])]
        if fault == "source" and rank == where:
            mine[4] = f"{folder / 'other.py'}:faulty"
        env = {**os.environ, "PYTHONPATH": str(ROOT), **({"FAULT": fault} if rank == where else {})}
        with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
            processes.append(subprocess.Popen(mine, cwd=ROOT, env=env, stdout=out, stderr=err))
    try:
        began = _fault(fault, processes[where], folder, limit)
        if fault in ("stop", "stuck"):  # it stays as it is; the others end
            others = [p for i, p in enumerate(processes) if i != where]
        else:
            others = processes
        for process in others:
            process.wait(max(1.0, limit - (time.monotonic() - began)))
        seconds = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [(folder / f"{rank}.err").read_text() for rank in range(count)]
    return Ended(seconds, [p.returncode for p in processes], said)


def _fault(fault: str, process: subprocess.Popen[bytes], folder: Path, limit: float) -> float:
    """Wait for the fault's step (if the run starts at all), send the signal, and return the time of the fault."""
    out, signals = folder / "0.out", {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
    signals["stuck"] = signal.SIGSTOP
    step = 6 if fault in SLOW else 3  # its record comes when step 8 begins, which does not end
    end = time.monotonic() + limit
    while time.monotonic() < end:
        records = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
        if any(r.get("event") == "step" and r["step"] >= step for r in records):
            break
        if process.poll() is not None or (fault in ("seed", "rate", "source", "program") and "differ" in _all(folder)):
            break
        time.sleep(0.05)
    if fault in signals:
        process.send_signal(signals[fault])
    return time.monotonic()


def _all(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.err"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", default=",".join(FAULTS))
    options = parser.parse_args()
    late = 0
    for fault in options.faults.split(","):
        for where in (0, options.processes - 1):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = ended(fault, where, Path(folder), options.processes)
                except subprocess.TimeoutExpired:
                    print(f"{fault:10} process {where}: not within 150 s\n{_all(Path(folder))}", flush=True)
                    late += 1
                    continue
            late += found.seconds > 10
            lines = [line for text in found.said for line in text.splitlines()]
            says = [line for line in lines if re.match(r"process|step \d|  +\S|\w+(Error|Loss|ed):", line)]
            print(f"{fault:10} process {where}: {found.seconds:4.1f} s  codes {found.codes}", flush=True)
            for line in dict.fromkeys(says):
                print(f"             {line}", flush=True)
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
