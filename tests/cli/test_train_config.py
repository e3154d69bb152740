"""`meshdsl train`: configurations, dry runs, files of records; many mutations: `python -m tests.train.faults`."""

from __future__ import annotations

import builtins
import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshdsl.train import resolve
from tests.cli.running import here
from tests.train.hostile import WORKLOAD, hostile

TINY = ["train", WORKLOAD, "--eval-batches", "0"]


def test_a_later_place_wins(tmp_path: Path):
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


MISTAKES = [
    ("[train]\nstep = 3", [], "has no key 'train.step'; did you mean 'train.steps'?"),
    ("[trian]\nsteps = 3", [], "has no key 'trian'"),
    ("steps = 3", [], "has no key 'steps'; did you mean 'train.steps'?"),
    ("[config]\nhiden = 3", [], "has no key 'config.hiden'; did you mean 'config.hidden'?"),
    ("[config.drop]\nkept = 3", [], "has no key 'config.drop.kept'; did you mean 'config.drop.keep'?"),
    ("[train]\nsteps = 3.5", [], "train.steps is a whole number, got 3.5"),
    ("[train]\nsteps = true", [], "train.steps is a whole number, got True"),
    ("[train]\nnon_finite = 'ignore'", [], "train.non_finite is one of stop, skip, got 'ignore'"),
    ("[checkpoints]\nkeep = 0", [], "checkpoints.keep is at least 1, got 0"),
    ("[train", [], "is not TOML"),
    ("a = " + "[" * 5000, [], "lie too deep"),
    ("a = " + "9" * 5000, [], "is not TOML"),
    ('workload = "other.py:lm"', [], "is for another workload"),
    ("", ["--set", "train.stps=3"], "a run has no key 'train.stps'; did you mean 'train.steps'?"),
    ("", ["--set", "checkpoints.keep=many"], "checkpoints.keep is a whole number, got 'many'"),
    ("", ["--set", "drop=3"], "has no 'drop'; did you mean 'drop.keep'?"),
    ("", ["--resume", "never", "--keep", "0"], "checkpoints.keep is at least 1, got 0"),
]


@pytest.mark.parametrize(("text", "arguments", "message"), MISTAKES)
def test_mistakes(tmp_path: Path, text: str, arguments: list[str], message: str):
    file = tmp_path / "run.toml"
    file.write_text(text)
    run = here(*TINY, "--config", str(file), *arguments, "--print-config")
    assert (run.code, run.out) == (2, ""), run.err
    assert message in run.err and "Traceback" not in run.err


def test_a_dry_run_says_the_cost_and_runs_nothing(tmp_path: Path):
    arguments = [*TINY, "--layout", "data", "--checkpoints", str(tmp_path / "c"), "--dry-run"]
    run = here(*arguments, "--weight-update", "sharded")
    assert run.code == 0, run.err
    assert "step" in run.out and "2 of 2 sharded" in run.out
    assert not (tmp_path / "c").exists()
    record = json.loads(here(*arguments, "--json", "--machine", "tpu-v3").out)
    assert (record["event"], record["cost"]["machine"]["name"]) == ("dry-run", "tpu-v3")


def test_files_of_records_and_a_corrupt_checkpoint(tmp_path: Path):
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
    assert "step-00000003" in run.err and "there is no sound checkpoint" in run.err
    assert "Traceback" not in run.err


def test_tensorboard_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str, *rest: Any) -> Any:
        if name == "tensorboardX":
            raise ImportError(name)
        return builtins.__import__(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    run = here(*TINY, "--steps", "0", "--tensorboard", str(tmp_path))
    assert run.code == 2
    assert "--tensorboard needs tensorboardX, which is not installed" in run.err and "pip install" in run.err


def test_a_configuration_that_a_model_cannot_have():
    run = here(*TINY, "--set", "batch=0", "--set", "io=-3", "--dry-run")
    assert run.code in (1, 2, 3) and "Traceback" not in run.err and run.err, run


def test_hostile_configurations():
    found = hostile(60, 0, dry_runs=1)
    assert found["mutations"] == 60 and set(found["codes"]) <= {0, 1, 2, 3}
