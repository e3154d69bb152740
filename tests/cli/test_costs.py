"""The commands about cost: what they say, what they write, and the code they exit with."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshdsl.cost.report import html
from meshdsl.cost.report.schema import SCHEMA_VERSION
from meshdsl.errors import MeshdslError, files
from meshdsl.errors.tables import WIDTH
from meshdsl.tools.commands import common
from meshdsl.tools.compilers import aot
from meshdsl.tools.compilers.diff import CompilerDiff
from meshdsl.train import UsageError
from tests.cli.running import HERE, Run, here

BIGRAM = "workloads.py:bigram"
GRID = [BIGRAM, "--layout", "grid"]
MACHINE = """\
title = "a machine"
device = "chip"
vector = 1e12
hbm = 1e9
hbm_bandwidth = 1e11
launch = 1e-6
efficiency = [[1e6, 0.1], [1e9, 0.5]]
[peak]
other = 1e13
[network]
launch = 1e-6
[[network.level]]
kind = "switch"
axes = { chip = 8 }
bandwidth = 1e10
latency = 1e-6
[sources]
hbm = "a test"
"""


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "100")
    yield


def record(run: Run) -> dict:
    """The one JSON line."""
    (line,) = run.out.splitlines()
    found = json.loads(line)
    assert found["schema_version"] == SCHEMA_VERSION
    return found


def test_analyze_prints_a_report():
    run = here("analyze", *GRID)
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("bigram, training step on rows:2 cols:4 (8 chips, Google TPU v5e")
    for section in ("where the time goes", "collectives of one step", "memory of one chip at the peak", "longest"):
        assert section in run.out
    assert max(map(len, run.out.splitlines())) <= WIDTH


def test_analyze_json_equals_text():
    found = record(here("analyze", *GRID, "--json"))
    assert (found["command"], found["mesh"], found["fits"]) == ("analyze", {"rows": 2, "cols": 4}, True)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])


def test_analyze_forward_has_no_gradients_and_no_update():
    step, forward = (record(here("analyze", *GRID, "--json", *more)) for more in ([], ["--forward"]))
    assert not any(line["backward"] for line in forward["instructions"])
    assert forward["flops"] < step["flops"] / 2


def test_analyze_reads_a_user_machine_file(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(MACHINE)
    found = record(here("analyze", *GRID, "--machine", str(tmp_path / "mine.toml"), "--json"))
    assert found["machine"] == {"name": "mine", "title": "a machine", "hbm": 1e9}


def test_analyze_place_changes_the_assignment():
    one = record(here("analyze", *GRID, "--json"))
    other = record(here("analyze", *GRID, "--json", "--place", "rows=y", "--place", "cols=x"))
    assert one["placement"] != other["placement"]


def test_analyze_over_memory_exits_3():
    run = here("analyze", *GRID, "--memory", "20kB")
    assert run.code == 3
    assert "DOES NOT FIT" in run.out
    assert run.err.startswith("over memory: the layout needs ") and "parameters" in run.err


def test_compare_prints_layouts_side_by_side():
    run = here("compare", BIGRAM)
    assert (run.code, run.err) == (0, "")
    assert "data: all:8,  batch:all" in run.out and "from data to grid" in run.out
    assert max(map(len, run.out.splitlines())) <= WIDTH
    found = record(here("compare", BIGRAM, "--json"))
    assert list(found["reports"]) == ["data", "grid"] and found["best"] in found["reports"]


def test_compare_reports_illegal_layouts():
    options = ["--mesh", "rows:2 cols:4", "--layout", "batch:rows", "--layout", "width:rows vocab:rows"]
    run = here("compare", BIGRAM, *options)
    assert run.code == 3
    assert "A: rows:2 cols:4,  batch:rows" in run.out and "B is illegal" in run.out
    assert "a tensor can use an axis once" in run.out
    assert run.err == "illegal layout: B\n"


STAGES = ["llama", "--layout", "layer:stages; batch:rows", "--microbatches", "2", "--machine", "tpu-v5e"]


def test_explain_of_the_layers_dim_has_what_its_stages_send():
    run = here("explain", *STAGES, "--mesh", "stages:2 rows:2", "--dim", "layer")
    assert run.code == 0 and "0 s exposed" not in run.out and "stage  stages  permute" in run.out


def test_scale_says_once_why_no_mesh_can_be():
    run = here("scale", *STAGES, "--mesh", "stages:2 rows:2", "--axis", "stages", "--to", "32")
    assert run.code == 3 and run.err.count("cannot run in stages") == 1
    assert "8 devices, strong: " in run.err and "'layer' has 2 layers for 4 stages" in run.err


def test_explain_collective_and_dim():
    run = here("explain", *GRID, "--collective", "0")
    assert (run.code, run.err) == (0, "")
    assert "collective 0: " in run.out and "cause" in run.out and "elsewhere" in run.out
    run = here("explain", *GRID, "--dim", "vocab")
    assert run.code == 0 and "split vocab no more (now cols)" in run.out
    run = here("explain", *GRID, "--dim", "vocab", "--memory", "20kB")
    assert run.code == 3 and run.out.startswith("bound by memory: ")
    found = record(here("explain", *GRID, "--collective", "0", "--json"))
    assert found["collectives"][0]["number"] == 0 and found["moves"]


def test_search_prints_the_best_layouts():
    large = ["--set", "width=1024", "--set", "batch=512"]
    options = [*large, "--mesh", "all:4", "--dims", "batch vocab"]
    run = here("search", BIGRAM, *options)
    assert (run.code, run.err) == (0, ""), run.err
    assert run.out.startswith("bigram, training step on tpu-v5e") and "batch:all" in run.out
    assert record(here("search", BIGRAM, *options, "--json"))["best"]["layout"] == "batch:all"


def test_search_of_an_imported_loss_prints_plain_fsdp_and_names(tmp_path: Path):
    file = tmp_path / "my_model.py"
    file.write_text(
        "import jax.numpy as jnp, meshdsl as md\n"
        "def f(params, x):\n    return jnp.mean(jnp.tanh(x @ params['up']) ** 2)\n"
        "loss = md.from_jax(f, {'up': jnp.ones((64, 128))}, jnp.ones((64, 64)))\n"
    )
    run = here("search", f"{file}:loss", "--devices", "2", "--knobs", "none")
    assert "plain FSDP, x_0:x; params:x: " in run.out
    assert run.out.endswith("names={\n    'x': 'batch model',\n    '*/up': 'model hidden',\n  }\n")


def test_search_reports_when_nothing_fits():
    run = here("search", BIGRAM, "--mesh", "all:4", "--dims", "batch vocab", "--memory", "1kB")
    assert (run.code, run.out) == (3, "")
    assert "fits 1.00 kB" in run.err and "the smallest needs" in run.err


def test_verify_exits_0_if_equal():
    run = here("verify", *GRID)
    assert (run.code, run.err) == (0, "")
    assert "the program states what is emitted" in run.out
    assert record(here("verify", *GRID, "--forward", "--json"))["equal"] is True


def test_verify_weight_update_auto():
    run = here("verify", BIGRAM, "--layout", "data", "--weight-update", "auto", "--machine", "tpu-v3")
    assert run.code == 0 and "the program states what is emitted" in run.out, run.err


def test_verify_aot_compares_with_the_compiler(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for the TPU's compiler, which tests/cost/ runs where it is installed."""
    held = aot.CompiledMemory(argument=30_000, output=20_000, temp=10_000, alias=20_000, generated_code=0, peak=50_000)
    other = CompilerDiff("all_reduce", "cols", 4, 4096, 2, 4096, 1, "2 were made one")
    whole = aot.Compilation("tpu:v5e:2x4", 8, "as given", True, 50_000, None, "", held, (), (other,), (), 1.0)
    full = dataclasses.replace(whole, fits=False, limit=40_000, message="too much", memory=None, changes=())
    for made, code in ((whole, 0), (full, 3)):
        monkeypatch.setattr(aot, "compile_for", lambda *given, made=made, **named: made)
        run = here("verify", *GRID, "--aot", "tpu:v5e:2x4")
        assert (run.code, run.err) == (code, "")
        assert record(here("verify", *GRID, "--aot", "tpu:v5e:2x4", "--json"))["aot"]["fits"] is made.fits
        words = ["peak", "50.00 kB", "2 were made one"] if made.fits else ["does not fit on tpu:v5e:2x4", "too much"]
        assert all(word in run.out for word in words), run.out


# What was typed, the exit code, and a name for the golden text of stderr.
MISTAKES = [
    ("cost_no_inputs", 2, ["analyze", "workloads_odd.py:nothing"]),
    ("cost_zero", 2, ["analyze", BIGRAM, "--set", "width=0"]),
    ("cost_negative", 2, ["compare", BIGRAM, "--set", "vocab=-256"]),
    ("cost_zero_batch", 2, ["search", BIGRAM, "--devices", "4", "--set", "batch=0"]),
    ("cost_one_layout", 2, ["compare", *GRID]),
    ("cost_layout_twice", 2, ["compare", *GRID, "--layout", "data", "--layout", "grid"]),
    ("cost_meshes", 2, ["compare", *GRID, "--layout", "data", "--layout", "", *["--mesh", "all:8"] * 2]),
    ("cost_place", 2, ["analyze", *GRID, "--place", "rows:x"]),
    ("cost_place_twice", 2, ["analyze", *GRID, "--place", "rows=x", "--place", "rows=y"]),
    ("cost_place_unknown", 3, ["analyze", *GRID, "--place", "rows=x", "--place", "cols=z"]),
    ("cost_update_of_nothing", 2, ["analyze", *GRID, "--forward", "--weight-update", "sharded"]),
    ("cost_too_large", 3, ["analyze", BIGRAM, "--mesh", "all:1000000", "--layout", "batch:all"]),
    ("cost_illegal", 3, ["analyze", BIGRAM, "--mesh", "all:8", "--layout", "width:all; vocab:all; bach:all"]),
    ("cost_no_collective", 2, ["explain", *GRID, "--collective", "99"]),
    ("cost_no_dim", 2, ["explain", *GRID, "--dim", "widht"]),
    ("cost_fast", 2, ["verify", *GRID, "--fast"]),
    ("cost_verify_machine", 2, ["verify", *GRID, "--machine", "tpu-v4"]),
    ("cost_idle", 2, ["explain", *GRID, "--machine", "tpu-v4", "--memory", "1GB"]),
    ("cost_graph", 2, ["explain", *GRID, "--graph", "--weight-update", "sharded"]),
    ("cost_topology", 2, ["verify", *GRID, "--aot", "v5e:2x4"]),
]


@pytest.mark.parametrize(("name", "code", "arguments"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_cost_command_errors_match_golden_text(
    golden: Callable[[str, str], None], name: str, code: int, arguments: list[str]
):
    run = here(*arguments)
    assert run.code == code, run.err
    assert run.out == ""
    assert "Traceback" not in run.err
    golden(f"cli/{name}", re.sub(r"/\S*/meshdsl/", "meshdsl/", run.err))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", BIGRAM, "--memory", "0"], "write a memory size as 16GB, 512MiB or 16e9, above 0; got '0'"),
        (["analyze", BIGRAM, "--memory", "-1GB"], "argument --memory: expected one argument"),
        (["analyze", BIGRAM, "--memory", "16 gallons"], "above 0; got '16 gallons'"),
        (["search", BIGRAM], "one of the arguments --mesh --devices is required"),
        (["search", BIGRAM, "--mesh", "a:2", "--devices", "2"], "argument --devices: not allowed with argument --mesh"),
        (["search", BIGRAM, "--devices", "0"], "argument --devices: must be an integer from 1 to 1e+15, got '0'"),
        (["explain", *GRID, "--dim", ""], "argument --dim: must not be empty"),
        (["explain", *GRID, "--dim", "vocab", "--moves"], "argument --moves: not allowed with argument --dim"),
        (["analyze", BIGRAM, "--html", "nowhere/a.html"], "no folder 'nowhere' to write 'a.html' in"),
        (["analyze", BIGRAM, "--html", "."], "'.' is a folder; name a file in it"),
    ],
)  # fmt: skip
def test_cost_command_argparse_errors(arguments: list[str], message: str):
    run = here(*arguments)
    assert (run.code, run.out) == (2, "")
    assert run.err.splitlines()[-1].endswith(message)


def test_cost_command_error_for_unknown_machine():
    run = here("analyze", *GRID, "--machine", "tpu-v5")
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("UsageError: no machine is called 'tpu-v5'; did you mean 'tpu-v5p'? there are: ")
    run = here("analyze", *GRID, "--machine", "here.toml")
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("UsageError: there is no machine file here.toml; the names known are: ")


def test_cost_command_error_for_failing_import(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import math\nx = math.nothing\n")
    for command in ("analyze", "compare", "explain", "verify"):
        run = here(command, f"{tmp_path}/broken.py:lm")
        assert (run.code, run.out) == (1, "")
        assert run.err.endswith("broken.py:2  x = math.nothing\n")


def test_cost_command_error_names_every_problem_of_a_machine_file(tmp_path: Path):
    bad = tmp_path / "bad.toml"
    bad.write_text(MACHINE.replace("hbm = 1e9", "hbm = -1").replace("vector = 1e12", "vecter = 1e12"))
    run = here("analyze", *GRID, "--machine", str(bad))
    assert (run.code, run.out) == (2, "")
    assert "hbm must be" in run.err and "vecter" in run.err and "Traceback" not in run.err
    bad.write_text("title = ")
    run = here("analyze", *GRID, "--machine", str(bad))
    assert (run.code, run.out) == (2, "") and "is not TOML" in run.err


def test_write_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "page.html"
    run = here("analyze", *GRID, "--html", str(path))
    assert run.code == 0 and path.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444 & ~files._umask()
    before = path.read_text()

    def broken(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(html, "page", broken)
    assert here("analyze", *GRID, "--html", str(path)).code == 130
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["page.html"]


def test_analyze_trace_writes_events(tmp_path: Path):
    path = tmp_path / "trace.json"
    assert here("analyze", *GRID, "--trace", str(path)).code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {"compute", "cols"}


def test_write_error_for_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MeshdslError, match="cannot be written: No space left on device"):
        common.write(tmp_path / "a.html", "text")
    assert os.listdir(tmp_path) == []


def test_write_only_replaces_regular_files(tmp_path: Path):
    """A device or a pipe is written to, whoever asks; a link keeps its place."""
    real, link, pipe = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "pipe"
    real.write_text("before")
    link.symlink_to(real)
    common.write(link, "text")
    assert link.is_symlink() and real.read_text() == "text"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="pipe cannot be written: no process reads this pipe"):
        common.write(pipe, "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    common.write(pipe, "text")
    assert os.read(reader, 99) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    for path in (Path("/dev/null"), null):
        common.write(path, "text")
        assert stat.S_ISCHR(path.stat().st_mode), path
    with pytest.raises(MeshdslError, match="/dev/full cannot be written: No space left on device"):
        common.write(Path("/dev/full"), "text")
    with pytest.raises(UsageError, match="it is a directory"):
        common.write(tmp_path, "text")
    assert sorted(os.listdir(tmp_path)) == ["link.html", "null", "pipe", "real.html"]


def test_compare_and_search_write_html(tmp_path: Path):
    for name, arguments in {
        "compare": [BIGRAM],
        "search": [BIGRAM, "--mesh", "all:2", "--dims", "batch vocab"],
    }.items():
        path = tmp_path / f"{name}.html"
        assert here(name, *arguments, "--html", str(path)).code == 0
        assert path.read_text().count("<svg") >= 4


def test_cost_commands_print_plain_lines_without_a_terminal():
    run = here("explain", *GRID, "--moves")
    assert run.code == 0
    assert "\x1b" not in run.out + run.err and "\r" not in run.out + run.err
    assert run.out.startswith("bound by ")
