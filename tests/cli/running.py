"""The command line run here, in this process, or apart, as a user runs it."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from meshdsl.tools import cli

HERE = Path(__file__).parent


class Run(NamedTuple):
    code: int
    out: str
    err: str


def here(*arguments: str) -> Run:
    """In this process: for what needs no devices of its own."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # how argparse ends
            code = int(stop.code or 0)
    return Run(code, out.getvalue(), err.getvalue())


def apart(*arguments: str, **options: Any) -> Run:
    """In a process of its own."""
    command = [sys.executable, "-m", "meshdsl", *arguments]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120, **options)
    return Run(run.returncode, run.stdout, run.stderr)
