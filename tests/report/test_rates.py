"""Rates: model utilisation counts the model's products once, and budgets follow from seconds and devices."""

from __future__ import annotations

import dataclasses

import pytest

import meshdsl as md
from meshdsl.cost.report.rates import Rates, work_of
from meshdsl.models import mlp, transformer
from meshdsl.tools.commands.costing import amount, work

LM = transformer.lm.replace(layers=2, length=32, d_model=32, heads=2, d_head=16, d_ff=64)


def report_under(plan: md.Plan, workload: md.Workload = LM):
    step = md.compile(workload.train_step(), plan=plan, donate=(0, 1))
    found = work(workload, step, workload.specs())
    return dataclasses.replace(step.cost(*workload.specs(), machine="tpu-v5e"), work=found)


def test_work_counts_the_products_of_a_step():
    config = mlp.mlp.config
    step = md.compile(mlp.mlp.train_step(), "all:1")
    found = work_of(step.graph(*mlp.mlp.specs()), mlp.mlp.inputs(config))
    each = (
        2 * config.batch * config.io * config.hidden
    )  # two products forward; three backward, as no input has gradients
    assert found.flops == {"float32": 5 * each} and (found.amount, found.unit) == (config.batch, "samples")


def test_rematerialisation_and_microbatches_change_hardware_utilisation_only():
    plain, full = report_under(md.Plan("all:1")), report_under(md.Plan("all:1", remat="full", microbatches=2))
    assert plain.work == full.work and plain.work is not None and plain.work.unit == "tokens"
    assert plain.rates is not None and full.rates is not None
    assert plain.rates.mfu == pytest.approx(plain.rates.hardware, rel=1e-6)
    assert full.rates.hardware > 1.1 * full.rates.mfu
    assert full.rates.mfu * full.seconds == pytest.approx(plain.rates.mfu * plain.seconds)
    assert "MFU" in str(full) and full.to_dict()["rates"]["unit"] == "tokens"


def test_replicated_work_is_no_model_work():
    one, eight = report_under(md.Plan("all:1")), report_under(md.Plan("all:8"))
    assert one.rates is not None and eight.rates is not None
    assert eight.rates.mfu == pytest.approx(one.rates.mfu / 8) and eight.rates.hardware == one.rates.hardware


def test_budget_is_time_and_money_on_all_devices():
    budget = Rates(2.0, 4, 1000, "tokens", 0.5, 0.5).budget(7.2e6, price=3.0)
    assert (budget.seconds, budget.device_hours, budget.money) == (14_400.0, 16.0, 48.0)


@pytest.mark.parametrize(("text", "value"), [("300e9", 300e9), ("300G", 300e9), ("1.4T", 1.4e12), ("2k", 2000.0)])
def test_amounts_are_read(text: str, value: float):
    assert amount(text) == value
