"""Kill and stop training runs at any moment: `python -m tests.train.faults [kill N] [term N] [two N] [hostile N] SEED`.

A run is a fork of this program, so that it starts quickly; this program itself never starts JAX. `kill` sends SIGKILL
at a random moment, until the run has been killed N times. `term` sends SIGTERM or SIGINT in a chosen phase: the run
saves and exits with 75 or 130. After each, every checkpoint that is there is read whole, and its parameters, optimizer
state, data position and random key are compared, hash by hash, with the uninterrupted run's; the next run goes on
from the newest, and every batch that it reads is compared too. `two` stops runs of two processes, one of which gets
the signal. Compiled programs are kept between runs, in a cache of JAX's. The last line of each is JSON; with
`minutes N` they end earlier, and the counts are of what was run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from meshdsl.errors import MeshdslError
from meshdsl.train.checkpoint.directory import step_numbers
from meshdsl.train.checkpoint.read import open_step

STEPS, EVERY = 24, 2
PHASES = "csewf"  # compile, step (c is the first), evaluation, saving on the way, saving at the end
DEFAULT = {"kill": 200, "term": 50, "two": 20, "hostile": 3000}
CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
Content = dict[str, Any]


class Ended(NamedTuple):
    status: int  # as of os.waitpid
    said: bytes


def train_here(folder: Path, pipe: int, every: int, keep: int | None, slow: str, wait: bool) -> int:
    """The child process: train to the end, and report each phase through the pipe. Returns the exit code.

    A phase in `slow` is made longer, so that a signal meets it.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import meshdsl as md
    from meshdsl.train import Keeping, Stop, data_for, train
    from tests.train.tiny import tiny

    def say(mark: str) -> None:
        os.write(pipe, mark.encode())
        if mark in slow:
            time.sleep(0.05)

    class Checkpoints(md.Checkpoints):
        def save(self, step: int, *args: Any, **options: Any) -> bool:
            say("f" if step == STEPS else "w")
            return super().save(step, *args, **options)

    data = data_for(tiny, 0)

    def batches(split: str, step: int) -> Any:
        batch = data(split, step)
        if split == "held_out":
            say("e")
        else:
            say("c" if first else "s")
            first.clear()
            digest = hashlib.sha256(batch["x"].tobytes()).hexdigest()[:8]
            os.write(pipe, f"[{step}:{digest}]".encode())
        return batch

    first = [True]
    with Stop() as stop:
        records = train(
            tiny, md.Plan("all:1"), steps=STEPS, batches=batches, eval_every=5, eval_batches=2,
            keep=Keeping(Checkpoints(folder, keep=keep, report=lambda line: None), every, wait=wait), stop=stop,
        )  # fmt: skip
        try:
            for record in records:
                if record["event"] == "resume":
                    os.write(pipe, f"<{record['step']}>".encode())
        except MeshdslError as error:
            if not hasattr(error, "exit_code"):
                raise
            return error.exit_code  # type: ignore[attr-defined]
    return 0


class Child:
    """A run, and what it has said."""

    def __init__(self, folder: Path, every: int = EVERY, keep: int | None = 3, slow: str = "", wait: bool = False):
        self.reading, writing = os.pipe()
        self.said, self.began = b"", time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            code = 70
            try:
                os.close(self.reading)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                code = train_here(folder, writing, every, keep, slow, wait)
            finally:
                os._exit(code)
        os.close(writing)

    def wait_for(self, mark: str, seconds: float) -> bool:
        """True if the mark comes in time."""
        deadline = time.monotonic() + seconds
        while mark.encode() not in self.said:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.reading], [], [], left)[0]:
                return False
            block = os.read(self.reading, 1 << 16)
            if not block:
                return False
            self.said += block
        return True

    def end(self) -> Ended:
        """Wait for it."""
        while block := os.read(self.reading, 1 << 16):
            self.said += block
        os.close(self.reading)
        return Ended(os.waitpid(self.pid, 0)[1], self.said)


def content(folder: Path, step: int) -> Content:
    """Everything of a step that a run goes on from, after reading and checking all of it."""
    with open_step(folder, step) as reader:
        reader.verify()
        header = reader.manifest.header
        tensors = {
            path: [str(entry.type), [chunk.sha256.hex() for chunk in entry.chunks]]
            for path, entry in reader.manifest.tensors.items()
        }
        return {"data": header.data, "key": header.key, "tensors": tensors}


class Reference(NamedTuple):
    steps: dict[int, Content]
    batches: dict[int, str]


def batches_of(said: bytes) -> dict[int, str]:
    """Step and hash of every batch that a run read."""
    parts = [part.split("]")[0] for part in said.decode("ascii").split("[")[1:] if "]" in part]
    return {int(step): digest for step, digest in (part.split(":") for part in parts)}


def reference(folder: Path) -> Reference:
    """The uninterrupted run, every step of it."""
    ended = Child(folder, every=1, keep=None, wait=True).end()
    assert ended.status == 0, ended
    steps = {step: content(folder, step) for step in step_numbers(folder)}
    assert list(steps) == [*range(1, STEPS + 1)] and len(batches_of(ended.said)) == STEPS
    return Reference(steps, batches_of(ended.said))


def check(folder: Path, wanted: Reference, ended: Ended) -> int:
    """All that is there is what the uninterrupted run had; returns the newest step, or -1."""
    there = step_numbers(folder)
    for step in there:
        found = content(folder, step)
        assert not step or found == wanted.steps[step], f"step {step} differs"
    for step, digest in batches_of(ended.said).items():
        assert wanted.batches[step] == digest, f"batch {step} differs"
    return there[-1] if there else -1


def kill(count: int, seed: int, until: float) -> dict[str, Any]:
    """SIGKILL at random moments."""
    draw, home = random.Random(seed), Path(tempfile.mkdtemp(prefix="kill"))
    wanted = reference(home / "reference")
    runs = kills = finished = resumed = during_save = 0
    newest, number, starting = -1, 0, 3.0
    while kills < count and time.monotonic() < until:
        folder = home / f"run{number}"
        child = Child(folder)
        runs += 1
        if draw.random() < 0.3:
            time.sleep(draw.random() * starting)  # while it starts, restores, compiles
        elif child.wait_for("s", 240):  # or some time after its first step
            starting = 0.9 * starting + 0.1 * (time.monotonic() - child.began)
            time.sleep(draw.choice([0.05, 0.3, 1.0]) * starting * draw.random())  # busy machines start slowly
        os.kill(child.pid, signal.SIGKILL)
        ended = child.end()
        if b"<" in ended.said:
            resumed += 1
            assert f"<{newest}>".encode() in ended.said, (newest, ended)
        else:
            assert newest < 0 or b"[" not in ended.said, "it began again although there was a checkpoint"
        if os.WIFSIGNALED(ended.status):
            kills += 1
            during_save += folder.exists() and any(name.endswith(".unfinished") for name in os.listdir(folder))
        else:
            assert ended.status == 0, ended
        newest_now = check(folder, wanted, ended)
        assert newest_now >= newest, f"step {newest} was there, and now {newest_now} is the newest"
        newest = newest_now
        print(f"kill {kills}, step {newest}", file=sys.stderr, flush=True)
        if newest == STEPS:  # the whole run, in pieces: another one
            finished, number, newest = finished + 1, number + 1, -1
            shutil.rmtree(folder)
    shutil.rmtree(home)
    return {"runs": runs, "killed": kills, "while_saving": during_save, "resumed": resumed, "whole_runs": finished}


def term(count: int, seed: int, until: float) -> dict[str, Any]:
    """SIGTERM and SIGINT in every phase: saved, the right exit code, resumed."""
    draw, home = random.Random(seed), Path(tempfile.mkdtemp(prefix="term"))
    wanted = reference(home / "reference")
    phases: dict[str, int] = {}
    for n in range(count):
        if time.monotonic() > until:
            break
        phase, number = PHASES[n % len(PHASES)], (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)[n % 3]
        folder = home / f"run{n}"
        child = Child(folder, slow=phase)
        assert child.wait_for(phase, 240), child.said
        time.sleep(0.04 * draw.random())
        os.kill(child.pid, number)
        ended = child.end()
        assert os.waitstatus_to_exitcode(ended.status) == CODES[number], (phase, number, ended)
        newest = check(folder, wanted, ended)
        last = max(batches_of(ended.said), default=0)
        assert newest == last, f"in phase {phase} the last step was {last}, and {newest} is saved"
        ended = Child(folder).end()
        assert ended.status == 0 and f"<{newest}>".encode() in ended.said, ended
        assert check(folder, wanted, ended) == STEPS
        print(f"stop {n}, phase {phase}", file=sys.stderr, flush=True)
        phases[phase] = phases.get(phase, 0) + 1
        shutil.rmtree(folder)
    shutil.rmtree(home)
    return {"stopped": sum(phases.values()), "phases": phases}


def main(words: list[str]) -> None:
    warnings.filterwarnings("ignore", message=r".*fork\(\)")
    seed = int(words.pop()) if len(words) % 2 else random.SystemRandom().randrange(10**6)
    import tests.train.tiny  # noqa: F401  # so that no run has to import
    from tests.train.hostile import hostile
    from tests.train.two import two

    began = time.monotonic()
    plan = dict(zip(words[::2], map(int, words[1::2]), strict=True)) or {
        "kill": 200,
        "term": 50,
        "two": 20,
        "hostile": 3000,
    }
    until = began + 60 * plan.pop("minutes", 10**6)
    for what, count in plan.items():
        found = {"kill": kill, "term": term, "two": two, "hostile": hostile}[what](count, seed, until)
        print(json.dumps({"what": what, "seed": seed, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
