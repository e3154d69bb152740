"""Printing never keeps a run from saving, and no stream that is closed, full, dead or ASCII gives a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshdsl.checkpoint.directory import step_numbers
from meshdsl.commands.output import Steady, json_lines, steady
from meshdsl.commands.startup import handle_signals
from tests.cli.running import HERE, here

TINY = str(HERE.parent / "train" / "tiny.py") + ":tiny"
COMMAND = [sys.executable, "-m", "meshdsl"]


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
    from meshdsl.commands.common import print_json

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


def endless(folder: Path, script: str, **options: Any) -> subprocess.Popen[str]:
    """A run that only a signal ends, in a process group of its own, started by a shell script with `$RUN`."""
    line = (
        f"train {TINY} --steps 1000000000 --eval-batches 0 --save-every 100000000 --log-every 1 --checkpoints {folder}"
    )
    env = {**os.environ, "RUN": f"{sys.executable} -m meshdsl {line}"}
    return subprocess.Popen(["bash", "-c", script], cwd=HERE.parent.parent, env=env, start_new_session=True, **options)


def run_id(group: int, patience: float = 60) -> int:
    """The process id of the run in this process group."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"meshdsl" in words and b"bash" not in words[0]:
                        return int(entry.name)
            except OSError:
                continue
        time.sleep(0.05)
    raise AssertionError("the run did not start")


def until(condition: Callable[[], bool], patience: float = 120) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


# How the run is started, who gets the signal, and the exit code. `log` has lines once the run prints.
DEAD = {
    "interrupt under tee": ("$RUN 2>&1 | tee log >/dev/null; exit ${PIPESTATUS[0]}", "group", signal.SIGINT, 130),
    "reader of both is gone": ("$RUN 2>&1 | head -n 3 > log; exit ${PIPESTATUS[0]}", "run", signal.SIGTERM, 75),
    "reader does not read": ("$RUN 2>&1 | (head -n 3 > log; sleep 100) & wait %1", "run", signal.SIGTERM, None),
    "stdout is full": ("$RUN > /dev/full 2> log", "run", signal.SIGTERM, 75),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if n == 0 else pytest.mark.slow) for n, name in enumerate(DEAD)]
)
def test_run_saves_when_nobody_reads(tmp_path: Path, name: str):
    script, whom, number, code = DEAD[name]
    process = endless(tmp_path / "run", script.replace("log", str(tmp_path / "log")))
    try:
        child = run_id(process.pid)
        until(lambda: (tmp_path / "run" / "lock").exists())
        time.sleep(2.0)  # the first steps, and the pipe is full or dead
        (os.killpg(process.pid, number) if whom == "group" else os.kill(child, number))
        until(lambda: has_ended(child))
        if code is not None:
            assert process.wait(60) == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(step_numbers(tmp_path / "run")) == 1, "it saved"
    assert not (tmp_path / "run" / "lock").exists()


def test_startup_signals_exit_like_later_ones():
    """In a fork: the handlers are the process's own."""
    script = (
        "import os, signal, sys\n"
        "from meshdsl.commands.startup import handle_signals\n"
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
        run = subprocess.run([sys.executable, "-c", script, number, *arguments], timeout=60, cwd=HERE.parent.parent)
        assert run.returncode == code, (number, arguments)
    before = signal.getsignal(signal.SIGTERM)
    handle_signals(["doctor"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_startup_signals_at_random_moments(tmp_path: Path, number: int):
    """Whatever the moment, from the first line of meshdsl on: 75 or 130, and no traceback."""
    code, began = 75 if number == signal.SIGTERM else 130, 0.25
    for n in range(12):
        arguments = ["train", TINY, "--steps", "1000000000", "--checkpoints", str(tmp_path / str(n))]
        with subprocess.Popen(
            [*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=HERE.parent.parent
        ) as process:
            time.sleep(began + 0.3 * n)
            process.send_signal(number)
            assert process.stderr is not None
            said = process.stderr.read()
        assert process.returncode == code and "Traceback" not in said, (n, process.returncode, said)


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
