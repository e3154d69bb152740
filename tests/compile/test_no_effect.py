"""Options without effect are errors; with `strict=False` each is dropped with a warning at the caller's line."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshdsl as md
from tests.cli.running import here

X = md.spec("batch:8 io:4")


def total(x: md.Tensor) -> md.Tensor:
    return md.sum(x, "batch")


OPTIONS = [
    ({"weight_update": "sharded"}, "weight_update='sharded' has nothing to shard"),
    ({"weight_update": md.WeightUpdate(bucket_bytes=8)}, "bucket_bytes=8 joins nothing"),
    ({"overlap": "ring"}, "overlap='ring' has no effect"),
    ({"overlap": "halves"}, "overlap='halves' has no effect"),
    ({"unroll": True}, "unroll=True has no effect"),
    ({"machine": "tpu-v5e"}, "machine='tpu-v5e' has no effect"),
    ({"steps": "always", "machine": "tpu-v5e"}, "steps='always' has no effect"),
    ({"microbatches": 2}, "the plan has microbatches=2, and total does not take microbatches"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda x: "" if isinstance(x, dict) else x.split()[0])
def test_options_are_dropped(options, message):
    with pytest.raises(md.NoEffectError, match=message):
        md.compile(total, "rows:4", "batch:rows", **options).program(X)
    with pytest.warns(md.NoEffectWarning, match=message) as caught:
        program = md.compile(total, "rows:4", "batch:rows", strict=False, **options).program(X)
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
    assert str(program).partition("#")[0] == str(md.compile(total, "rows:4", "batch:rows").program(X)).partition("#")[0]


VALUES = [
    (md.WeightUpdate, {"regather": True, "group": "x"}),
    (md.Overlap, {"mode": "list", "dim": "batch", "parts": 4}),
    (md.Overlap, {"memory_limit": 1e9}),
    (md.Plan, {"mesh": "rows:2", "machine": "h100"}),
]


@pytest.mark.parametrize(("kind", "options"), VALUES)
def test_values_are_built_without_them(kind, options):
    with pytest.raises(md.NoEffectError):
        kind(**options)
    with pytest.warns(md.NoEffectWarning):
        value = kind(**options, strict=False)
    assert value == kind(**{k: v for k, v in options.items() if k in ("mode", "mesh")})


@pytest.mark.parametrize(
    "line", ["machine = 'h100'", "weight_update = {regather = true}", "overlap = {memory_limit = 1e9}"]
)
def test_plans_are_read_without_them(line: str, tmp_path: Path):
    (tmp_path / "plan.toml").write_text(f"mesh = 'rows:2'\n{line}\n")
    with pytest.raises(md.NoEffectError, match=r"plan\.toml is wrong"):
        md.Plan.load(tmp_path / "plan.toml")
    with pytest.warns(md.NoEffectWarning, match="it is dropped") as caught:
        assert md.Plan.load(tmp_path / "plan.toml", strict=False) == md.Plan("rows:2")
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


@pytest.mark.parametrize(
    "options",
    [["--regather"], ["--weight-update", "sharded"], ["--overlap", "dw"], ["--forward", "--microbatches", "2"]],
    ids=" ".join,
)
def test_commands_drop_them(options):
    arguments = ["analyze", "mlp", "--mesh", "rows:4", "--layout", "io:rows", "--set", "batch=64", *options]
    assert here(*arguments).code in (2, 3)
    run = here(*arguments, "--no-strict")
    assert run.code == 0 and run.err.count("warning: ") == 1 and "it is dropped" in run.err, run.err
