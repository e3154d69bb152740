"""Other processes that hold the lock of a checkpoint directory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import meshdsl as md

TREE = {"w": 1.0}
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
HOLD = """
import sys
from pathlib import Path
from meshdsl.train.checkpoint import lock
held = lock.acquire(Path(sys.argv[1]), "theirs")
if len(sys.argv) > 2:
    path = Path(sys.argv[1]) / "lock"
    path.write_text(path.read_text().replace('"pid": ', '"pid": 4000000'))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> Any:
    """A process that holds the lock until it is killed."""
    root = str(Path(__file__).parent.parent.parent)
    command = [*launcher, sys.executable, "-c", HOLD, str(folder), *options]
    process = subprocess.Popen(command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def has_namespaces() -> bool:
    """True if this machine lets us make a namespace of process ids."""
    return not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode


def held_in_another_namespace(folder: Path) -> None:
    """Save while a process of another namespace holds the lock, and after it was killed.

    It has the same host name and the same boot, and a process id that is 1 there and another process here. Raises
    `AssertionError` if both are writers, or if the lock outlives it.
    """
    with holder(folder, launcher=NAMESPACE) as process:
        for take_over in (False, True):
            try:
                md.Checkpoints(folder, take_over=take_over).save(1, TREE)
                raise AssertionError("two writers")
            except md.SaveError as error:
                assert "is being written by process 1 on " in str(error) and "it is running" in str(error), error
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20  # the kernel ends the namespace after its launcher
        while True:
            try:
                with md.Checkpoints(folder) as checkpoints:
                    assert checkpoints.save(1, TREE)
                return
            except md.SaveError:
                assert time.monotonic() < deadline, "the lock is still held"
                time.sleep(0.1)
