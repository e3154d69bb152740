"""`meshdsl plot` and `meshdsl export`: the curves and the tensors of runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.report.curves import curves_of, curves_page
from tests.cli.running import HERE, here

TINY = str(HERE.parent / "train" / "tiny.py") + ":tiny"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", "0"), ("b", "1")):
        options = ["--metrics", str(folder / f"{name}.jsonl"), "--checkpoints", str(folder / name), "--seed", seed]
        run = here("train", TINY, "--steps", "4", "--eval-every", "2", "--eval-batches", "1", *options)
        assert run.code == 0, run.err
    return folder


def test_plot_shows_every_run(runs: Path, tmp_path: Path):
    page = tmp_path / "runs.html"
    run = here("plot", str(runs / "a.jsonl"), str(runs / "b.jsonl"), "--html", str(page))
    assert run.code == 0 and "a: a" in run.out and "b: b" in run.out and "eval loss" in run.out, run
    text = page.read_text()
    assert text.count("<svg") == len(curves_of((runs / "a.jsonl").read_text().splitlines()))
    assert text.count('class="curve curve-1"') >= 2 and "://" not in text
    record = json.loads(here("plot", str(runs / "a.jsonl"), "--json").out)
    steps = [json.loads(line) for line in (runs / "a.jsonl").read_text().splitlines()]
    assert record["runs"]["a"]["loss"] == [[r["step"], r["loss"]] for r in steps if r["event"] == "step"]


def test_plot_errors(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text('not json\n[]\n3\n{"event": "step"}\n')
    for arguments, message in [
        ([str(tmp_path / "empty.jsonl")], "empty has no records of steps"),
        ([str(tmp_path / "nothing")], "cannot be read: No such file"),
        (["x" * 300], "RUN cannot be read: File name too long"),
        ([], "the following arguments are required: RUN"),
    ]:
        run = here("plot", *arguments)
        assert run.code == 2 and message in run.err, run


def test_curves_of_a_resumed_run_use_the_later_line():
    lines = [json.dumps({"event": "step", "step": step, "loss": loss}) for step, loss in [(1, 3.0), (2, 2.5), (2, 2.0)]]
    assert curves_of(lines) == {"loss": [(1, 3.0), (2, 2.0)]}
    others = [
        f'{{"event": "step", "step": {step}, "loss": {loss}}}'
        for step, loss in [(1, "NaN"), (2, "1e999"), (3, "2"), (4, "9" * 400)]
    ]
    assert curves_of(others) == {"loss": [(3, 2.0)]}, "what a chart cannot show"
    long = {"loss": [(n, float(n % 7)) for n in range(100_000)]}
    assert len(curves_page({"<b>": long})) < 100_000 and "<b>" not in curves_page({"<b>": long})


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
