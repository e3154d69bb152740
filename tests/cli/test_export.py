"""`meshdsl export`: the tensors of runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from tests.cli.running import HERE, here

TINY = str(HERE.parent / "train" / "tiny.py") + ":tiny"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = here("train", TINY, "--steps", "4", "--eval-batches", "1", "--checkpoints", str(folder / "a"))
    assert run.code == 0, run.err
    return folder


def test_export_writes_the_parameters(runs: Path, tmp_path: Path):
    for name, expected in (("all", {"params/v", "params/w"}), ("params", {"v", "w"})):
        file = tmp_path / f"{name}.safetensors"
        only = ["--params-only"] if name == "params" else []
        run = here("export", str(runs / "a"), str(file), "--step", "4", *only)
        assert (run.code, run.out) == (0, f"step 4 written to {file}\n"), run
        tensors = md.import_safetensors(file)
        assert expected <= set(tensors) and (set(tensors) == expected) == (name == "params")
    saved = md.Checkpoints(runs / "a").restore(4).tree["params/w"]
    assert np.array_equal(tensors["w"].numpy(), saved.numpy()) and tensors["w"].dims == saved.dims
    record = json.loads(here("export", str(runs / "a"), str(tmp_path / "x.safetensors"), "--json").out)
    assert (record["step"], record["params_only"]) == (4, False)


def test_export_errors(runs: Path, tmp_path: Path):
    for arguments, code, message in [
        ([str(runs / "a"), "x.safetensors", "--step", "3"], 2, "has no step 3\n  steps: 4"),
        ([str(tmp_path / "none"), "x.safetensors"], 2, "there is no directory"),
        (["x" * 300, "x.safetensors"], 2, "RUN cannot be read"),
        ([str(runs / "a"), "/nowhere/x.safetensors"], 1, "/nowhere/x.safetensors cannot be written"),
    ]:
        run = here("export", *arguments)
        assert run.code == code and message in run.err, run
