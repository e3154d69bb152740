"""Kernels beyond the plain roofline: the host's launches, fused attention, padded tiles, combined collectives."""

from __future__ import annotations

import dataclasses

import pytest

import meshdsl as md
from meshdsl.cost.attention import PLAIN
from meshdsl.cost.ledger import ledger
from meshdsl.cost.network import Network, NetworkTier
from meshdsl.cost.roofline import roofline
from meshdsl.cost.timeline import Timeline, timeline
from meshdsl.models.transformer import lm
from tests.cost.test_timeline import PRODUCTS_ONLY, US, checked

LM = lm.replace(batch=2, length=64, vocab=16, layers=2, d_model=8, heads=2, d_head=4, d_ff=16, remat=True)


def of_lm(machine: md.Machine, mesh: str = "x:1", layout: str = "") -> Timeline:
    return checked(timeline(ledger(md.compile(LM.train_step(), mesh, layout).program(*LM.specs())), machine))


def test_a_host_that_launches_each_operation_bounds_a_kernel_from_below() -> None:
    program = md.compile(lambda x: md.exp(md.tanh(x) * 2), "x:1").program(md.spec("a:64"))
    account = ledger(program)
    operations = sum(line.kind != "move" for line in account.lines)
    slow_host = dataclasses.replace(PRODUCTS_ONLY, operation=3 * US)
    found = checked(timeline(account, slow_host))
    assert operations == 3 and found.seconds == pytest.approx(9 * US) and found.regime == "launch"
    busy = dataclasses.replace(slow_host, vector=1e6)  # the device needs longer than the host
    assert checked(timeline(account, busy)).seconds == pytest.approx(3 * 64 * US)
    assert checked(timeline(account, busy)).regime == "compute"


def test_fused_attention_stores_no_scores() -> None:
    slow = dataclasses.replace(PRODUCTS_ONLY, hbm_bandwidth=1e9)
    plain, fused = of_lm(slow), of_lm(dataclasses.replace(slow, attention=1.0))
    scores = sum(line.score_bytes * line.trips for line in plain.ledger.lines)
    whole = 2 * 2 * 64 * 64 * 4  # float32[batch, heads, length, memory]
    assert scores > 10 * LM.config.layers * whole  # forward, recomputed and backward, read and written
    assert fused.seconds < plain.seconds
    half = of_lm(dataclasses.replace(PRODUCTS_ONLY, attention=PLAIN / 2))  # twice the time
    kernels = {line.step for line in plain.ledger.lines if line.score_bytes}
    inside = [line for line in plain.ledger.lines if line.matmul and line.step in kernels]
    assert {line.matmul.batch for line in inside if line.matmul} == {4}  # batch and heads
    more = sum(line.flops * line.trips for line in inside) * US
    assert half.seconds - of_lm(PRODUCTS_ONLY).seconds == pytest.approx(more, rel=1e-6)


def test_attention_as_one_operation_is_a_product() -> None:
    q = md.spec("heads:2 length:128 head:16")
    program = md.compile(lambda q, k, v: md.attention(q, k, v), "x:1").program(q, q, q)
    (line,) = [line for line in ledger(program).lines if line.flops]
    assert (line.kind, line.op, line.matmul, line.flops) == ("matmul", "attention", None, 2 * 2 * 2 * 128 * 128 * 16)
    for attention, expected in ((0.0, line.flops), (0.5, 2 * line.flops)):
        machine = dataclasses.replace(PRODUCTS_ONLY, device="chip", fused_attention=attention)
        found = checked(timeline(ledger(program), machine))
        assert found.seconds == pytest.approx(expected * US) and found.lower_bound == pytest.approx(line.flops * US)


def test_experts_are_no_attention() -> None:
    def experts(x, w, v):
        hidden = md.gelu(md.einsum(x, w, out="expert slot hidden"))
        return md.einsum(hidden, v, out="expert slot io")

    args = md.spec("expert:4 slot:64 io:8"), md.spec("expert:4 io:8 hidden:64"), md.spec("expert:4 hidden:64 io:8")
    assert not any(line.score_bytes for line in ledger(md.compile(experts, "x:1").program(*args)).lines)


def test_sizes_are_padded_to_the_tile() -> None:
    program = md.compile(lambda x, w: md.dot(x, w, "io"), "x:1").program(md.spec("a:8 io:24"), md.spec("io:24 b:40"))
    padded = checked(timeline(ledger(program), dataclasses.replace(PRODUCTS_ONLY, tile=32)))
    assert padded.seconds == pytest.approx(2 * 8 * 32 * 64 * US)
    assert padded.lower_bound == pytest.approx(2 * 8 * 24 * 40 * US)


def test_products_of_empty_dims_take_no_time() -> None:
    program = md.compile(lambda x, w: md.dot(x, w, "io"), "x:1").program(md.spec("a:0 io:24"), md.spec("io:24 b:40"))
    assert checked(timeline(ledger(program), dataclasses.replace(PRODUCTS_ONLY, tile=32))).seconds < 1e-20


LATENT = Network((NetworkTier("switch", {"x": 64}, bandwidth=1e9),), launch=1.0)


@pytest.mark.parametrize("combine", [0.0, 200.0, 1e9])
def test_independent_collectives_share_a_launch_up_to_the_limit(combine: float) -> None:
    args = [md.spec("batch:8 io:16") for _ in range(4)]  # 64 bytes each, once summed

    def independent(*xs):
        return [md.sum(x, "batch") for x in xs]

    def chain(*xs):
        total = xs[0]
        for x in xs:
            total = x * md.sum(total, "batch")
        return total

    on = dataclasses.replace(PRODUCTS_ONLY, network=dataclasses.replace(LATENT, combine={"all_reduce": combine}))
    launches = {0.0: 4, 200.0: 2, 1e9: 1}[combine]  # three of 64 bytes are at most 200
    for f, expected in ((independent, launches), (chain, 4)):
        program = md.compile(f, "x:4", "batch:x").program(*args)
        assert [record.kind for record in program.collectives] == ["all_reduce"] * 4
        found = checked(timeline(ledger(program), on))
        assert found.communication == pytest.approx(expected, abs=1e-3), f.__name__


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_casts_of_a_reduction_change_neither_launches_nor_scores(dtype: str):
    def attend(q: md.Tensor, k: md.Tensor) -> md.Tensor:
        return md.softmax(md.einsum(q, k, out="batch query key"), "key")

    specs = md.spec("batch:8 query:64 head:4", dtype), md.spec("batch:8 key:64 head:4", dtype)
    report = md.compile(attend, "").cost(*specs, machine="a100-dgx:eager,triton")
    assert sum(line.score_bytes > 0 for line in report.ledger.lines) >= 3
    summed = md.compile(lambda x: md.sum(x, "io"), "").cost(md.spec("batch:8 io:64", dtype), machine="a100-dgx:eager")
    (step,) = {line.step for line in summed.ledger.lines}
    assert roofline(summed.ledger.of(step), summed.machine).host == summed.machine.operation
