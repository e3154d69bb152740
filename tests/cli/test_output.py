"""A run saves although it cannot print; no stream that is closed, full or dead gives a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.tools.commands.common import json_lines, print_json
from tests.cli.running import HERE
from tests.cli.signals import DEAD, TINY, exits_while_starting, saves_when_nobody_reads


def test_json_lines_have_no_other_text(capsys: pytest.CaptureFixture[str]):
    with json_lines():
        print("of the model")
        print_json({"event": "x"})
    captured = capsys.readouterr()
    assert json.loads(captured.out)["event"] == "x" and captured.err == "of the model\n"


def test_output_of_each_stream_that_cannot_be_written():
    for redirect, code, said in [(">&- 2>&- <&-", 0, ""), (">/dev/full", 1, "MeshdslError: No space left on device\n")]:
        line = f"{sys.executable} -m meshdsl list {redirect}"
        run = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, cwd=HERE)
        assert (run.returncode, run.stderr) == (code, said), (line, run)


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_startup_signals_at_random_moments(tmp_path: Path, number: int):
    """Whatever the moment, from the handler's installation on: 75 or 130, and no traceback."""
    for n in range(12):
        exits_while_starting(tmp_path / str(n), number, 0.3 * n)
