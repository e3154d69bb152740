"""A layer with exchange="ragged" gives, bit for bit, what it gives when every slot is sent; it sends less."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.nn import moe
from tests.nn.moe_reference import simulated
from tests.nn.test_moe_layer import X, inputs, layer, sent, value_and_grads

MESHES = {
    "experts on the data axis": ("rows:4", "batch:rows expert:rows"),
    "more experts than devices": ("rows:2", "batch:rows expert:rows"),
    "hidden split": ("rows:2 cols:2", "batch:rows expert:rows expert_hidden:cols"),
    "two axes": ("rows:2 cols:2", "batch:cols,rows expert:rows expert_batch:cols"),
    "tokens split": ("rows:2 cols:2", "batch:rows length:cols expert:rows,cols"),
    "slots split": ("rows:2 cols:2", "batch:rows expert:rows slot:cols"),
}
# gshard leaves holes where a second choice is refused; of eight experts some are empty, and no two groups are alike
CASES = [
    ("gshard", 4, "index", "experts on the data axis"),
    ("gshard", 4, "einsum", "tokens split"),
    ("gshard", 4, "index", "slots split"),
    ("switch", 8, "index", "more experts than devices"),
    ("switch", 8, "einsum", "two axes"),
    ("tutel_prioritised", 4, "index", "hidden split"),
    ("expert_choice", 4, "index", "two axes"),
]


@pytest.mark.parametrize(("router", "experts", "method", "layout"), CASES)
def test_ragged_exchange_equals_padded_bitwise(router: str, experts: int, method: str, layout: str) -> None:
    options = {"router": router, "dispatch": method, "expert": md.Dim("expert", experts), "capacity_factor": 2.0}
    padded, ragged = (layer(exchange=exchange, **options) for exchange in ("padded", "ragged"))
    key, (mesh, split) = md.random.key(3), MESHES[layout]
    params, x = inputs(padded, key)
    want, got = (simulated(value_and_grads(m), params, x, key, mesh=mesh, layout=split) for m in (padded, ragged))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))
    arguments = [*jax.tree.leaves((params, x, key))]
    program = md.compile(value_and_grads(ragged), mesh, split).program(params, x, key)
    assert len(arguments) == len(program.ins)
    kinds = [c.kind for c in program.collectives]
    assert kinds.count("ragged_all_to_all") == 4 and kinds.count("all_to_all") in (1, 2)  # of counts


@pytest.mark.parametrize("layout", ["batch:rows expert_batch:rows", "expert_hidden:rows", ""])
def test_ragged_without_exchange_keeps_the_program(layout: str) -> None:
    def text(exchange: str) -> str:
        model = layer(dispatch="index", exchange=exchange)
        return str(md.compile(value_and_grads(model), "rows:4", layout).program(model.specs(md.spec(X)), md.spec(X)))

    assert text("ragged") == text("padded")


@pytest.mark.parametrize("remat", [True, "collectives"])
def test_ragged_exchange_under_scan_and_checkpoint(remat: Any) -> None:
    def stack(exchange: str) -> md.Model:
        def block(carry: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
            x, total = carry
            y, aux = md.nn.moe_layer(
                x,
                md.Dim("expert", 4),
                md.Dim("expert_hidden", 6),
                exchange=exchange,
                precision=md.nn.Precision("float64", "float64", "float64"),
            )
            return x + y, total + aux

        zero = md.tensor(np.float64(0))
        return md.model(lambda x: md.layers(block, (x, zero), over=md.Dim("layer", 3), remat=remat))

    params, x = inputs(stack("padded"))
    where = {"mesh": "rows:4", "layout": "batch:rows expert:rows"}
    want, got = (simulated(value_and_grads(stack(exchange)), params, x, **where) for exchange in ("padded", "ragged"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    model = stack("ragged")
    program = md.compile(value_and_grads(model), "rows:4", "batch:rows expert:rows").program(params, x)
    exchanges = [c.count for c in program.collectives if c.kind == "ragged_all_to_all"]
    assert exchanges == [3] * (6 if remat is True else 4)


def test_ragged_exchange_reports_maximum_and_expected_bytes() -> None:
    options = {"precision": md.nn.Precision(compute="bfloat16"), "dispatch": "index", "expert": md.Dim("expert", 8)}
    x = "batch:8 length:64 model:16"
    exchanges = {
        exchange: sent(layer(exchange=exchange, **options, router="gshard"), "rows:8", "batch:rows expert:rows", x)
        for exchange in ("padded", "ragged")
    }
    padded = [c for c in exchanges["padded"] if c.kind == "all_to_all"]
    ragged = [c for c in exchanges["ragged"] if c.kind == "ragged_all_to_all"]
    counts = [c for c in exchanges["ragged"] if c.kind == "all_to_all"]
    assert [c.bytes for c in ragged] == [c.bytes for c in padded] == [8 * 32 * 16 * 2] * 4
    assert [str(c.dtype) for c in ragged] == ["bfloat16"] * 4
    assert {c.op.share for c in ragged} == {2 * 64 / (8 * 32)}  # of two choices of 64 tokens in 8 x 32 slots
    assert [(str(c.dtype), c.bytes) for c in counts] == [("int32", 8 * 4)]


def test_ragged_exchange_time_uses_expected_slots() -> None:
    x = md.spec("batch:8 length:1024 model:512")

    def exposed(exchange: str, factor: float) -> float:
        model = layer(
            md.nn.Precision(), md.Dim("expert", 8), router="gshard", exchange=exchange, capacity_factor=factor
        )
        report = md.compile(value_and_grads(model), "rows:8", "batch:rows expert:rows").cost(model.specs(x), x)
        return sum(
            c.seconds for c in report.collectives if c.kind == ("all_to_all", "ragged_all_to_all")[exchange == "ragged"]
        )

    assert exposed("ragged", 1.0) == pytest.approx(exposed("padded", 1.0))
    assert exposed("ragged", 2.0) == pytest.approx(exposed("padded", 1.0))  # twice the slots, as many filled


def test_ragged_exchange_counts_end_at_the_last_filled_slot() -> None:
    random = np.random.default_rng(0)
    gates, coins = random.random((4, 16, 8)), random.random((4, 16))
    gates /= gates.sum(-1, keepdims=True)
    holes = False
    for router in ("gshard_paper", "top2", "switch", "batch_prioritised", "expert_choice"):

        def routed(gates: md.Tensor, coins: md.Tensor, router: str = router) -> Any:
            uniforms = {"uniforms": coins} if router in ("gshard_paper", "top2") else {}
            slot = md.Dim("slot", 8)
            found = moe.route(gates, tokens="token", experts="expert", capacity=slot, router=router, **uniforms)
            return found.dispatch, found.used

        dispatch, used = simulated(routed, md.tensor(gates, "group token expert"), md.tensor(coins, "group token"))
        taken = dispatch.any(1)  # [group, expert, slot]
        last = np.where(taken.any(-1), 8 - taken[..., ::-1].argmax(-1), 0)
        assert (used >= last).all() and (router == "gshard_paper" or (used == last).all())
        holes |= bool((taken.sum(-1) < last).any())
    assert holes
