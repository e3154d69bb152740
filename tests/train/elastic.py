"""A run that loses a process goes on with those that are left: `python -m tests.train.elastic [--processes 4]`.

A loop as a launcher's starts `meshdsl train --mesh 'all:*'` with all processes; once a step is saved, one of them is
killed. The loop then starts one process less, stops them by a signal, and starts all of them again. Losses of every
step are compared with those of one process that was not stopped; and the seconds from the kill to the next step are
measured without and with JAX's compilation cache. Each prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.together import ROOT, free_port

SMALL = [word for size in ("batch=12", "length=64", "d_model=64", "d_ff=256", "layers=2") for word in ("--set", size)]
TOLERANCE = 1e-5  # of a loss, relative: float32 sums in another order
SECONDS = 300.0


class Run:
    """The processes of one start."""

    def __init__(self, folder: Path, workload: list[str], processes: int, steps: int, cache: Path | None):
        self.folder, self.began = folder, time.monotonic()
        command = [sys.executable, "-m", "meshdsl", "train", *workload, "--mesh", "all:*", "--layout", "batch:all"]
        command += ["--steps", str(steps), "--eval-batches", "0", "--json"]
        command += ["--save-every", "2", "--checkpoints", str(folder / "run"), "--devices", str(processes)]
        variables = {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        variables |= {"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {}
        address = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder / f"{len(list(folder.glob('*.out')))}.out"
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(processes):
            mine = [*command, *address, "--process", str(rank)] if processes > 1 else command
            with open(self.out if rank == 0 else os.devnull, "w") as out, open(folder / f"{rank}.err", "a") as err:
                env = {**os.environ, **variables}
                self.processes.append(subprocess.Popen(mine, cwd=ROOT, env=env, stdout=out, stderr=err))

    def records(self, event: str) -> list[dict[str, float]]:
        lines = [
            json.loads(line) for line in self.out.read_text().splitlines() if line.startswith("{") and line[-1] == "}"
        ]
        return [record for record in lines if record["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> float:
        """Wait for so many of these records; returns the time of the last."""
        while len(self.records(event)) < count:
            assert time.monotonic() - self.began < SECONDS and self.processes[0].poll() is None, self.said()
            time.sleep(0.02)
        return time.monotonic()

    def end(self) -> list[int]:
        for process in self.processes:
            process.wait(SECONDS)
        return [process.returncode for process in self.processes]

    def said(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self.folder.glob("*.err"))


def elastic(home: Path, workload: list[str], processes: int, steps: int, cache: Path | None) -> dict[str, object]:
    """One run: all processes, one less, all again. Returns what is to be printed."""
    folder = home / ("cached" if cache else "run")
    first = Run(folder, workload, processes, steps, cache)
    first.wait_for("save", 2)
    first.processes[-1].kill()
    killed = time.monotonic()
    codes = [first.end()]
    ended = time.monotonic()
    second = Run(folder, workload, processes - 1, steps, cache)
    stepped = second.wait_for("step")
    second.wait_for("save", 2)
    second.processes[0].send_signal(signal.SIGTERM)
    codes.append(second.end())
    began = time.monotonic()
    third = Run(folder, workload, processes, steps, cache)
    again = third.wait_for("step")
    codes.append(third.end())
    expected = [[*[69] * (processes - 1), -9], [75] * (processes - 1), [0] * processes]
    assert codes == expected, (codes, first.said())
    return {
        "cache": cache is not None,
        "codes": codes,
        "steps": [[r["step"] for r in run.records("step")] for run in (first, second, third)],
        "losses": {int(r["step"]): r["loss"] for run in (first, second, third) for r in run.records("step")},
        "seconds_to_end": round(ended - killed, 1),
        "seconds_to_step_with_fewer": round(stepped - killed, 1),
        "seconds_to_step_with_all": round(again - began, 1),
        "compile_seconds": [round(run.records("step")[0]["compile_seconds"], 1) for run in (first, second, third)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="a run that goes on with fewer processes")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workload", default="transformer:lm")
    options, more = parser.parse_known_args()
    workload = [options.workload, *(more or SMALL)]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        alone = Run(home / "whole", workload, 1, options.steps, None)
        assert alone.end() == [0], alone.said()
        whole = {int(r["step"]): r["loss"] for r in alone.records("step")}
        for cache in (None, home / "cache", home / "cache"):
            found = elastic(home, workload, options.processes, options.steps, cache)
            losses, steps = found.pop("losses"), found.pop("steps")
            assert isinstance(losses, dict) and set(losses) == set(whole)
            worst = max(abs(losses[step] - whole[step]) / abs(whole[step]) for step in whole)
            assert isinstance(steps, list) and worst < TOLERANCE, worst
            ranges = [f"{each[0]} to {each[-1]}" for each in steps]
            print(
                json.dumps({**found, "steps": ranges, "largest_relative_difference": float(f"{worst:.2g}")}), flush=True
            )
            if cache:
                subprocess.run(["rm", "-rf", str(home / "cached")], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
