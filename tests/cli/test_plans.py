"""Plan files and the options of knobs, on every command that has a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.report import rates
from meshdsl.tools.commands import costing
from meshdsl.train import reader
from tests.cli.running import HERE, here

MLP = [
    str(HERE.parent.parent / "models" / "mlp.py") + ":mlp",
    "--set",
    "io=32",
    "--set",
    "hidden=64",
    "--set",
    "batch=64",
]
PLAN = md.Plan("rows:4", "batch:rows", "sharded", microbatches=2)


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(HERE)
    yield


@pytest.fixture
def file(tmp_path: Path) -> str:
    PLAN.save(tmp_path / "two.toml")
    PLAN.replace(weight_update="replicated", microbatches=1).save(tmp_path / "plain.toml")
    return str(tmp_path / "two.toml")


def analyzed(*options: str) -> dict:
    run = here("analyze", *MLP, "--json", *options)
    assert run.code == 0, run.err
    return json.loads(run.out)


def test_analyze_costs_a_plan(file: str):
    found = analyzed("--plan", file)
    step = md.compile(load().train_step(), plan=PLAN, donate=(0, 1))
    report = step.cost(*load().specs())
    assert (found["seconds"], found["peak_bytes"]) == (report.seconds, report.peak_bytes)
    knobs = ["--weight-update", "sharded", "--microbatches", "2"]
    assert analyzed("--mesh", "rows:4", "--layout", "batch:rows", *knobs)["seconds"] == found["seconds"]


def load() -> md.Workload:
    from meshdsl.models.mlp import mlp

    return mlp.replace(io=32, hidden=64, batch=64)


def test_options_override_the_knobs_of_a_plan(file: str):
    plain = analyzed("--mesh", "rows:4", "--layout", "batch:rows")
    assert (
        analyzed("--plan", file, "--microbatches", "1", "--weight-update", "replicated")["seconds"] == plain["seconds"]
    )
    assert analyzed("--plan", file, "--mesh", "rows:2")["mesh"] == {"rows": 2}
    assert (
        analyzed("--plan", file, "--layout", "hidden:rows", "--weight-update", "replicated")["layout"] == "hidden:rows"
    )


def test_update_options_reach_the_step(file: str):
    whole = analyzed("--plan", file)
    grouped = analyzed("--plan", file, "--update-group", "rows:2")
    assert grouped["mesh"] == {"rows": 4} and grouped["seconds"] != whole["seconds"]


def test_compare_shows_plans_by_their_files(file: str):
    plain = file.replace("two", "plain")
    run = here("compare", *MLP, "--plan", file, "--plan", plain, "--json")
    assert run.code == 0, run.err
    assert list(json.loads(run.out)["reports"]) == ["two", "plain"]
    run = here("compare", *MLP, "--plan", file)
    assert run.code == 2 and "at least two layouts or plans" in run.err


def test_explain_and_verify_take_a_plan(file: str):
    assert "reduce_scatter" in here("explain", *MLP, "--plan", file, "--program").out
    run = here("verify", *MLP, "--plan", file)
    assert run.code == 0, run.err + run.out


def test_train_takes_a_plan_and_options_override_it(file: str, tmp_path: Path):
    def resolved(*options: str) -> str:
        run = here("train", *MLP, "--print-config", *options)
        assert run.code == 0, run.err
        return run.out

    text = resolved("--plan", file)
    assert 'weight_update = "sharded"' in text and "microbatches = 2" in text
    assert "microbatches = 4" in resolved("--plan", file, "--microbatches", "4")
    (tmp_path / "run.toml").write_text(f'plan = "{file}"\n[train]\nremat = "full"\n')
    assert 'remat = "full"' in resolved("--config", str(tmp_path / "run.toml"))
    (tmp_path / "again.toml").write_text(text)
    assert resolved("--config", str(tmp_path / "again.toml")) == text


def test_train_runs_under_a_plan(file: str):
    losses = []
    for options in (["--plan", file], ["--mesh", "rows:4", "--layout", "batch:rows"]):
        run = here("train", *MLP, *options, "--steps", "3", "--eval-batches", "0", "--json")
        assert run.code == 0, run.err
        records = map(json.loads, run.out.splitlines())
        losses.append([record["loss"] for record in records if record["event"] == "step"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plan", "nowhere.toml"], "the plan nowhere.toml cannot be read"),
        (["--mesh", "rows:4", "--layout", "batch:rows", "--remat", "full"], "no field remat"),
        (["--mesh", "rows:4", "--layout", "batch:rows", "--microbatches", "7"], "7 micro-batches"),
        (["--mesh", "rows:4", "--layout", "batch:rows", "--remat", "half"], "remat='half' is not available"),
        (["--mesh", "rows:4", "--layout", "batch:rows", "--regather"], "regather=True has no effect"),
        (["--forward", "--microbatches", "2"], "--microbatches has no effect with --forward"),
    ],
)
def test_wrong_knobs_say_why(options: list[str], says: str):
    run = here("analyze", *MLP, *options)
    assert run.code in (1, 2, 3) and says in run.err and "Traceback" not in run.err


class Device:
    """A device that reports its memory, as accelerators do."""

    device_kind = "TPU v5 lite"

    def memory_stats(self) -> dict[str, int]:
        return {"peak_bytes_in_use": 5_000_000_000}


def test_train_records_have_utilisation_and_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rates, "machine_of_device", lambda kind: md.machine("tpu-v5e"))
    made = reader.Recorder.__init__

    def on_an_accelerator(self: reader.Recorder, *args: Any) -> None:
        made(self, *args)
        self.device = Device()  # type: ignore[assignment]

    monkeypatch.setattr(reader.Recorder, "__init__", on_an_accelerator)
    options = ["--mesh", "rows:2", "--layout", "batch:rows", "--steps", "3", "--eval-batches", "0"]
    run = here("train", *MLP, *options, "--json")
    assert run.code == 0, run.err
    steps = [record for record in map(json.loads, run.out.splitlines()) if record["event"] == "step"]
    work = costing.work(load(), md.compile(load().train_step(), "rows:2"), load().specs())
    assert steps[-1]["peak_bytes"] == 5_000_000_000
    assert 0 < steps[-1]["mfu"] < 1 and work.peak_seconds(md.machine("tpu-v5e"), 2) > 0
    text = here("train", *MLP, *options).out
    assert "MFU " in text and "5.00 GB" in text


def test_train_without_known_devices_has_no_utilisation():
    run = here(
        "train", *MLP, "--mesh", "rows:2", "--layout", "batch:rows", "--steps", "2", "--eval-batches", "0", "--json"
    )
    assert run.code == 0 and "mfu" not in run.out and "peak_bytes" not in run.out


def test_analyze_takes_collectives_in_steps():
    """The machine of the command decides, and only where it is asked; without a slow axis the option has no effect."""
    where = ["--layout", "batch:node,gpu", "--machine", "h100"]
    kinds: dict[str, set[Any]] = {}
    for steps in ("", "flat", "always", "auto"):
        found = analyzed("--mesh", "node:4 gpu:8", *where, *(["--collective-steps", steps] if steps else []))
        kinds[steps] = {(each["kind"], *each["axes"]) for each in found["collectives"]}
    assert kinds[""] == kinds["flat"] == {("all_reduce", "gpu", "node")}
    assert {("reduce_scatter", "gpu"), ("all_reduce", "node"), ("all_gather", "gpu")} <= kinds["always"]
    assert kinds["auto"] == {("all_reduce", "gpu"), ("all_reduce", "node")}  # planned by time
    run = here("analyze", *MLP, "--mesh", "node:4 gpu:2", *where, "--collective-steps", "always")
    assert run.code and "no collective can be in steps" in run.err
