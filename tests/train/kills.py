"""Kill runs that save at a URL: `python -m tests.train.kills [--cases 100] [--processes 1] [--seed N]`.

All processes of a run are killed at a random moment during a save. The run is then started again from its newest step,
and killed again, until it reaches its end; then the next run starts. Every loss, also of steps that ran twice, and the
last step are compared bit for bit with those of a run that was not killed. A process is a fork of this program, which
itself never starts JAX; compiled programs are kept in JAX's cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.together import free_port
from tests.train.long import codes, losses_of

STEPS, EVERY, SECONDS = 40, 2, 240.0


def _forked(work: Callable[[], None], said: Path) -> int:
    """The id of a process that does this work."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def _jax(folder: Path, devices: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _train(folder: Path, rank: int, processes: int, port: int) -> None:
    """Train to the end at the URL of `folder`, on four devices, and write the losses to `folder`."""
    import jax

    _jax(folder, 4 // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    import meshdsl as md
    from meshdsl.train import Keeping, data_for, train
    from tests.train.tiny import tiny

    workload = tiny.replace(hidden=513)
    data = data_for(workload, 0)

    def slow(split: str, step: int) -> Any:
        time.sleep(0.03)  # about as long as a save takes
        return data(split, step)

    keep = Keeping(md.Checkpoints(f"file://{folder}/steps", report=lambda line: None), EVERY)
    plan = md.Plan("rows:2 cols:2", "batch:rows hidden:cols")
    with (folder / f"losses-{rank}").open("a") as losses:
        for record in train(workload, plan, steps=STEPS, batches=slow, eval_batches=0, keep=keep):
            if record["event"] == "step":
                losses.write(f"{record['step']} {record['loss'].hex()}\n")
                losses.flush()


def _content(folder: Path) -> None:
    """Write the hash of the last step to `folder`."""
    _jax(folder, 1)
    import meshdsl as md

    found = md.Checkpoints(f"file://{folder}/steps").restore(STEPS)
    assert found.key is not None
    text = repr([(path, x.numpy().tobytes()) for path, x in sorted(found.tree.items())]) + repr(found.data)
    (folder / "content").write_text(hashlib.sha256((text + repr(found.key.numpy())).encode()).hexdigest())


def start(folder: Path, processes: int) -> list[int]:
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    return [
        _forked(lambda rank=rank: _train(folder, rank, processes, port), folder / f"said-{rank}")
        for rank in range(processes)
    ]


def content_of(folder: Path) -> str:
    assert codes([_forked(lambda: _content(folder), folder / "said")]) == [0], (folder / "said").read_text()
    return (folder / "content").read_text()


def saving(folder: Path, pids: list[int], draw: random.Random) -> bool:
    """Wait until a save is under way, and a moment more; False if the run has ended."""
    after, seen, end = draw.randrange(1, 6), set[str](), time.monotonic() + SECONDS
    while time.monotonic() < end:
        if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return False
        seen |= {name for name in _names(folder / "steps") if "tmp" in name}
        if len(seen) >= after:
            time.sleep(draw.random() * 0.05)
            return True
        time.sleep(0.001)
    raise AssertionError(f"nothing happened for {SECONDS:.0f} s")


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


def kills(count: int, processes: int, seed: int) -> dict[str, object]:
    draw, home = random.Random(seed), Path(tempfile.mkdtemp(prefix="kills"))
    assert codes(start(home / "whole", processes)) == [0] * processes, (home / "whole" / "said-0").read_text()
    whole, wanted = dict(losses_of(home / "whole")), content_of(home / "whole")
    done = during = runs = compared = 0
    began = time.monotonic()
    while done < count:
        folder = home / f"run{runs}"
        while True:
            pids = start(folder, processes)
            if done < count and saving(folder, pids, draw):
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                if set(ended := codes(pids)) == {-signal.SIGKILL}:
                    done += 1
                    during += any("tmp" in name for name in _names(folder / "steps"))
                    print(f"kill {done}: {sorted(_names(folder / 'steps'))}", file=sys.stderr, flush=True)
                    continue
            else:
                ended = codes(pids)
            assert set(ended) <= {0, -signal.SIGKILL}, [(folder / f"said-{i}").read_text() for i in range(processes)]
            if set(ended) == {0}:
                break
        again = losses_of(folder)
        assert {step for step, _ in again} == set(whole) and all(whole[step] == loss for step, loss in again)
        assert content_of(folder) == wanted
        runs, compared = runs + 1, compared + len(again)
        shutil.rmtree(folder)
    shutil.rmtree(home)
    seconds = round(time.monotonic() - began)
    return {"kills": done, "while_saving": during, "runs": runs, "losses_compared": compared, "seconds": seconds}


def main() -> None:
    warnings.filterwarnings("ignore", message=r".*fork\(\)")
    parser = argparse.ArgumentParser(description="kill runs that save at a URL")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    import meshdsl.train  # noqa: F401
    import tests.train.tiny  # noqa: F401  # so that no process has to import

    print(json.dumps({"processes": options.processes, **kills(options.cases, options.processes, options.seed)}))


if __name__ == "__main__":
    main()
