"""The commands that list and write: list, init."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.cost.machine import machines
from tests.cli.running import HERE, here

ROOT = HERE.parent.parent


def test_machines_lists_every_machine_with_its_figures():
    run = here("list")
    assert run.code == 0 and run.err == ""
    lines = {line.split()[0]: line for line in run.out.splitlines()[1:] if line}
    assert set(machines()) <= set(lines)
    assert "197 TFLOP/s bfloat16" in lines["tpu-v5e"]
    assert "torus x:16 y:16" in lines["tpu-v5e"] and lines["tpu-v5e"].rstrip().endswith("package")


def test_machines_in_json_have_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = Path(md.machine("h100").file).read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(own, encoding="utf-8")
    monkeypatch.setenv("MESHDSL_MACHINES", str(tmp_path))
    found = {each["name"]: each for each in json.loads(here("list", "--json").out)["machines"]}
    assert found["mine"]["origin"] == str(tmp_path / "mine.toml") and found["h100"]["origin"] == "package"
    assert found["h100"]["sources"]["vector"] == "NVIDIA data sheet"


def test_layouts_lists_those_of_the_workload():
    run = here("list", f"{ROOT}/models/mlp.py:mlp")
    assert run.code == 0
    assert [line.split()[0] for line in run.out.splitlines()] == [
        "layout",
        "empty",
        "data",
        "model",
        "data_model",
        "three_d",
    ]
    (record, *_) = json.loads(here("list", f"{ROOT}/models/mlp.py:mlp", "--json").out)["layouts"]
    assert record == {"name": "empty", "mesh": {"all": 8}, "devices": 8, "layout": ""}


def test_init_writes_a_model_that_trains_under_each_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = here("init", "mine.py")
    assert run.code == 0, run.err
    assert tomllib.loads((tmp_path / "mine.toml").read_text("utf-8"))["layout"] == "both"
    losses: dict[str, list[float]] = {}
    for layout in ("data", "both"):
        quick = ["--steps", "100", "--eval-every", "100", "--json"]
        trained = here("train", "mine.py:mine", "--config", "mine.toml", "--layout", layout, *quick)
        assert trained.code == 0, trained.err
        records = [json.loads(line) for line in trained.out.splitlines()]
        losses[layout] = [each["loss"] for each in records if "loss" in each]
    assert losses["both"][-1] < 0.6 * losses["both"][0]
    assert losses["both"] == pytest.approx(losses["data"], rel=1e-3)


def test_init_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("kept", encoding="utf-8")
    run = here("init", "mine.py")
    assert run.code == 2 and "mine.toml exists already" in run.err
    assert not (tmp_path / "mine.py").exists() and (tmp_path / "mine.toml").read_text("utf-8") == "kept"


@pytest.mark.parametrize("name", ["mine", "a-b.py", "class.py", "nowhere/mine.py"])
def test_init_needs_the_name_of_a_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert here("init", name).code == 2


def test_init_of_a_name_that_the_file_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert here("init", "model.py").code == 0
    assert here("list", "model.py:model_model").code == 0
