"""The ledger of a program lists the collectives of its StableHLO, one by one."""

from __future__ import annotations

import dataclasses

import pytest

import meshdsl as md
from meshdsl.cost.ledger import ledger
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm
from meshdsl.tools.compilers.stablehlo import read
from tests.lowering.programs import draw
from tests.stablehlo import cost_law

MLP = mlp.replace(batch=10, io=8, hidden=12)  # a batch that no mesh here divides
LM = lm.replace(batch=4, length=8, vocab=18, layers=3, d_model=8, heads=4, d_head=2, d_ff=8)
VARIANTS = {
    "remat": LM.replace(remat=True),
    "rotary": LM.replace(positions="rotary", norm="rms", gated=True, tied=True, queries_per_key=2, label_smoothing=0.1),
    "bfloat16": LM.replace(compute_dtype="bfloat16", clip_norm=1.0, z_loss=1e-3),
}
STEPS = [(w, name) for w in (MLP, LM) for name in w.layouts] + [(w, "sequence") for w in VARIANTS.values()]
LARGE = {
    "data": ("data:64 model:32", "batch:data"),
    "data_model": ("data:64 model:32", "batch:data; hidden:model"),
    "both": ("data:64 model:32", "batch:data,model"),
    "three": ("data:16 model:8 extra:16", "batch:data; hidden:model; io:extra"),
}


@pytest.mark.parametrize(("workload", "name"), STEPS, ids=lambda x: getattr(x, "name", x))
def test_a_train_step_emits_the_collectives_it_states(workload: md.Workload, name: str) -> None:
    step = md.compile(workload.train_step(), *workload.layouts[name])
    specs = workload.specs()
    sent = cost_law(step.program(*specs), step.lower(*specs).as_text())
    assert (sent > 0) == (name != "empty")


@pytest.mark.parametrize("name", LARGE)
def test_a_mesh_without_devices_emits_them_too(name: str) -> None:
    workload = mlp.replace(batch=4096, io=64, hidden=128)
    step = md.compile(workload.train_step(), *LARGE[name])
    specs = workload.specs()
    assert cost_law(step.program(*specs), step.lower(*specs).as_text()) > 0


def test_the_language_model_on_2048_devices() -> None:
    workload = lm.replace(batch=64, length=8, vocab=64, layers=3, d_model=8, heads=32, d_head=2, d_ff=64)
    step = md.compile(workload.train_step(), "rows:64 cols:32", workload.layouts["sequence"][1])
    specs = workload.specs()
    assert cost_law(step.program(*specs), step.lower(*specs).as_text()) > 30


def test_a_loop_of_unknown_trips_states_one_trip() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        def twice(x: md.Tensor, _: md.Tensor) -> tuple[md.Tensor, None]:
            return md.cumsum(x, "a"), None

        def body(x: md.Tensor) -> md.Tensor:
            return md.scan(twice, x / (1 + md.max(md.abs(x), "a")), None, over=md.Dim("t", 3))[0]

        return md.sum(md.while_loop(lambda x: md.sum(x) > 0.1, body, x))

    step = md.compile(f, "rows:4", "a:rows")
    program = step.program(md.spec("a:12"))
    found = [(c.kind, c.count, c.unbounded) for c in program.collectives]
    assert found == [
        ("all_reduce", 1, True),  # of the predicate
        ("all_reduce", 1, True),
        ("all_gather", 3, True),
        ("all_reduce", 1, False),
    ]
    assert "each trip" in str(program.collectives[0])
    assert cost_law(program, step.lower(md.spec("a:12")).as_text()) == 6


def test_random_programs_emit_what_they_state(capsys: pytest.CaptureFixture[str]) -> None:
    sent = cases = 0
    for seed in range(5000, 5020):
        case = draw(seed)
        step, args = case.compiled()
        try:
            program = step.program(*args)
        except md.LayoutError:
            continue
        sent += cost_law(program, step.lower(*args).as_text())
        cases += 1
    with capsys.disabled():
        print(f"cost_law: {cases} random programs, {sent} collectives")
    assert cases >= 15


def test_the_reader_counts_the_trips_of_loops_and_what_they_call() -> None:
    text = """
module @jit_f {
  func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0:2 = stablehlo.while(%iterArg = %arg0, %iterArg_0 = %c) : tensor<2xf32>, tensor<i32>
    cond {
      %c_1 = stablehlo.constant dense<5> : tensor<i32>
      %1 = stablehlo.compare  LT, %iterArg_0, %c_1,  SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %1 = func.call @inner(%iterArg) : (tensor<2xf32>) -> tensor<2xf32>
      %2 = func.call @inner(%1) : (tensor<2xf32>) -> tensor<2xf32>
      stablehlo.return %2, %iterArg_0 : tensor<2xf32>, tensor<i32>
    }
    return %0#0 : tensor<2xf32>
  }
  func.func private @inner(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = "stablehlo.all_reduce"(%arg0) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
    ^bb0(%arg1: tensor<f32>, %arg2: tensor<f32>):
      %1 = stablehlo.maximum %arg1, %arg2 : tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }) : (tensor<2xf32>) -> tensor<2xf32>
    return %0 : tensor<2xf32>
  }
}
"""
    ((sent, times),) = read(text).items()
    assert (str(sent), times) == ("all_reduce max float32 8 bytes among (0, 1)", 10)
    pairs = tuple((2 * i, 2 * i + 1) for i in range(512))
    assert str(dataclasses.replace(sent, groups=pairs)).endswith("among (0, 1), (2, 3), ..., (1022, 1023)")
    assert str(dataclasses.replace(sent, groups=(tuple(range(2048)),))).endswith("among (0, 1, ..., 2047)")


@pytest.mark.parametrize("layout", ["h:x", "w:x", "batch:x"])
def test_a_window_longer_than_its_operand_sends_nothing(layout: str) -> None:
    """The result has no elements, so XLA removes what a halo would send."""

    def f(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.conv(x, w, window={"h": "kh", "w": "kw"}, out="batch h w co", padding="valid")

    specs = md.spec("batch:2 h:3 w:3 ci:2"), md.spec("kh:5 kw:2 ci:2 co:1")
    step = md.compile(f, "x:2", layout)
    program = step.program(*specs)
    assert cost_law(program, step.lower(*specs).as_text()) == len(program.collectives) == 0
    arrays = [md.random.normal(md.random.key(0), s.dims) for s in specs]
    assert md.simulate(program, *arrays)[0].shape == (2, 0, 2, 1)


@pytest.mark.parametrize(("argnums", "sent"), [((0,), 4), ((0, 1), 6), ((0, 1, 2), 8)])
def test_a_ring_sends_the_cotangents_that_are_read(argnums: tuple[int, ...], sent: int) -> None:
    def loss(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
        out = md.attention(q, k, v, over="d", length="n", method="ring")
        return md.sum(out * out)

    step = md.compile(md.grad(loss, argnums=argnums), "p:2", "n:p")
    specs = [md.spec("n:4 d:2")] * 3
    assert cost_law(step.program(*specs), step.lower(*specs).as_text())
    assert sum(record.count for record in step.program(*specs).collectives if record.kind == "permute") == sent


def test_an_update_in_place_moves_the_part_that_it_writes():
    def fill(x: md.Tensor) -> md.Tensor:
        def one(total: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, None]:
            new = md.broadcast(md.take(total, row, "own") + 1.0, "own:1 io:256")
            return md.dynamic_update_slice(total, new, "own", row), None

        return md.scan(one, x * 2.0, md.iota("trip:16"), over="trip")[0]

    lines = ledger(md.compile(fill, "", "").program(md.spec("own:64 io:256"))).lines
    inside = [line for line in lines if line.trips == 16]
    row = 256 * 4
    assert sum(line.hbm_bytes for line in inside) <= 3 * row + 64  # read, and written; of a stack of 64 rows


def test_a_branch_states_no_sums_that_nobody_reads() -> None:
    """JAX drops the operands that no branch reads, and the results that nothing reads, with all that they need."""

    def both(x: md.Tensor, y: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return md.sum(x, "a"), md.max(y, "a")

    def f(x: md.Tensor, y: md.Tensor) -> md.Tensor:
        unread = md.sum(x * y, "a")
        return md.cond(md.sum(x) > 0, lambda x, y, _: both(x, y), lambda x, y, _: both(y, x), x, y, unread)[0]

    step, types = md.compile(f, "rows:4", "a:rows"), (md.spec("a:8 b:3"), md.spec("a:8 b:3"))
    program = step.program(*types)
    cost_law(program, step.lower(*types).as_text())
    assert len(program.collectives) == 1 + 2
