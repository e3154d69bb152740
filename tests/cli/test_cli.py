"""The command line: what it says and the code it exits with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from meshdsl.cost.report.schema import SCHEMA_VERSION
from meshdsl.errors import installed
from meshdsl.tools import cli
from meshdsl.train import configure, load
from tests.cli.running import HERE, Run, apart, here

SMALL = ["--steps", "4", "--eval-batches", "2"]


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "100")
    before = list(sys.path)
    yield
    sys.path[:] = before


# What was typed, the exit code, and a name for the golden text of stderr.
MISTAKES = [
    ("no_file", 2, ["train", "workload.py:bigram"]),
    ("no_attribute", 2, ["train", "workloads.py:bigrams"]),
    ("not_a_workload", 2, ["train", "workloads.py:not_a_workload"]),
    ("not_python", 2, ["train", "transformer"]),
    ("no_setting", 2, ["train", "workloads.py:bigram", "--set", "widht=4"]),
    ("no_value", 2, ["train", "workloads.py:bigram", "--set", "width"]),
    ("not_a_number", 2, ["train", "workloads.py:bigram", "--set", "width=4.5"]),
    ("not_a_choice", 2, ["train", "workloads.py:bigram", "--set", "norm=batch"]),
    ("no_layout", 2, ["train", "workloads.py:bigram", "--layout", "gird"]),
    ("no_mesh", 2, ["train", "workloads.py:bigram", "--layout", "batch:rows"]),
    ("too_few_devices", 2, ["train", "workloads.py:bigram", "--layout", "grid", "--devices", "4"]),
    ("bad_mesh", 3, ["train", "workloads.py:bigram", "--mesh", "rows=2"]),
    ("bad_layout", 3, ["train", "workloads.py:bigram", "--mesh", "rows:8", "--layout", "bach:rows; vocab:cols"]),
    (
        "two_dims_on_one_axis",
        3,
        ["explain", "workloads.py:bigram", "--mesh", "all:8", "--layout", "width:all; vocab:all"],
    ),
    ("small_vocabulary", 1, ["train", "workloads.py:bigram", "--set", "vocab=100"]),
]


@pytest.mark.parametrize(("name", "code", "arguments"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_cli_errors_match_golden_text(golden: Callable[[str, str], None], name: str, code: int, arguments: list[str]):
    run = here(*arguments)
    assert run.code == code, run.err
    assert run.out == ""
    assert "Traceback" not in run.err
    golden(f"cli/{name}", run.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "meshdsl: error: the following arguments are required: COMMAND"),
        (["doctor", "--jsn"], "meshdsl doctor: error: unrecognized arguments: --jsn; did you mean --json?"),
        (["doctor", "--js"], "meshdsl doctor: error: unrecognized arguments: --js; did you mean --json?"),
        (["train", "--steps", "-1"],
         "meshdsl train: error: argument --steps: must be an integer from 0 to 1e+15, got '-1'"),
    ],
)  # fmt: skip
def test_cli_argparse_errors(arguments: list[str], message: str):
    run = here(*arguments)
    assert (run.code, run.out, run.err.splitlines()[-1]) == (2, "", message)


def test_load_error_shows_the_failing_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("import math\n\nx = math.nothing\n")
    Path("unfinished.py").write_text("x = (1,\ny = 2\n")
    Path("misspelt.py").write_text("import meshdsl as md\n\nmd.spec('batch')\n")
    run = here("train", "broken.py:lm")
    assert run.code == 1
    assert run.err == (
        "MeshdslError: broken.py cannot be imported: AttributeError: module 'math' has no attribute 'nothing'\n"
        "  at broken.py:3  x = math.nothing\n"
    )
    run = here("train", "unfinished.py:lm")
    assert (run.code, run.err.splitlines()[-1]) == (1, "  at unfinished.py:1  x = (1,")
    run = here("train", "misspelt.py:lm")
    assert run.code == 1
    assert run.err.startswith("ShapeError: a new dim is written name:size")
    assert run.err.endswith("  at misspelt.py:3  md.spec('batch')\n")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("width=64", 64),
        ("width=1_000", 1000),
        ("learning_rate=1e-3", 0.001),
        ("tied=true", True),
        ("tied=No", False),
        ("scale=0.5", 0.5),
        ("scale=none", None),
        ("sizes=1,2", (1, 2)),
        ("norm=rms", "rms"),
    ],
)
def test_configure_parses_settings_by_field_type(setting: str, value: object):
    workload = configure(load("workloads.py:bigram"), [setting])
    found = getattr(workload.config, setting.partition("=")[0])
    assert (found, type(found)) == (value, type(value))


HELP = [[], *([each.__name__.rpartition(".")[2].rstrip("_")] for each in cli.COMMANDS)]


@pytest.fixture(scope="module")
def helped() -> list[dict[str, Any]]:
    """The output of one new process for each of `HELP`, its exit code, and those of JAX and NumPy that it imports."""
    script = f"""
import contextlib, io, json, sys
from meshdsl.tools.cli import main
for arguments in {HELP}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try: code = main([*arguments, "--help"])
        except SystemExit as stop: code = stop.code
    print(json.dumps(dict(code=code, out=out.getvalue(), imported=sorted({{"jax", "numpy"}} & set(sys.modules)))))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("k", range(len(HELP)), ids=[" ".join(arguments) for arguments in HELP])
def test_cli_help_does_not_import_jax(helped: list[dict[str, Any]], k: int):
    assert (helped[k]["code"], helped[k]["imported"]) == (0, [])
    assert f"usage: meshdsl {' '.join(HELP[k])}".rstrip() in helped[k]["out"]


def test_cli_train_loss_is_equal_under_two_layouts():
    runs = {
        layout: here("train", "workloads.py:bigram", *SMALL, "--json", "--layout", layout)
        for layout in ("data", "grid")
    }
    losses = {}
    for layout, run in runs.items():
        assert run.code == 0, run.err
        records = [json.loads(line) for line in run.out.splitlines()]
        assert {r["schema_version"] for r in records} == {SCHEMA_VERSION}
        assert [r["event"] for r in records] == ["start", *["step"] * 4, "eval", "end"]
        losses[layout] = [r["loss"] for r in records if "loss" in r]
        check_schema(records)
    assert losses["data"] == pytest.approx(losses["grid"], rel=1e-5)
    assert losses["data"][0] == pytest.approx(5.545, abs=0.01), "ln 256 before anything is learned"


def check_schema(records: list[dict[str, Any]]) -> None:
    """The fields that a script may rely on, and their types."""
    fields = {
        "start": {
            "workload": str,
            "mesh": str,
            "layout": str,
            "seed": int,
            "config": dict,
            "parameters": int,
            "data": dict,
        },
        "step": {"step": int, "loss": float, "seconds": float},
        "eval": {"step": int, "loss": float, "bits_per_byte": float, "batches": int},
        "end": {"steps": int, "seconds": float, "seconds_per_step": float, "bytes_per_second": float},
    }
    for record in records:
        assert record["command"] == "train"
        for name, kind in fields[record["event"]].items():
            assert isinstance(record[name], kind), (record["event"], name)


def test_cli_train_exits_5_on_non_finite_loss():
    run = here("train", "workloads.py:bigram", *SMALL, "--set", "learning_rate=1e30", "--json")
    assert run.code == 5
    assert "NonFiniteLoss: the loss of step 2 is nan\n  it was 5.54" in run.err  # after where it is, if slow
    assert "try a lower learning rate" in run.err
    assert "NaN" not in run.out, "JSON has no NaN"


def test_cli_train_prints_plain_lines_without_a_terminal():
    run = here("train", "workloads.py:bigram", *SMALL, "--mesh", "", "--layout", "")
    assert run.code == 0, run.err
    assert all(line.startswith("train ") for line in run.err.splitlines()), run.err  # where it is, on a slow machine
    assert run.out.startswith("bigram: 8,192 parameters on one device, replicated\ndata: ")
    assert "step      4  eval loss " in run.out
    assert "\x1b" not in run.out and "\r" not in run.out


def test_cli_train_exits_130_on_interrupt():
    command = [sys.executable, "-m", "meshdsl", "train", "workloads.py:bigram", "--steps", "1000000", "--json"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None and process.stderr is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == "train 0/1000000  compiling the step\ninterrupted\n"
    assert process.returncode == 130


def test_cli_closed_pipe_prints_no_traceback():
    command = f"{sys.executable} -m meshdsl explain workloads.py:bigram --layout grid | head -n 1"
    run = subprocess.run(command, shell=True, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert run.stdout.startswith("program on rows:2 cols:4")
    assert run.stderr == ""


def in_default_precision(*arguments: str) -> Run:
    """In this process, with the types of a process of its own."""
    with jax.enable_x64(False):
        return here(*arguments)


def test_explain_program_and_table(golden: Callable[[str, str], None]):
    run = in_default_precision("explain", "workloads.py:bigram", "--layout", "grid")
    assert (run.code, run.err) == (0, "")
    program, _, table = run.out.partition("\ncollectives of one step")
    assert program == in_default_precision("explain", "workloads.py:bigram", "--layout", "grid", "--program").out
    golden("cli/explain_table", table)
    record = json.loads(in_default_precision("explain", "workloads.py:bigram", "--layout", "grid", "--json").out)
    assert (record["schema_version"], record["command"]) == (SCHEMA_VERSION, "explain")
    assert record["program"] + "\n" == program
    assert {"kind", "axes", "count", "bytes", "wire_bytes", "dtype"} == set(record["collectives"][0])


def test_explain_works_without_devices():
    run = here("explain", "workloads.py:bigram", "--mesh", "rows:64 cols:32", "--layout", "batch:rows; vocab:cols")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("program on rows:64 cols:32")


def test_explain_graph():
    run = here("explain", "workloads.py:bigram", "--graph")
    assert (run.code, run.err) == (0, "")
    assert "einsum" in run.out and "all_reduce" not in run.out


def test_doctor_reports_no_problems():
    run = apart("doctor", "--json")
    record = json.loads(run.out)
    assert (run.code, record["ok"], record["problems"]) == (0, True, [])
    assert record["devices"] and record["jax"] and record["tested jax"]


def test_doctor_reports_versions_out_of_range(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installed, "NEWEST_JAX", (0, 2))
    run = here("doctor")
    assert run.code == 1
    assert "problem: meshdsl is tested with JAX " in run.out
