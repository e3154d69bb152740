"""A long run of two processes: `python -m tests.train.long [--steps 10000] [--kills 12] [--seed N]`.

Three runs of a small model, on two processes of two CPU devices each. `whole` is undisturbed; its memory, file
descriptors and threads are sampled, and stay flat. `killed` is killed at random moments and resumed, under the same
layout: every loss, also of steps that ran twice, and the last checkpoint equal those of `whole`, bit for bit. `moved`
resumes under another layout after every kill; its losses are within a tolerance. A kill is SIGKILL to one process or
both, or (one in four) SIGTERM to one of them, which both answer by saving and exiting with 75. A process is a fork of
this program, which itself never starts JAX. Each run prints a line of JSON.
"""

from __future__ import annotations

import argparse
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
from typing import Any

from tests.together import free_port
from tests.train.faults import content

LAYOUTS = [
    ("all:4", "batch:all"),
    ("all:4", "hidden:all"),
    ("rows:2 cols:2", "batch:rows hidden:cols"),
    ("rows:2 cols:2", "io:rows hidden:cols"),
    ("all:4", "io:all"),
    ("rows:2 cols:2", "batch:cols io:rows"),
]
SAMPLES = 40
TOLERANCE = 1e-3  # of a loss, relative: float32 sums in another order, over thousands of updates
SECONDS = 600  # without a step: something hangs
GROWTH = 16.0  # MB of memory between the second tenth of the run and its end


def sample() -> dict[str, float]:
    """Memory in MB, file descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
    return {
        "memory": memory,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def run_here(folder: Path, rank: int, port: int, where: tuple[str, str], steps: int) -> int:
    """Train to the end in one process, and write losses and samples to `folder`. Returns the exit code."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    import meshdsl as md
    from meshdsl.train import Keeping, Stop, Stopped, train
    from tests.train.tiny import tiny

    keep = Keeping(md.Checkpoints(folder / "steps", take_over=True, report=lambda line: None), max(1, steps // 50))
    every = max(1, steps // SAMPLES)
    with Stop() as stop, (folder / f"losses-{rank}").open("a") as losses, (folder / f"samples-{rank}").open("a") as log:
        try:
            for record in train(tiny, md.Plan(*where), steps=steps, eval_batches=0, keep=keep, stop=stop):
                if record["event"] == "step":
                    losses.write(f"{record['step']} {record['loss'].hex()}\n")
                    losses.flush()
                    if record["step"] % every == 0:
                        log.write(json.dumps({"step": record["step"], **sample()}) + "\n")
                        log.flush()
        except Stopped as stopped:
            return stopped.exit_code
    return 0


def start(folder: Path, where: tuple[str, str], steps: int) -> list[int]:
    """The process ids of a run's two processes."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            code = 70
            try:
                said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(said, 1)
                os.dup2(said, 2)
                code = run_here(folder, rank, port, where, steps)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        found.append(pid)
    return found


def last_step(folder: Path) -> int:
    """The newest step that process 0 has written; 0 if there is none."""
    file = folder / "losses-0"
    lines = file.read_bytes()[-200:].split(b"\n") if file.exists() else []
    return int(lines[-2].split()[0]) if len(lines) > 1 else 0


def wait_until(folder: Path, step: int, pids: list[int]) -> bool:
    """Wait until a step is done; False if a process has ended before."""
    seen, since = last_step(folder), time.monotonic()
    while last_step(folder) < step:
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return False
        if (now := last_step(folder)) != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() - since < SECONDS, f"no step after {seen}"
        time.sleep(0.02)
    return True


def codes(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def run(folder: Path, steps: int, kills: int, seed: int, *, moves: bool = False) -> dict[str, Any]:
    """One run to its end, killed `kills` times; with `moves`, under another layout after every kill."""
    draw, began, done = random.Random(seed), time.monotonic(), 0
    used: set[tuple[str, str]] = set()
    targets = sorted(draw.sample(range(1, steps), kills))
    while True:
        where = LAYOUTS[done % len(LAYOUTS) if moves else 0]
        used.add(where)
        pids = start(folder, where, steps)
        target = targets[done] if done < kills else steps + 1
        if not wait_until(folder, target, pids):
            ended = codes(pids)
            assert ended == [0, 0], (folder, ended, [(folder / f"said-{i}").read_text()[-500:] for i in range(2)])
            break
        time.sleep(draw.random() * 0.05)
        end(pids, draw)
        done += 1
        print(f"{folder.name}: kill {done} at step {last_step(folder)}", file=sys.stderr, flush=True)
    return {"steps": steps, "kills": done, "layouts": len(used), "seconds": round(time.monotonic() - began)}


def end(pids: list[int], draw: random.Random) -> None:
    """Kill one process or both, or stop both by a signal to one."""
    if draw.random() < 0.25:
        os.kill(draw.choice(pids), signal.SIGTERM)
        ended = codes(pids)
        assert ended in ([75, 75], [0, 0]), ended
        return
    os.kill(draw.choice(pids), signal.SIGKILL)
    for pid in pids:  # as a scheduler does
        os.kill(pid, signal.SIGKILL)
    codes(pids)


def losses_of(folder: Path) -> list[tuple[int, float]]:
    """Every step and loss that process 0 has written, also of steps that ran twice."""
    pairs = (line.split() for line in (folder / "losses-0").read_text().splitlines())
    return [(int(step), float.fromhex(loss)) for step, loss in pairs]


def flat(folder: Path, rank: int) -> dict[str, Any]:
    """First and last samples after a tenth of the run; raises `AssertionError` unless they are level."""
    samples = [json.loads(line) for line in (folder / f"samples-{rank}").read_text().splitlines()]
    first, last = samples[len(samples) // 10], samples[-1]
    for name, allowed in (("memory", GROWTH), ("descriptors", 0), ("threads", 0)):
        assert last[name] - first[name] <= allowed, (name, first, last)
    return {name: [first[name], last[name]] for name in ("memory", "descriptors", "threads")}


def long(steps: int, kills: int, seed: int) -> None:
    """The three runs and their comparison; prints their lines."""
    home = Path(tempfile.mkdtemp(prefix="long"))
    found = run(home / "whole", steps, 0, seed)
    whole, saved = dict(losses_of(home / "whole")), content(home / "whole" / "steps", steps)
    assert list(whole) == [*range(1, steps + 1)]
    say("whole", found, process_0=flat(home / "whole", 0), process_1=flat(home / "whole", 1))

    found = run(home / "killed", steps, kills, seed)
    again = losses_of(home / "killed")
    assert {step for step, _ in again} == set(whole) and all(whole[step] == loss for step, loss in again)
    assert content(home / "killed" / "steps", steps) == saved
    say("killed", found, losses_compared=len(again), different=0)

    found = run(home / "moved", steps, kills, seed + 1, moves=True)
    again = losses_of(home / "moved")
    worst = max(abs(loss - whole[step]) / abs(whole[step]) for step, loss in again)
    assert {step for step, _ in again} == set(whole) and worst < TOLERANCE, worst
    say("moved", found, losses_compared=len(again), largest_relative_difference=float(f"{worst:.2g}"))
    shutil.rmtree(home)


def say(what: str, found: dict[str, Any], **more: Any) -> None:
    print(json.dumps({"what": what, **found, **more}), flush=True)


def main() -> None:
    warnings.filterwarnings("ignore", message=r".*fork\(\)")
    parser = argparse.ArgumentParser(description="a long run with kills and changes of layout")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    import meshdsl.train  # noqa: F401
    import tests.train.tiny  # noqa: F401  # so that no process has to import

    long(options.steps, options.kills, options.seed)


if __name__ == "__main__":
    main()
