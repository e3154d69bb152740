"""`meshdsl train`: configurations, dry runs, files of records; many mutations: `python -m tests.train.faults`."""

from __future__ import annotations

import importlib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.train import resolve
from tests.cli.running import here
from tests.train.hostile import WORKLOAD, hostile

TINY = ["train", WORKLOAD, "--eval-batches", "0"]


def test_settings_later_sources_override(tmp_path: Path):
    file = tmp_path / "run.toml"
    tables = ["[train]\nsteps = 3\nseed = 4\neval_every = 5", "[config]\nhidden = 7\nio = 8", "[config.drop]\nkeep = 1"]
    file.write_text("\n".join(['layout = "data"', *tables]))
    said = here(
        "train", WORKLOAD, "--config", str(file), "--set", "train.seed=6", "--set", "hidden=9",
        "--set", "train.steps=1", "--steps", "2", "--set", "drop.keep=0.25",
        "--set", "config.learning_rate=1e-4", "--print-config",
    )  # fmt: skip
    assert said.code == 0, said.err
    found = tomllib.loads(said.out)
    assert (found["layout"], found["train"]["steps"], found["train"]["seed"], found["train"]["eval_every"]) == (
        "data", 2, 6, 5,
    )  # fmt: skip
    assert found["config"] == {"batch": 4, "io": 8, "hidden": 9, "learning_rate": 1e-4, "drop": {"keep": 0.25}}
    file.write_text(said.out)
    assert here("train", WORKLOAD, "--config", str(file), "--print-config").out == said.out, "the same file again"
    assert resolve(WORKLOAD, file).workload.config.drop.keep == 0.25


def test_a_run_keeps_what_only_its_plan_file_says(tmp_path: Path):
    file = tmp_path / "plan.toml"
    file.write_text(md.Plan("rows:1", unroll=True, attention_kernel="blockwise").to_toml())
    plan = resolve(WORKLOAD, None, [f"plan={file}"]).run_plan()
    assert (plan.unroll, plan.attention_kernel) == (True, "blockwise")


MISTAKES = [
    ("[train]\nstep = 3", [], "has no key 'train.step'; did you mean 'train.steps'?"),
    ("[trian]\nsteps = 3", [], "has no key 'trian'"),
    ("steps = 3", [], "has no key 'steps'; did you mean 'train.steps'?"),
    ("[config]\nhiden = 3", [], "has no key 'config.hiden'; did you mean 'config.hidden'?"),
    ("[config.drop]\nkept = 3", [], "has no key 'config.drop.kept'; did you mean 'config.drop.keep'?"),
    ("[train]\nsteps = 3.5", [], "train.steps must be an integer from 0, got 3.5"),
    ("[train]\nsteps = true", [], "train.steps must be an integer from 0, got True"),
    ("[train]\nnon_finite = 'ignore'", [], "train.non_finite must be one of stop, skip, got 'ignore'"),
    ("[checkpoints]\nkeep = 0", [], "checkpoints.keep must be an integer from 1, got 0"),
    ("[train", [], "is not TOML"),
    ("a = " + "[" * 5000, [], "nested too deeply"),
    ("a = " + "9" * 5000, [], "is not TOML"),
    ('workload = "other.py:lm"', [], "is for another workload"),
    ("", ["--set", "train.stps=3"], "a run has no key 'train.stps'; did you mean 'train.steps'?"),
    ("", ["--set", "checkpoints.keep=many"], "checkpoints.keep must be an integer from 1, got 'many'"),
    ("", ["--set", "drop=3"], "has no 'drop'; did you mean 'drop.keep'?"),
    ("", ["--resume", "never", "--keep", "0"], "--keep: must be an integer from 1 to 1e+15, got '0'"),
]


@pytest.mark.parametrize(("text", "arguments", "message"), MISTAKES)
def test_settings_errors(tmp_path: Path, text: str, arguments: list[str], message: str):
    file = tmp_path / "run.toml"
    file.write_text(text)
    run = here(*TINY, "--config", str(file), *arguments, "--print-config")
    assert (run.code, run.out) == (2, ""), run.err
    assert message in run.err and "Traceback" not in run.err


def test_dry_run_prints_the_cost_without_running(tmp_path: Path):
    arguments = [*TINY, "--layout", "data", "--checkpoints", str(tmp_path / "c"), "--dry-run"]
    run = here(*arguments, "--weight-update", "sharded")
    assert run.code == 0, run.err
    assert "step" in run.out and "2 of 2 sharded" in run.out
    assert not (tmp_path / "c").exists()
    record = json.loads(here(*arguments, "--json", "--machine", "tpu-v3").out)
    assert (record["event"], record["cost"]["machine"]["name"]) == ("dry-run", "tpu-v3")


def test_train_writes_metrics_and_skips_a_corrupt_checkpoint(tmp_path: Path):
    lines, checkpoints = tmp_path / "m.jsonl", tmp_path / "c"
    options = ["--checkpoints", str(checkpoints), "--save-every", "1", "--metrics", str(lines)]
    run = here(*TINY, *options, "--steps", "2", "--tensorboard", str(tmp_path / "board"))
    assert run.code == 0, run.err
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [r["event"] for r in records if r["event"] != "save"] == ["start", "step", "step", "end"]
    assert "seconds_left" in [r for r in records if r["event"] == "step"][1]
    assert list((tmp_path / "board").glob("events.*"))
    assert tomllib.loads((checkpoints / "config.toml").read_text())["train"]["steps"] == 2
    run = here(*TINY, *options, "--steps", "3")
    assert run.code == 0 and "resumed from" in run.out, run.err
    for part in checkpoints.glob("step-*/part-00000.bin"):
        part.write_bytes(b"")
    run = here(*TINY, *options, "--steps", "4")
    assert run.code == 4
    assert "step-00000003" in run.err and "there is no valid checkpoint" in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize(("option", "library"), [("--tensorboard", "tensorboardX"), ("--wandb", "wandb")])
def test_sink_error_if_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, library: str):
    real = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == library:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    run = here(*TINY, "--steps", "0", option, str(tmp_path))
    assert run.code == 2
    assert f"{library} cannot be imported" in run.err and f"pip install '{library}>=" in run.err


def test_wandb_writes_one_run_offline(tmp_path: Path):
    """Two starts of one training run have one id; their files hold the metrics, and nothing was sent."""
    board, losses = tmp_path / "board", []
    for steps in ("1", "2"):
        run = here(*TINY, "--steps", steps, "--checkpoints", str(tmp_path / "c"), "--wandb", str(board), "--json")
        assert run.code == 0, run.err
        losses += [r["loss"] for line in run.out.splitlines() if (r := json.loads(line))["event"] == "step"]
    identity = (board / "run-id").read_text().strip()
    # W&B appends -1 to the second folder where both starts are within one second.
    files = sorted(board.glob(f"wandb/offline-run-*-{identity}*/run-{identity}.wandb"))
    assert len(files) == 2
    content = b"".join(file.read_bytes() for file in files)
    assert len(losses) == 2 and all(str(loss)[:12].encode() in content for loss in losses)
    assert b"train/loss" in content and b"learning_rate" in content


def test_settings_error_from_the_model():
    run = here(*TINY, "--set", "batch=0", "--set", "io=-3", "--dry-run")
    assert run.code in (1, 2, 3) and "Traceback" not in run.err and run.err, run


def test_settings_hostile_files_only_raise_usage_errors():
    found = hostile(60, 0, dry_runs=1)
    assert found["mutations"] == 60 and set(found["codes"]) <= {0, 1, 2, 3}


ODD = ["train", str(Path(WORKLOAD.partition(":")[0]).parent / "odd.py") + ":odd"]


def test_settings_values_round_trip(tmp_path: Path):
    file = tmp_path / "run.toml"
    settings = ["pair=3,0.5", "sizes=1,2", "names=a, b", "perhaps=4", "scale=nan"]
    said = here(*ODD, *(word for text in settings for word in ("--set", text)), "--print-config")
    assert said.code == 0, said.err
    config = tomllib.loads(said.out)["config"]
    assert (config["pair"], config["sizes"], config["names"], config["perhaps"]) == ([3, 0.5], [1, 2], ["a", "b"], 4)
    file.write_text(said.out + "one = 1\n")  # in the last table, which is config.table
    again = here(*ODD, "--config", str(file), "--print-config")
    assert (again.code, again.out) == (0, said.out + "one = 1\n"), again.err
    for text, message in [
        ("pair=3", "pair must be a list of 2 values, got ['3']"),
        ("table=3", "table must be a table, got '3'"),
    ]:
        run = here(*ODD, "--set", text, "--print-config")
        assert run.code == 2 and message in run.err, run.err


def test_train_records_are_strict_json(tmp_path: Path):
    lines = tmp_path / "m.jsonl"
    options = ["--checkpoints", str(tmp_path / "c"), "--metrics", str(lines), "--json"]
    run = here(*ODD, "--steps", "1", "--set", "scale=inf", "--set", "wrong=held_out", *options)
    assert run.code == 5 and "NonFiniteLoss: the eval loss of step 1, the last one, is not finite" in run.err, run

    def strictly(text: str) -> Any:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    for text in (run.out, lines.read_text()):
        records = [strictly(line) for line in text.splitlines()]
        found = {record["event"]: record for record in records}
        assert found["eval"]["loss"] is None and found["start"]["config"]["scale"] == "inf"
    assert "eval loss not finite" in here(*ODD, "--steps", "1", "--set", "wrong=held_out").out
    assert md.Checkpoints(tmp_path / "c").restore(like={}).config["config"]["scale"] == "inf"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("missing", "the batch has no array 'x'; it has: y"),
        (
            "shape",
            "the array 'x' of the batch is float64 of shape [4, 2], and inputs(config) says float32[batch=4 io=3]",
        ),
        ("dtype", "the array 'x' of the batch is complex128 of shape [4, 3]"),
        ("raises", "odd fails: FileNotFoundError: no such shard\n  at "),
    ],
)
def test_train_errors_for_bad_batches(wrong: str, message: str):
    run = here(*ODD, "--steps", "1", "--set", f"wrong={wrong}")
    assert run.code == 1 and message in run.err, run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "2", "--save-every", "3"], "--save-every --keep has no effect without --checkpoints DIR"),
        (["--resume", "somewhere/step-00000003"], "--resume has no effect without --checkpoints DIR"),
        (["--set", "checkpoints.resume=somewhere"], "--resume has no effect without --checkpoints DIR"),
        (["--machine", "tpu-v4"], "--machine has no effect here"),
        (["--checkpoints", ""], "checkpoints.directory must not be empty"),
        (["--checkpoints", "x", "--resume", ""], "checkpoints.resume must not be empty"),
        (["--checkpoints", __file__], "--checkpoints must be a directory, and"),
        (["--processes", "0", "--process", "0", "--coordinator", "h:1"], "--processes: must be an integer from 1"),
        (["--profile", f"{__file__}/x"], "cannot be written"),
        (["--resume", "auto"], "--resume has no effect without --checkpoints DIR"),
        (["--eval-every", "5", "--eval-batches", "0"], "--eval-every has no effect with --eval-batches 0"),
        (["--set", "train.max_skips=3"], "train.max_skips has no effect with --non-finite stop"),
        (["--log-every", "0"], "--log-every: must be an integer from 1"),
        (["--dry-run", "--print-config"], "argument --print-config: not allowed with argument --dry-run"),
        (["--dry-run", "--process", "1"], "--coordinator, --processes and --process must be given together"),
        (["--dry-run", "--devices", "3", "--mesh", "a:4"], "needs 4 devices, and --devices gives 3"),
    ],
)
def test_train_errors_for_options_without_effect(arguments: list[str], message: str):
    run = here(*ODD, "--steps", "1", *arguments)
    assert (run.code, run.out) == (2, "") and message in run.err, run


def test_dry_run_and_auto_use_the_machine():
    arguments = [*TINY, "--layout", "data", "--weight-update", "auto", "--dry-run", "--json"]
    for machine, decided in (("tpu-v4", "on tpu-v4 "), ("tpu-v3", "on tpu-v3 ")):
        record = json.loads(here(*arguments, "--machine", machine).out)
        assert record["cost"]["machine"]["name"] == machine
        assert all(w["reason"].startswith(decided) for w in record["weight_update"]["weights"] if not w["sharded"])


def test_train_checks_the_checkpoint_directory_first(tmp_path: Path):
    other = md.Checkpoints(tmp_path)
    other.claim()
    run = here(*ODD, "--steps", "1", "--checkpoints", str(tmp_path))
    other.close()
    assert run.code == 1 and "is being written by process" in run.err and "step" not in run.out, run


def test_resume_of_a_finished_run_and_of_another_model(tmp_path: Path):
    options = ["--eval-batches", "0", "--checkpoints", str(tmp_path)]
    (tmp_path / "config.toml").write_text("# mine\n[train]\nsteps = 1\n")
    run = here(*ODD, *options, "--config", str(tmp_path / "config.toml"))
    assert run.code == 0, run.err
    assert (tmp_path / "config.toml").read_text().startswith("# mine")
    assert tomllib.loads((tmp_path / "resolved.toml").read_text())["train"]["steps"] == 1
    run = here(*ODD, *options, "--steps", "1")
    assert run.code == 0 and "all steps are already done" in run.out, run
    run = here(*ODD, *options, "--steps", "2", "--set", "io=5")
    assert run.code == 2
    assert "was saved with another model or optimizer" in run.err and "config.io was 3, now it is 5" in run.err
    assert "params/w: is float32[io=3] in the checkpoint and float32[io=5] in this run" in run.err


def test_train_cleans_up_after_kills_and_goes_on_without_a_full_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine = [".config.toml.mine", "config.toml.notes"]
    for name in (".config.toml.0a1b2c3d", ".resolved.toml.abcd1234", *mine):
        (tmp_path / name).write_text("left behind")
    options = ["--eval-batches", "0", "--checkpoints", str(tmp_path), "--save-every", "1"]
    assert here(*ODD, *options, "--steps", "2").code == 0
    assert {name for name in os.listdir(tmp_path) if "toml" in name} == {"config.toml", *mine}
    real = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith("config.toml"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    run = here(*ODD, *options, "--steps", "4")
    assert run.code == 1 and "config.toml cannot be written: No space left on device" in run.err, run
    assert md.Checkpoints(tmp_path).latest() == 4, "the run itself is saved"
    os.mkfifo(tmp_path / "pipe")
    run = here(*ODD, *options, "--steps", "5", "--metrics", str(tmp_path / "pipe"))
    assert run.code == 2 and "pipe cannot be written: no process reads this pipe" in run.err, run
    run = here(*ODD, *options, "--steps", "5", "--metrics", "/dev/full")
    assert run.code == 1 and "/dev/full: a write failed: No space left on device" in run.err, run
    assert md.Checkpoints(tmp_path).latest() == 5


def test_train_errors_for_a_full_disk(tmp_path: Path):
    run = here(*ODD, "--steps", "1", "--metrics", "/dev/full")
    assert run.code == 1 and "/dev/full: a write failed: No space left on device" in run.err, run
    run = here(*ODD, "--steps", "1", "--profile", str(tmp_path / "p"))
    assert run.code == 0 and "nothing was traced; tracing starts at the third step" in run.err, run
