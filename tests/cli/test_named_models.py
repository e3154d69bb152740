"""Models by name and by a Hugging Face config.json, and the plan that `analyze --devices` finds."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from benchmarks.presets import PUBLISHED, parameters
from meshdsl.train import load

from .running import here

CONFIG = Path(__file__).parent.parent / "models" / "references" / "llama3" / "config.json"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_has_the_published_number_of_parameters(name: str):
    assert parameters(name) == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_a_config_json_is_a_model(tmp_path: Path):
    run = here("list", str(CONFIG), "--json")
    assert run.code == 0 and json.loads(run.out)["workload"] == "llama"
    assert load(str(CONFIG)).config.d_head == 8
    values = json.loads(CONFIG.read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values | {"model_type": "other"}))
    run = here("list", str(file))
    assert run.code == 2 and "'other'" in run.err and "llama, mamba" in run.err
    file.write_text("[1]")
    assert here("list", str(file)).code == 2
    file.write_text("{")
    assert "cannot be read as JSON" in here("list", str(file)).err
    for damaged in ("[" * 100_000, json.dumps(values | {"hidden_size": 10**30})):
        file.write_text(damaged)
        run = here("list", str(file))
        assert run.code == 2 and len(run.err) < 1000, run
    os.truncate(file, 5 << 30)  # a hole
    run = here("list", str(file))
    assert run.code == 2 and "has more than 1048576 bytes" in run.err, run
    file.unlink()
    file.write_text(json.dumps(values | {"hidden_act": "relu", "surprise": 3, "dtype": "int3"}))
    run = here("list", str(file))
    assert run.code == 2 and "only 'silu'" in run.err and "surprise" in run.err and "'int3'" in run.err


def test_a_model_that_is_not_there_gets_the_list():
    run = here("list", "lama3-70b")
    assert run.code == 2 and "did you mean 'llama3-70b'?" in run.err


def test_analyze_finds_a_plan_for_a_number_of_devices():
    run = here("analyze", "mlp", "--devices", "4", "--machine", "h100", "--json")
    assert run.code == 0 and math.prod(json.loads(run.out)["mesh"].values()) == 4
    run = here("analyze", "mlp", "--devices", "4", "--layout", "data")
    assert run.code == 2 and "--layout has no effect with --devices" in run.err
    run = here("analyze", "mlp", "--devices", "4", "--remat", "full", "--collective-steps", "flat")
    assert run.code == 2 and "--remat, --collective-steps has no effect with --devices" in run.err


def test_checkpoints_at_a_url_are_resumed(tmp_path: Path):
    options = ["train", "mlp", "--set", "io=8", "--set", "hidden=8", "--checkpoints", f"file://{tmp_path}/store"]
    assert here(*options, "--steps", "1").code == 0
    run = here(*options, "--steps", "2", "--json")
    assert run.code == 0 and '"resume"' in run.out, run.err
    assert {p.name for p in (tmp_path / "store").iterdir()} >= {"config.toml", "step-00000001", "step-00000002"}


@pytest.mark.slow
def test_deepseek_v3_keeps_its_experts_sharded():
    layout = "batch:rows;expert:rows;vocab:cols;d_ff:cols;heads:cols"
    run = here("analyze", "deepseek-v3", "--mesh", "rows:256;cols:8", "--layout", layout, "--machine", "h100",
               "--weight-update", "sharded", "--microbatches", "60", "--json")  # fmt: skip
    assert run.code == 0 and json.loads(run.out)["peak_bytes"] < 50e9, run.err
