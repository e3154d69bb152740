"""Commands that run at once on this machine, as the processes of one program."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(commands: Sequence[Sequence[str]], seconds: float) -> None:
    """Run commands in the root of the repository; each must succeed in so many seconds."""
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
