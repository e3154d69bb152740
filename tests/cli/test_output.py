"""A run saves although it cannot print; no stream that is closed, full, dead or ASCII gives a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshdsl.tools.commands.output import Steady, json_lines, steady
from meshdsl.tools.commands.startup import handle_signals
from tests.cli.running import HERE, here
from tests.cli.signals import DEAD, TINY, exits_while_starting, interruptible, saves_when_nobody_reads


class Broken:
    """A stream whose writes fail."""

    encoding = "utf-8"

    def __init__(self, error: Exception):
        self.error, self.calls = error, 0

    def write(self, text: str) -> int:
        self.calls += 1
        raise self.error

    flush = write

    def fileno(self) -> int:
        raise ValueError("it has none")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space"), ValueError("closed")])
def test_steady_never_raises(error: Exception):
    stream: Any = Broken(error)
    out = Steady(stream)
    assert out.write("a\n") == 2 and out.write("b") == 1
    out.flush()
    assert out.problem is not None and stream.calls == 1, "muted after the first failure"


def test_steady_escapes_what_the_encoding_lacks(tmp_path: Path):
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        out = Steady(file)
        out.write("\N{BOX DRAWINGS LIGHT VERTICAL} a\udcff\n")
    assert (tmp_path / "out").read_text() == "\\u2502 a\\udcff\n" and out.problem is None


def test_json_lines_have_no_other_text(capsys: pytest.CaptureFixture[str]):
    from meshdsl.tools.commands.common import print_json

    with steady(), json_lines():
        print("of the model")
        print_json({"event": "x"})
    captured = capsys.readouterr()
    assert json.loads(captured.out)["event"] == "x" and captured.err == "of the model\n"


def test_output_of_each_stream_that_cannot_be_written():
    for redirect, code in [(">&- 2>&- <&-", 0), (">/dev/full", 1), (">&- 2>/dev/full", 0)]:
        for arguments in ("--version", "--help"):
            line = f"{sys.executable} -m meshdsl {arguments} {redirect}"
            run = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, cwd=HERE)
            assert run.returncode == code and "Traceback" not in run.stderr, (line, run)
            assert bool(code) == ("stdout cannot be written: No space left on device" in run.stderr), (line, run)
    for redirect in (">&-", "2>&-", "2>/dev/full"):
        line = f"{sys.executable} -m meshdsl trian {redirect}"
        assert subprocess.run(line, shell=True, capture_output=True, timeout=60, cwd=HERE).returncode == 2, line


def test_cli_in_a_removed_working_directory(tmp_path: Path):
    folder = tmp_path / "gone"
    folder.mkdir()
    script = (
        f"cd {folder} && rmdir {folder} && exec {sys.executable} -m meshdsl train {TINY} --steps 0 --eval-batches 0"
    )
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if n == 0 else pytest.mark.slow) for n, name in enumerate(DEAD)]
)
def test_run_saves_when_nobody_reads(tmp_path: Path, name: str):
    saves_when_nobody_reads(tmp_path, name, seconds=2.0)


def test_startup_signals_exit_like_later_ones():
    """In a fork: the handlers are the process's own."""
    script = (
        "import os, signal, sys\n"
        "from meshdsl.tools.commands.startup import handle_signals\n"
        "handle_signals(sys.argv[2:])\n"
        "os.kill(os.getpid(), getattr(signal, sys.argv[1]))\n"
        "signal.pause()\n"
    )
    for number, arguments, code in [
        ("SIGTERM", ["train", "x", "--checkpoints", "y"], 75),
        ("SIGINT", ["train", "x", "--set", "checkpoints.directory=y"], 130),
        ("SIGTERM", ["train", "x"], -15),
        ("SIGTERM", ["analyze", "x"], -15),
    ]:
        command = [sys.executable, "-c", script, number, *arguments]
        with interruptible():
            run = subprocess.run(command, timeout=60, cwd=HERE.parent.parent)
        assert run.returncode == code, (number, arguments)
    before = signal.getsignal(signal.SIGTERM)
    handle_signals(["doctor"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_startup_signals_at_random_moments(tmp_path: Path, number: int):
    """Whatever the moment, from the first line of meshdsl on: 75 or 130, and no traceback."""
    for n in range(12):
        exits_while_starting(tmp_path / str(n), number, 0.3 * n)


def test_cli_errors_of_arguments_name_the_command_and_the_guess():
    for arguments, message in [
        (["trian"], "meshdsl: error: no command 'trian'; did you mean train?"),
        (["train", "x.py:y", "--stpes", "3"], "meshdsl train: error: no option '--stpes'; did you mean --steps?"),
        (
            ["train", "x.py:y", "--steps=x"],
            "meshdsl train: error: argument --steps: must be an integer from 0, got 'x'",
        ),
        (["train", "x.py:y", "z.py:w"], "meshdsl train: error: unexpected argument 'z.py:w'"),
        (["analyze"], "meshdsl analyze: error: the following arguments are required: WORKLOAD"),
    ]:
        run = here(*arguments)
        usage, error = run.err.splitlines()
        assert run.code == 2 and error.startswith(message), run
        assert usage.startswith(f"usage: {message.partition(':')[0]} "), usage
