"""Training: the same losses under every layout and at every restart, and records that arrive in order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.tools import demo
from meshdsl.train import NonFiniteLoss, data_for, load, mesh_and_layout, stages, train
from tests.train.tiny import tiny

LM = load("models/transformer.py:lm").replace(batch=8, length=16, layers=2, d_model=32, heads=4, d_head=8, d_ff=64)
MLP = load("models/mlp.py:mlp").replace(batch=8, io=8, hidden=16)


def losses(workload: md.Workload, layout: str | None, **options: Any) -> list[float]:
    plan = md.Plan(*mesh_and_layout(workload, layout, None))
    records = train(workload, plan, **{"steps": 4, "eval_batches": 2, **options})
    return [record["loss"] for record in records if "loss" in record]


def test_train_passes_a_new_key_each_step():
    def loss(config: Any) -> Callable[..., md.Tensor]:
        dim = md.Dim("batch", config.batch)

        def drawn(params: dict[str, md.Tensor], batch: dict[str, md.Tensor], key: md.Tensor) -> md.Tensor:
            return md.sum(md.random.uniform(key, dim)) + 0 * md.sum(params["bias"])

        return drawn

    workload = dataclasses.replace(MLP, loss=loss)
    one = losses(workload, None)
    assert len(set(one)) == 5, "one an update, and one for all of the evaluation"
    assert losses(workload, "data") == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize("layout", MLP.layouts)
def test_train_two_layers_under_every_named_layout(layout: str):
    assert losses(MLP, layout) == pytest.approx(losses(MLP, None), rel=2e-6)


def test_train_uses_noise_for_float_inputs():
    records = list(train(MLP, md.Plan(*mesh_and_layout(MLP, "data_model", None)), steps=2, eval_batches=1))
    assert records[0]["data"] == {"kind": "noise", "fields": ["target", "x"]}
    assert "bits_per_byte" not in records[-2] and "bytes_per_second" not in records[-1]


def test_data_for_noise_has_mean_0_and_variance_1():
    noise = data_for(MLP.replace(batch=64, io=64), 0)("train", 1)["x"]
    assert abs(noise.mean()) < 0.05 and abs(noise.var() - 1) < 0.05


def test_train_order_of_records():
    records = train(MLP, md.Plan("all:1"), steps=5, eval_every=2, eval_batches=1)
    assert [(r["event"], r.get("step")) for r in records] == [
        ("start", None),
        *[("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4), ("step", 5), ("eval", 5)],
        ("end", None),
    ]


def test_train_zero_steps_and_no_evaluation():
    events = [r["event"] for r in train(MLP, md.Plan("all:1"), steps=0, eval_batches=0)]
    assert events == ["start", "end"]


def test_train_evaluates_the_same_text_for_every_seed():
    one, other = (data_for(LM, seed)("held_out", 0)["tokens"] for seed in (0, 1))
    assert np.array_equal(one, other)
    assert losses(MLP, None, seed=0)[0] != losses(MLP, None, seed=1)[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_train_non_finite_loss_names_its_step(bad: float):
    noise = data_for(MLP, 0)

    def batches(split: str, step: int) -> Mapping[str, np.ndarray]:
        batch = dict(noise(split, step))
        return {**batch, "target": batch["target"] + bad} if step == 3 else batch

    seen = []
    with pytest.raises(NonFiniteLoss, match=f"the loss of step 3 is {bad}\n  it was .* at step 2") as caught:
        for record in train(MLP, md.Plan(*mesh_and_layout(MLP, "data", None)), steps=9, batches=batches):
            seen.append(record["event"])
    assert caught.value.exit_code == 5
    assert seen == ["start", "step", "step"]


def test_train_ends_with_an_error_if_the_last_eval_loss_is_not_finite():
    noise = data_for(MLP, 0)

    def batches(split: str, step: int) -> Mapping[str, np.ndarray]:
        batch = dict(noise(split, step))
        return {**batch, "target": batch["target"] + math.nan} if split == "held_out" else batch

    seen = []
    with pytest.raises(NonFiniteLoss, match="the eval loss of step 1, the last one, is not finite"):
        for record in train(MLP, md.Plan(*mesh_and_layout(MLP, "data", None)), steps=1, batches=batches):
            seen.append(record["event"])
    assert seen == ["start", "step", "eval"]


def test_train_needs_a_random_key_for_each_step():
    with pytest.raises(md.MeshdslError, match=f"has keys for steps below {2**32}, got steps={2**32}"):
        next(train(tiny, md.Plan("all:1"), steps=2**32))


def test_train_checks_the_layout_first():
    records = train(MLP, md.Plan("all:8", "batch:all; hidden:all"), steps=1)
    with pytest.raises(md.LayoutError, match="cannot split dim 'hidden' over mesh axis 'all'"):
        next(records)


def test_data_for_errors():
    def inputs(config: Any) -> dict[str, Any]:
        return {"picture": md.spec("height:4 width:4", "int32")}

    with pytest.raises(md.MeshdslError, match=r"no data for mlp, whose inputs are picture: int32\[height=4 width=4\]"):
        data_for(dataclasses.replace(MLP, inputs=inputs), 0)
    with pytest.raises(md.MeshdslError, match="a vocabulary of 100, and text has 256 byte values"):
        data_for(LM.replace(vocab=100), 0)


def test_stages_work_without_devices():
    compiled, types = stages(LM.replace(batch=64), md.Plan("rows:64 cols:4", LM.layouts["data_model"][1]))
    assert compiled.program(*types).mesh.size == 256


def test_demo_prints_equal_curves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "SETTINGS", ["batch=8", "length=16", "d_model=32", "d_head=4", "d_ff=64"])
    monkeypatch.setattr(demo, "LAYOUTS", ("data", "data_model"))
    assert demo.main(["--steps", "3"]) == 0
    out = capsys.readouterr().out
    for shown in ("step      data  data_model  difference", "Eval loss, in bits per byte: data 7"):
        assert shown in out
    assert "all_reduce(sum) over cols" in out and "\x1b" not in out


def test_demo_fails_if_curves_differ(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    curves: Callable[..., Any] = lambda workload, name, steps: ([2.0, 1.0 + 1e-4 * (name == "model")], 1.0)  # noqa: E731
    monkeypatch.setattr(demo, "_train", curves)
    assert demo.main(["--steps", "2"]) == 1
    captured = capsys.readouterr()
    assert "the layouts disagree by 1.0e-04, more than float32 rounding" in captured.err
    assert "1.0e-04, at step 2" in captured.out
