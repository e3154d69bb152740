"""Attention under layouts: which collectives, how many bytes, and the same result as on one device."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.backend import Local, NumPy
from meshdsl.ir import walk
from meshdsl.models.transformer import lm
from meshdsl.ops.attention.turns import ATTENTION_TURN, chunk
from tests.ops.test_attention import OPTIONS, assert_close, random
from tests.stablehlo import cost_law

ROWS = "rows:4"


def attend(**options: Any) -> Any:
    def loss(*ins: md.Tensor) -> Any:
        return md.sum(md.square(md.attention(*ins, **options)))

    return md.value_and_grad(loss, (0, 1, 2))


def operands(length: int = 16, heads: int = 4, groups: str = "") -> list[md.Tensor]:
    dims = f"batch:2 length:{length} heads:{heads} head:4"
    return [random(0, f"{dims} {groups}"), random(1, dims), random(2, dims)]


def program(ins: list[md.Tensor], layout: str, mesh: str = ROWS, **options: Any) -> md.Program:
    return md.compile(attend(**options), mesh, layout).program(*ins)


def forward(ins: list[md.Tensor], layout: str, **options: Any) -> md.Program:
    return md.compile(lambda *ins: md.attention(*ins, **options), ROWS, layout).program(*ins)


def sent(found: md.Program) -> Counter[str]:
    """The collectives by kind, with their trips, without the loss's."""
    return sum((Counter({r.kind: r.count}) for r in found.collectives if r.shape), Counter[str]())


LAYOUTS = ("length:rows", "length:rows heads:cols", "length:rows,cols", "length:cols group:rows")
CASES = [
    pytest.param(name, layout, length, marks=[pytest.mark.slow] * ((i + j) % 4 > 0 or (i + length) % 2 == 0))
    for i, name in enumerate(OPTIONS)
    for j, layout in enumerate(LAYOUTS)
    for length in (7, 16)
]  # each option with one layout; the slow ones are the others


@pytest.mark.parametrize(("name", "layout", "length"), CASES)
def test_every_layout_gives_the_result_of_one_device(name: str, layout: str, length: int) -> None:
    """Value and gradients, simulated with NaN in the padding; ring and all_to_all."""
    draw, options = np.random.default_rng(7), dict(OPTIONS[name])
    ins = operands(length, heads=8, groups="group:2")
    if options.pop("bias", False):
        options["bias"] = random(3, f"heads:8 memory:{length}")
    if options.pop("mask", False):
        mask = draw.random((2, length, length)) < 0.6
        mask[:, 2] = False
        options["mask"] = md.tensor(mask, "batch length memory")
    if options.pop("segments", False):
        options["segment_ids"] = md.tensor(draw.integers(0, 2, (2, length)), "batch length")
    wanted = md.simulate(md.compile(attend(method="plain", **options), "", "").program(*ins), *ins)
    for method in ("ring",) if layout == "length:rows,cols" else ("ring", "all_to_all"):
        found = program(ins, layout, "rows:4 cols:2", method=method, **options)
        assert_close(md.simulate(found, *ins), wanted)


@pytest.mark.parametrize("window", [None, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [14, pytest.param(10, marks=pytest.mark.slow)])
def test_a_ring_runs_as_simulated(window: int | None, length: int) -> None:
    """Also in zigzag order (14 positions are stored as 4 blocks of 4), with the collectives that the program states."""
    ins = operands(length)
    f = attend(method="ring", causal=True, window=window)
    step = md.compile(f, md.Mesh(ROWS).on(jax.devices()[:4]), "length:rows")
    ran = jax.tree.leaves(step(*ins))
    assert_close([x.numpy() for x in ran], md.simulate(step.program(*ins), *ins))
    assert cost_law(step.program(*ins), step.lower(*ins).as_text()) > 0


def test_ring_bytes_are_those_of_the_formula() -> None:
    """Forward: keys and values n - 1 times. Backward: the same, and their cotangents n times. No gather."""
    ins, n = operands(), 4
    block = ins[1].numpy().nbytes // n
    found = program(ins, "length:rows", method="ring")
    assert set(sent(found)) == {"permute"}
    wire = sum(r.wire_bytes * r.count for r in found.collectives if r.kind == "permute")
    assert wire == 2 * (n - 1) * block + 2 * (n - 1) * block + 2 * n * block
    balanced = sum(r.wire_bytes * r.count for r in forward(ins, "length:rows", method="ring", causal=True).collectives)
    assert balanced == 2 * (n - 1) * block + 4 * block


def test_a_window_sends_only_as_far_as_queries_see() -> None:
    """Blocks of 4 positions: a window of 5 needs one neighbour, one of 6 needs two."""
    for window, hops in ((1, 0), (4, 1), (5, 1), (6, 2), (100, 3)):
        found = forward(operands(), "length:rows", method="ring", causal=True, window=window)
        assert sent(found) == Counter({"permute": 2 * hops})


def test_all_to_all_sends_each_operand_once() -> None:
    ins, n = operands(), 4
    found = program(ins, "length:rows", method="all_to_all", causal=True)
    assert sent(found) == Counter({"all_to_all": 4 + 4})  # q, k, v and the result; its cotangent, and those of q, k, v
    assert all(r.wire_bytes == ins[0].numpy().nbytes // n * (n - 1) // n for r in found.collectives if r.shape)
    with pytest.raises(md.LayoutError, match="cannot split another dim over mesh axis 'rows' of 4 devices"):
        program(operands(heads=3), "length:rows", method="all_to_all")


def test_the_method_that_sends_less_is_chosen_and_printed() -> None:
    text = str(forward(operands(), "length:rows"))
    assert "'heads' is split instead of 'length' for attention" in text and "by a ring" in text
    assert "keys and values go around 'length'" in str(forward(operands(heads=3), "length:rows"))
    wide = operands(groups="group:8")  # the queries have eight times the bytes of keys
    assert set(sent(forward(wide, "length:rows"))) == {"permute"}
    assert set(sent(forward(operands(), "length:rows", method="gather"))) == {"all_gather"}


def test_other_splits_send_nothing() -> None:
    for layout in ("heads:rows", "batch:rows"):
        found = program(operands(heads=8), layout, "rows:2", causal=True)
        assert not sent(found)


def test_zigzag_gives_every_device_the_same_work() -> None:
    """Pairs of a query and a key that each device computes in a causal ring of n devices."""
    for n in (2, 3, 4, 8):
        half = 5

        def spans(device: int, n: int = n, half: int = half) -> Any:
            local = Local(NumPy, (), ())
            return np.concatenate([np.arange(half) + int(chunk(local, device, n, h)) * half for h in (0, 1)])

        work = [sum((spans(j)[None] <= spans(i)[:, None]).sum() for j in range(n)) for i in range(n)]
        assert sorted(np.concatenate([spans(i) for i in range(n)])) == list(range(2 * n * half))
        assert len(set(work)) == 1 and sum(work) == math.comb(2 * n * half + 1, 2)


def test_cost_counts_the_pairs_that_are_seen() -> None:
    """Half of the products under a causal mask in zigzag order; the last device's, without it; none of the scores."""
    ins = [md.spec("length:4096 heads:4 head:64")] * 3
    full = 2 * 2 * 4096 * 4096 / 4 * 4 * 64
    steps = {
        name: md.compile(lambda *ins, o=options: md.attention(*ins, method="ring", **o), ROWS, "length:rows")
        for name, options in {"all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 512}}.items()
    }
    flops = {name: step.cost(*ins, machine="tpu-v5e").to_dict()["flops"] for name, step in steps.items()}
    assert flops["all"] == pytest.approx(full, rel=0.01)
    assert flops["causal"] == pytest.approx(full / 2, rel=0.01)
    assert flops["window"] == pytest.approx(full / 8, rel=0.1)
    assert md.memory(steps["causal"].program(*ins)).peak < 4096 * 4096
    turns = [x for x in steps["all"].cost(*ins, machine="tpu-v5e").to_dict()["instructions"] if "turn" in x["op"]]
    assert turns and {x["kind"] for x in turns} == {"matmul"}


def test_a_program_has_one_turn_for_each_block() -> None:
    found = forward(operands(), "length:rows", method="ring")
    assert sum(trips for eqn, trips in walk(found) if eqn.op is ATTENTION_TURN) == 4


@pytest.mark.parametrize("method", ["ring", pytest.param("all_to_all", marks=pytest.mark.slow)])
def test_a_model_trains_with_split_positions(method: str) -> None:
    """Layers in a loop with rematerialisation, rotary positions and grouped queries; uneven length."""
    tiny = lm.replace(
        batch=2, length=7, vocab=5, layers=2, d_model=4, heads=2, d_head=2, d_ff=4, queries_per_key=2, remat=True,
        positions="rotary", param_dtype="float64", compute_dtype="float64", reduce_dtype="float64",
    )  # fmt: skip
    draw = np.random.default_rng(0)
    specs = jax.tree.leaves(tiny.specs())
    numbers = [draw.integers(0, 5, [d.size for d in s.dims]) if s.dtype.kind == "i" else
               draw.random([d.size for d in s.dims]) for s in specs]  # fmt: skip

    def run(workload: md.Workload, mesh: str, layout: str) -> Any:
        program = md.compile(workload.train_step(), mesh, layout).program(*workload.specs())
        return md.simulate(program, *[x.astype(v.dtype) for x, v in zip(numbers, program.ins, strict=True)]), program

    found, program = run(tiny.replace(attention=method), "rows:2 cols:2", "batch:rows; length:cols")
    assert_close(found, run(tiny, "", "")[0], 1e-9)
    kinds = {r.kind for r in program.collectives if "attention" in str(r.cause)}
    assert kinds == {"permute" if method == "ring" else "all_to_all"}


@pytest.mark.parametrize("name", ["plain", pytest.param("mask", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("layout", ["memory:rows", pytest.param("length:cols memory:rows", marks=pytest.mark.slow)])
def test_keys_split_over_other_axes_are_not_gathered(name: str, layout: str) -> None:
    """Devices send logarithms and results of their keys, and the cotangent of q; 7 keys are padded to 8."""
    draw, options = np.random.default_rng(7), dict(OPTIONS[name])
    q, k, v = (
        random(0, "batch:2 length:6 head:4"),
        random(1, "batch:2 memory:7 head:4"),
        random(2, "batch:2 memory:7 head:4"),
    )
    bias = [random(3, "length:6 memory:7")] if options.pop("bias", False) else []
    if options.pop("mask", False):
        mask = draw.random((2, 6, 7)) < 0.6
        mask[:, 2] = False
        options["mask"] = md.tensor(mask, "batch length memory")
    if options.pop("segments", False):
        options["segment_ids"] = md.tensor(draw.integers(0, 2, (2, 6)), "batch length")
        options["memory_segment_ids"] = md.tensor(draw.integers(0, 2, (2, 7)), "batch memory")

    def step(method: str) -> Any:
        def loss(*ins: md.Tensor) -> Any:
            more = {"bias": ins[3]} if len(ins) > 3 else {}
            return md.sum(md.square(md.attention(*ins[:3], **more, **options, method=method)))

        return md.value_and_grad(loss, range(3 + len(bias)))

    ins = [q, k, v, *bias]
    found = md.compile(step("auto"), "rows:4 cols:2", layout).program(*ins)
    assert_close(md.simulate(found, *ins), md.simulate(md.compile(step("plain"), "", "").program(*ins), *ins))
    assert not [r for r in found.collectives if r.kind == "all_gather" and r.name in ("k", "v")]


def test_a_query_reads_a_split_cache() -> None:
    """One query with an offset: the bytes do not depend on the length of the cache."""

    def step(q: md.Tensor, k: md.Tensor, v: md.Tensor, at: md.Tensor) -> md.Tensor:
        return md.attention(q, k, v, causal=True, offset=at, window=9)

    q, k, v = random(0, "heads:2 head:4"), random(1, "memory:14 heads:2 head:4"), random(2, "memory:14 heads:2 head:4")
    at = md.tensor(np.int32(10), "")
    compiled = md.compile(step, md.Mesh(ROWS).on(jax.devices()[:4]), "memory:rows")
    ran, program = compiled(q, k, v, at).numpy(), compiled.program(q, k, v, at)
    seen = slice(2, 11)
    s = np.einsum("hd,mhd->hm", q.numpy(), k.numpy()[seen]) / 2
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    assert_close([ran], [np.einsum("hm,mhd->hd", p, v.numpy()[seen])])
    assert_close(md.simulate(program, q, k, v, at), [ran])
    assert [(r.kind, r.bytes) for r in program.collectives] == [("all_gather", 64), ("all_reduce", 64)]
    assert cost_law(program, compiled.lower(q, k, v, at).as_text()) > 0
