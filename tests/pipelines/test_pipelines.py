"""Pipeline stages: the law over random models, the schedule, mutants, what is refused, and one reduction a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import meshdsl as md
from benchmarks import published_pipelines
from meshdsl.cost.ledger import ledger
from meshdsl.ir import walk
from meshdsl.models.deepseek import deepseek
from meshdsl.models.llama import llama
from meshdsl.models.mixtral import mixtral
from meshdsl.ops.contraction import EINSUM
from meshdsl.ops.creation import EMPTY
from meshdsl.overlap.modes import PLANS
from meshdsl.passes.pipelines import Schedule, one_tick, pipeline, stages
from meshdsl.passes.pipelines.one_tick import Pipe
from tests.pipelines.law import Case, compiled, draw, judge, paired_ticks, step_of

SMALL = llama.replace(batch=8, length=4, vocab=16, layers=4, d_model=8, d_ff=8, d_head=4, query_heads=2, heads=1)
CASE = Case(3, 5, 4, "", frozenset({"aux", "tied", "mask", "skip"}), True, False, "replicated", "none", False, False, 5)
STEM = dataclasses.replace(CASE, options=CASE.options | {"stem"})
CHUNKED = Case(2, 4, 4, "", frozenset({"tied"}), True, False, "replicated", "none", False, False, 5, 2)


@pytest.mark.parametrize("seed", range(40))
def test_a_step_in_stages_gives_the_results_of_one_device(seed: int):
    assert not judge(draw(seed), devices=seed % 10 == 0)


@pytest.mark.parametrize("seed", range(100, 104))
def test_ticks_with_one_loop_over_layers_give_the_results_of_one_device(seed: int):
    assert not judge(dataclasses.replace(draw(seed), overlap="paired"), devices=seed == 100)


@pytest.mark.parametrize("option", ["decay", "cast", "last", "merged"])
@pytest.mark.parametrize("case", [CASE, CHUNKED], ids=["one chunk", "two chunks"])
def test_the_layers_weights_are_computed_before_the_loop_over_them_and_read_beside_it(case: Case, option: str):
    assert not judge(dataclasses.replace(case, options=case.options | {option}))


def test_a_linear_function_of_a_gradient_is_computed_once_from_its_sum():
    step, w, x = model("linear")
    piped = md.compile(step, "stages:2 data:2", "layer:stages; batch:data").program(w, x)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=spec.shape).astype(spec.dtype) for spec in (w, x)]
    one = md.simulate(md.compile(step, "", "").program(w, x), *arrays)
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(md.simulate(piped, *arrays), one, strict=True))
    assert [eqn.scan for eqn in piped.eqns if "multiply" in str(eqn.op)] == [None]


def test_an_update_between_two_pipelines_is_sharded_over_the_dims_of_both():
    case = dataclasses.replace(CASE, stages=2, microbatches=4, axes="data:2", options=frozenset(), update="sharded")
    step, (params, data) = step_of(case)

    def twice(params: Any, data: Any) -> Any:
        small = {name: p % 3.0 - 1.0 for name, p in step(params, data)[1].items()}
        return step(small, data)

    program = compiled(case, twice, [params, data]).program(params, data)
    arrays = [x.numpy() for x in jax.tree.leaves([params, data])]
    got, wanted = (md.simulate(one, *arrays) for one in (program, md.compile(twice, "", "").program(params, data)))
    assert len(program.schedules) == 2 and all(map(np.array_equal, got, wanted))


def text_of(schedule: Schedule) -> list[list[str]]:
    """The units of each stage, read from the printed table."""
    return [[unit for unit in line.split()[2:] if unit != "-"] for line in str(schedule).splitlines()[1:]]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_unit_runs_once_and_in_time_and_no_live_slot_is_overwritten(stages: int, late: bool):
    cases = [(m, 1) for m in range(1 + late, 17)] + [(stages * n, v) for n in (1, 2, 3) for v in range(2, stages + 1)]
    for microbatches, chunks in cases:
        schedule, last = Schedule(stages, microbatches, chunks, late), stages * chunks - 1
        runs: list[dict[tuple[int, int], int]] = [{}, {}]  # block and micro-batch -> tick
        for t in range(schedule.ticks):
            for s in range(stages):
                for ran, unit in zip(runs, (schedule.forward(s, t), schedule.backward(s, t)), strict=True):
                    if unit is not None:
                        assert ran.setdefault((unit[1] * stages + s, unit[0]), t) == t
        forward, backward = runs
        units = {(q, i) for q in range(last + 1) for i in range(microbatches)}
        assert forward.keys() == units == backward.keys()
        for q, i in units:  # a message takes a tick, and arrives in the tick that reads it
            assert q == 0 or forward[q, i] == forward[q - 1, i] + 1
            assert backward[q, i] == (forward[q, i] + late if q == last else backward[q + 1, i] + 1)
            s = q % stages
            number = backward[q, i] - schedule.delay + 2 * q - s  # as `one_tick` reads it
            assert number == forward[q, i] - s and schedule.unit(number) == (i, q // stages)
            assert 0 <= schedule.slot(number) < schedule.slots
            later = range(forward[q, i] + 1, backward[q, i] + 1)  # every stage writes in every tick, in bubbles too
            assert schedule.slot(number) not in {schedule.slot(t - s) for t in later}
        both = range(schedule.warm, schedule.warm + schedule.both)
        assert max(forward.values()) == both[-1] and min(backward.values()) == both[0]
        printed = Counter(unit for line in text_of(schedule) for unit in line)
        each = {schedule.name(kind, (i, c)) for kind in "FB" for i in range(microbatches) for c in range(chunks)}
        assert printed == Counter(dict.fromkeys(each, stages))
        busy = sum(len(line) for line in text_of(schedule)) / (2 * stages * (microbatches * chunks + stages - 1))
        assert busy == pytest.approx(1 - schedule.bubble)


@pytest.mark.parametrize(
    ("option", "microbatches", "overlap"),
    [("stem", 8, "none"), ("stem", 5, "paired"), ("encoder", 10, "none")],
)
def test_products_before_the_layers_run_on_each_stage_for_its_share_of_the_micro_batches(
    option: str, microbatches: int, overlap: str
):
    case = dataclasses.replace(CASE, stages=4, layers=4, microbatches=microbatches, overlap=overlap)
    cases = case, dataclasses.replace(case, options=case.options | {option})
    assert not judge(cases[1])
    programs = [compiled(each, *step_of(each)).program(*step_of(each)[1]) for each in cases]
    products = [sum(count for eqn, count in walk(one) if eqn.op is EINSUM) for one in programs]
    shares = -(-microbatches // 4)
    backward = 1 + (4 if option == "stem" else 3)  # one of the two products again; no gradient of the data
    assert products[1] - products[0] == pytest.approx(shares * (2 + backward))


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_chunks_move_each_weight_of_the_layers_once_a_step_and_its_gradient_back(update: str):
    work = SMALL.replace(layers=8)
    plan = md.Plan("stages:4 data:2", "layer:stages; batch:data", weight_update=update, microbatches=4, chunks=2)
    assert md.Plan.from_toml(plan.to_toml()) == plan and "chunks of a stage  2" in str(plan)
    step = md.compile(work.train_step(), plan=plan)
    program = step.program(*work.specs())
    assert step.plan == plan
    over_stages = [record for record in program.collectives if record.axes == ("stages",)]
    layers = [spec for name, spec in work.specs()[0].items() if name.startswith("layer/")]
    once = [record for record in over_stages if record.count == 1]
    assert len(once) == 2 * 2 * len(layers)  # two messages each way: a stage has two blocks
    weights = sum(math.prod(d.size for d in spec.dims) * spec.dtype.itemsize for spec in layers)
    back = 2 if update == "sharded" else 1  # gradients that are shared out over the other axis
    assert sum(record.wire_bytes for record in once) == weights // 4 + weights // 4 // back
    warm, both = program.schedules[0].warm, program.schedules[0].both
    assert Counter((r.kind, r.count) for r in over_stages if r.count > 1) == {
        ("permute", warm): 2,
        ("permute", both): 2,
    }


@pytest.mark.parametrize(("changes", "problem"), [
    ({"layout": ""}, "chunks=2 has no effect"),
    ({"microbatches": 3}, "a multiple of 2 micro-batches"),
    ({"chunks": 3}, "4 layers in 2 stages take chunks=2 at most, not 3\n  give at most chunks=2"),
    ({"chunks": 0}, "1 block of layers or more"),
    ({"layout": "layer:stage"}, "axis 'stage', which the mesh 'stages:2' lacks; did you mean 'stages'"),
    ({"layout": "layer:stages; drain:stages"}, "dim 'drain', which the program lacks; there are: batch"),
])  # fmt: skip
def test_chunks_that_cannot_be_are_refused(changes: dict[str, Any], problem: str):
    work = SMALL.replace(batch=6)
    plan = {"mesh": "stages:2", "layout": "layer:stages", "microbatches": 2, "chunks": 2}
    with pytest.raises(md.LayoutError, match=problem):
        md.compile(work.train_step(), plan=md.Plan(**{**plan, **changes})).program(*work.specs())


def test_the_picture_the_text_and_the_timeline_of_a_program_name_its_ticks():
    plan = md.Plan("stages:4", "layer:stages", microbatches=8)
    compiled = md.compile(SMALL.train_step(), plan=plan)
    program = compiled.program(*SMALL.specs())
    (schedule,) = program.schedules
    loops = ["ticks 0 to 2: forward", "ticks 3 to 10: forward and backward", "ticks 11 to 13: backward"]
    assert [line.rpartition("  ")[2] for line in str(program).splitlines() if "  tick" in line] == loops
    events = compiled.cost(*SMALL.specs()).timeline.events
    assert [event.ticks for event in events if event.ticks] == loops
    assert [event.name for event in events if event.name in loops] == loops
    assert [getattr(event.step, "trips", 0) for event in events if event.ticks] == [3, 8, 3]
    drawn = [
        "".join(each.itertext()) for each in ET.fromstring(md.show(program).svg).iter() if each.tag.endswith("text")
    ]
    assert [words for words in drawn if words in loops] == loops
    assert Counter(x for x in drawn if x[:1] in "FB" and x[1:].isdigit()) == Counter(
        unit for line in text_of(schedule) for unit in line
    )
    assert any("bubble 3 of 11 ticks, 27 %" in words for words in drawn)
    large = md.show(program.replace(schedules=(Schedule(64, 512),))).svg
    assert len(large) < 300_000 and "stage 63" in large


REAL_TAKE = stages.take
REAL = {name: getattr(one_tick, name) for name in ("shift",)}
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "no message": (one_tick, "shift", lambda x, dim, by: x),
    "a message twice": (one_tick, "shift", lambda x, dim, by: REAL["shift"](x, dim, 2 * by)),
    "a slot late": (stages, "_with_row", lambda f: lambda ring, row, number: f(ring, row, number + 1)),
    "a layer late": (stages, "_at", lambda f: lambda ring, number: f(ring, number - 1)),
    "a chunk late": (
        one_tick.Pipe,
        "unit",
        lambda f: lambda self, number: (f(self, number)[0], 1 - f(self, number)[1]),
    ),
    "a mask early": (Pipe, "_real", lambda f: lambda self, number: f(self, number + 1)),
    "a mask late": (Pipe, "_real", lambda f: lambda self, number: f(self, number - 1)),
    "a share late": (Pipe, "_entering", lambda f: lambda self, number: f(self, number - 1)),
    "a share of gradients late": (Pipe, "_after_rows", lambda f: lambda self, number, xs: f(self, number - 1, xs)),
    "a page late": (Schedule, "slot", lambda f: lambda self, number: f(self, number % 4)),
    "a row late": (Pipe, "row", lambda f: lambda self, number: f(self, number - 1)),
}


def test_a_ring_without_a_slot_for_the_late_loss_is_noticed():
    case = dataclasses.replace(CASE, overlap="paired")
    assert compiled(case, *step_of(case)).overlap.chosen == "one loop for both passes" and not judge(case)
    with mock.patch.object(Schedule, "slots", property(lambda self: self.delay)):
        assert "differs" in judge(case)


def test_layers_of_the_wrong_end_in_a_tick_with_one_loop_are_noticed():
    with mock.patch.object(stages, "take", lambda x, number, dim: REAL_TAKE(x, dim.size - 1 - number, dim)):
        assert "differs" in judge(dataclasses.replace(CASE, overlap="paired"))


LLAMA = llama.replace(
    batch=8, length=512, vocab=2048, layers=4, d_model=1024, d_ff=4096, query_heads=8, heads=8, d_head=128
)
TENSOR = {"mesh": "stages:2 cols:2", "layout": "layer:stages; d_ff:cols; heads:cols", "microbatches": 4}


@pytest.mark.parametrize("remat", ["full", "none"])
def test_in_ticks_with_one_loop_most_communication_is_hidden(remat: str):
    """The same collectives and, beside the fourth slot of the ring, hardly more memory."""
    plain = md.compile(LLAMA.train_step(), plan=md.Plan(**TENSOR, remat=remat)).program(*LLAMA.specs())
    step = md.compile(LLAMA.train_step(), plan=md.Plan(**TENSOR, remat=remat, overlap="ticks", machine="h100"))
    with mock.patch.dict(PLANS, ticks=paired_ticks):
        program = step.program(*LLAMA.specs())
    before, after = step.overlap.before, step.overlap.after
    assert after.exposed < 0.3 * before.exposed and after.seconds < before.seconds
    assert after.peak_bytes < (1.1 if remat == "full" else 1.2) * before.peak_bytes

    def sent(one: Any) -> Counter[str]:
        total = Counter[str]()
        for record in one.collectives:
            total[str(record.op)] += record.count * record.wire_bytes
        return total

    assert sent(program) == sent(plain)
    (steady,) = [eqn.scan for eqn in program.eqns if eqn.scan is not None and eqn.scan.dim.name == "steady"]
    assert len([eqn for eqn in steady.body.eqns if eqn.scan is not None]) == 1 and program.schedules[0].late


def test_auto_keeps_the_ticks_of_a_pipeline():
    step = md.compile(LLAMA.train_step(), plan=md.Plan(**TENSOR, overlap="auto", machine="h100"))
    scans = [eqn.scan.dim.name for eqn in step.program(*LLAMA.specs()).eqns if eqn.scan is not None]
    assert {"fill", "steady", "drain"} <= set(scans)
    paired, *in_parts = [one.name for one in step.overlap.attempts][2:]
    assert paired == "one loop for both passes"
    assert in_parts == [f"{paired}, the others in 2 parts of {dim}" for dim in ("batch", "length")]


def test_in_ticks_with_a_loop_for_each_pass_messages_run_beside_the_other_pass():
    plan = md.Plan("stages:4", "layer:stages", microbatches=8, overlap="ticks", machine="h100:eager")
    step = md.compile(LLAMA.train_step(), plan=plan)
    step.program(*LLAMA.specs())
    assert step.overlap.chosen == "a loop for each pass" and not step.pipelines(*LLAMA.specs())[0].late
    assert step.overlap.after.exposed < 0.2 * step.overlap.before.exposed  # what is left is not in steady ticks


def test_exchanges_in_ticks_of_one_pass_hide_behind_another_part():
    model = deepseek.replace(
        batch=256, length=4096, vocab=1024, layers=5, d_model=4096, heads=8, d_head=128, d_expert=2048, experts=32,
        chosen=4, capacity_factor=1.0, compute_dtype="bfloat16",
    )  # fmt: skip
    where = {"mesh": "stages:2 rows:32", "layout": "layer:stages; batch:rows; expert:rows", "microbatches": 4}

    overlap = md.Overlap("ticks", dim="batch")
    found = md.compile(model.train_step(), plan=md.Plan(**where, machine="h100:flash", overlap=overlap))
    found.program(*model.specs())
    paired, in_parts = found.overlap.attempts[-2:]
    assert found.overlap.chosen == f"{paired.name}, the others in 2 parts of batch" == in_parts.name
    assert in_parts.exposed < 0.7 * paired.exposed


def test_ticks_in_parts_of_a_dim_that_no_loop_has_are_refused():
    plan = md.Plan(**TENSOR, machine="h100", overlap=md.Overlap("ticks", dim="vocab"))
    with pytest.raises(md.NoEffectError, match=r"(?s)dim and parts have no effect with overlap='ticks'.*'vocab'"):
        md.compile(LLAMA.train_step(), plan=plan).program(*LLAMA.specs())


def test_ticks_without_a_pipeline_are_refused():
    changes: list[dict[str, Any]] = [{"layout": "batch:stages"}, {"microbatches": 1}]
    for plan in changes:
        with pytest.raises(md.LayoutError, match="overlap='ticks' has no effect"):
            md.compile(LLAMA.train_step(), plan=md.Plan(**{**TENSOR, **plan}, overlap="ticks", machine="h100")).program(
                *LLAMA.specs()
            )


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str):
    owner, attribute, change = MUTANTS[name]
    changed = change if attribute == "shift" else change(getattr(owner, attribute))
    with mock.patch.object(owner, attribute, changed):
        assert "differs" in judge(CHUNKED if name in ("a chunk late", "a page late") else STEM)


@pytest.mark.parametrize(("tied", "mesh", "layout"), [
    (False, "stages:2 data:2", "layer:stages; batch:data"),
    (True, "stages:4 data:2", "layer:stages; batch:data; vocab:stages"),
])  # fmt: skip
def test_a_weight_is_reduced_once_a_step(tied: bool, mesh: str, layout: str):
    """The sums of the steady ticks stay pending in the last ticks."""
    work = SMALL.replace(tied=tied)
    program = md.compile(work.train_step(), plan=md.Plan(mesh, layout, microbatches=4)).program(*work.specs())
    outside = [eqn for eqn in program.eqns if eqn.sends and "data" in str(eqn.op)]
    inside = [eqn for loop in program.eqns for graph in loop.graphs().values() for eqn, _ in walk(graph) if eqn.sends]
    assert len(outside) == len(work.specs()[0]) + 2  # and the loss, and the number of targets
    assert not [str(eqn.op) for eqn in inside if "data" in str(eqn.op)]
    kinds = Counter(str(eqn.op).partition(" ")[0] for eqn in inside)
    assert kinds["permute"] == 4  # forward and backward, in the steady ticks and beside them
    assert "all_gather" not in kinds
    assert tied or "all_reduce" not in kinds  # each stage computes the loss from what it has, and the last one's counts


def test_sequence_parallel_gradients_are_reduced_once_a_step():
    """Two dims share an axis: the length of activations, and the dims of the weights whose gradients sum over it."""
    work = SMALL.replace(batch=16, heads=2)
    plan = md.Plan(
        "stages:2 data:2 cols:2", "layer:stages; batch:data; length:cols; heads:cols; d_ff:cols", microbatches=4
    )
    program = md.compile(work.train_step(), plan=plan).program(*work.specs())
    assert {record.count for record in program.collectives if "data" in record.axes} == {1}


@pytest.mark.parametrize("layers", [4, 5])
def test_a_sharded_update_gathers_and_scatters_each_weight_once_a_step(layers: int):
    work = SMALL.replace(layers=layers)
    plan = md.Plan("stages:2 rows:2", "layer:stages; batch:rows", microbatches=4, weight_update="sharded")
    compiled = md.compile(work.train_step(), plan=plan)
    program = compiled.program(*work.specs())
    assert all(each.sharded for each in compiled.weight_update.decisions)
    kinds = Counter((record.kind, record.count) for record in program.collectives if "rows" in record.op.axes)
    weights = len(work.specs()[0])
    assert kinds == {
        ("all_gather", 1): weights,
        ("reduce_scatter", 1): weights,
        ("all_reduce", 1): 2,
    }  # of the loss and of the number of targets


@pytest.mark.parametrize("layout", ["layer:stages; batch:data", "layer:stages; batch:data; vocab:stages"])
def test_with_chunks_embedding_and_output_layer_run_once_for_each_micro_batch(layout: str):
    work = SMALL.replace(layers=8, batch=32)
    plan = md.Plan("stages:4 data:2", layout, microbatches=8, chunks=2)
    program = md.compile(work.train_step(), plan=plan).program(*work.specs())
    lines = ledger(program).lines
    products = [x for x in lines if x.kind == "matmul" and "vocab" in {d.name for v in x.eqn.ins for d in v.dims}]
    assert len(products) == 3 and sum(line.trips for line in products) == pytest.approx(3 * 8)
    rows = [x for x in lines if x.op == "scatter_add"]  # gradients of the embedding: in two of the three loops
    assert len(rows) == 2 and sum(line.trips for line in rows) == pytest.approx(8)
    over_data = [record for record in program.collectives if record.axes == ("data",)]
    assert {record.count for record in over_data} == {1}  # sums stay pending outside the branches


def test_a_pending_sum_passes_from_one_loop_into_the_next():
    def step(x: md.Tensor) -> md.Tensor:
        total = md.broadcast(0.0, "io:4")
        for part in ("a", "b"):
            total, _ = md.scan(
                lambda t, row: (t + md.sum(row, [d for d in row.dims if d.name != "io"]), None), total, x, over=part
            )
        return total

    program = md.compile(step, "r:4", "batch:r").program(md.spec("a:3 b:3 batch:8 io:4"))
    assert [(str(record.op), record.count) for record in program.collectives] == [("all_reduce(sum) over r", 1)]


def test_a_sum_in_rows_of_a_carry_is_reduced_once_after_all_loops():
    def step(x: md.Tensor) -> md.Tensor:
        def layer(total: md.Tensor, row: Any) -> Any:
            new = md.take(total, row[1], "own") + md.sum(row[0], "batch")
            return md.dynamic_update_slice(total, md.broadcast(new, "own:1 io:4"), "own", row[1]), None

        def tick(total: md.Tensor, xs: md.Tensor) -> Any:
            return md.scan(layer, total, (xs, md.iota("layer:3")), over="layer")[0], None

        return md.scan(tick, md.broadcast(0.0, "own:3 io:4"), x, over="tick")[0]

    program = md.compile(step, "r:4", "batch:r").program(md.spec("tick:5 layer:3 batch:8 io:4"))
    assert [(str(record.op), record.count) for record in program.collectives] == [("all_reduce(sum) over r", 1)]


def model(change: str) -> Any:
    """The step of a small model in which one thing cannot run in stages."""
    layer, io = md.Dim("layer", 4), md.Dim("io", 4)

    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def block(x: md.Tensor, w: md.Tensor) -> Any:
            return md.tanh(x * w), None

        y = md.scan(block, x, w, over=layer, reverse=change == "reverse")[0]
        y = md.scan(block, y, w, over=layer)[0] if change == "two" else y
        if change == "print":
            y = md.print(y, "y")
        return md.mean(md.square(y))

    def step(w: md.Tensor, x: md.Tensor) -> Any:
        def gradient(part: md.Tensor) -> Any:
            value, grad = md.value_and_grad(loss)(w, part)
            changed = {"square": md.square(grad), "added": md.square(grad + w), "linear": (grad, grad * w - grad)}
            changed["rounded"] = md.cast(md.cast(grad, "bfloat16"), grad.dtype)
            return value, changed.get(change, grad)

        return md.accumulate(gradient, x, 4)

    return step, md.spec([layer, io]), md.spec([md.Dim("batch", 8), io])


@pytest.mark.parametrize(("change", "mesh", "problem"), [
    ("", "stages:8", "'layer' has 4 layers for 8 stages"),
    ("two", "stages:2", "a second one"),
    ("reverse", "stages:2", "from the last to the first"),
    ("square", "stages:2", "square reads the gradient"),
    ("added", "stages:2", "add reads the gradient"),
    ("rounded", "stages:2", "cast reads the gradient.*\n  let it read the sum that md.accumulate returns"),
    ("print", "stages:2", "in the ticks that compute nothing"),
])  # fmt: skip
def test_what_cannot_run_in_stages_is_refused_with_its_line(change: str, mesh: str, problem: str):
    step, *args = model(change)
    with pytest.raises(md.LayoutError, match=problem) as raised:
        md.compile(step, mesh, "layer:stages").program(*args)
    assert "test_pipelines.py" in str(raised.value)


def test_values_in_the_hosts_memory_are_refused():
    plan = md.Plan("stages:2", "layer:stages", microbatches=2, remat="offload")
    with pytest.raises(md.LayoutError, match="in the host's memory"):
        md.compile(SMALL.train_step(), plan=plan).program(*SMALL.specs())


def test_weights_of_a_pipeline_go_to_any_layout_and_back_and_generate_there(tmp_path: Path):
    work = SMALL.replace(layers=5, batch=4)
    params, state = work.init(md.random.key(0))
    batch = {name: md.tensor(np.arange(16).reshape(4, 4) % 16, spec.dims) for name, spec in work.specs()[2].items()}
    place = "stages:2", "layer:stages"
    step = md.compile(work.train_step(), plan=md.Plan(*place, microbatches=2))
    params, _, _ = step(params, state, batch)
    with md.Checkpoints(tmp_path / "a") as first, md.Checkpoints(tmp_path / "b") as second:
        first.save(1, params)
        plain = first.restore(like=params, mesh=md.Mesh("rows:2"), layout=md.Layout("d_ff:rows")).tree
        second.save(1, plain)
        back = second.restore(like=params, mesh=md.Mesh(place[0]), layout=md.Layout(place[1])).tree
    for name, x in params.items():
        assert np.array_equal(x.numpy(), plain[name].numpy()) and np.array_equal(x.numpy(), back[name].numpy())
    assert work.decoder is not None
    decode = work.decoder(work.config, functools.partial(md.nn.decode.generate, tokens="token:3"))
    prompt = md.tensor([[1, 2, 3]], "batch length")
    tokens = [md.compile(decode, *to)(x, prompt).numpy() for to, x in (((*place,), back), (("", ""), plain))]
    assert np.array_equal(*tokens)


def test_no_weight_of_an_expert_leaves_its_stage():
    work = mixtral.replace(batch=8, length=4, vocab=16, layers=2, d_model=8, d_ff=8, heads=2)
    plan = md.Plan("stages:2", "layer:stages", microbatches=2)
    program = md.compile(work.train_step(), plan=plan).program(*work.specs())
    assert {record.kind for record in program.collectives} == {"permute", "all_reduce"}


def test_without_microbatches_the_layout_says_where_weights_are_stored():
    work = SMALL
    compiled = md.compile(work.train_step(), "stages:2", "layer:stages")
    stage = compiled.history(*work.specs())
    assert stage["pipeline"] is stage["simplify"]
    assert {record.kind for record in compiled.program(*work.specs()).collectives} == {"all_gather"}


def test_a_loop_over_steps_that_train_adapters_of_fixed_layers_is_no_pipeline():
    def loss(up: md.Tensor, w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, weights: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, None]:
            fixed, trained = weights
            y = md.dot(x, fixed, "io") + md.rename(x, io="out") * trained
            return md.rename(y, out="io"), None

        return md.sum(md.scan(layer, x, (w, up), over="layer")[0])

    def steps(up: md.Tensor, w: md.Tensor, xs: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        def step(up: md.Tensor, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            value, grad = md.value_and_grad(loss)(up, w, x)
            return up - grad, value

        return md.scan(step, up, xs, over="step")

    rng = np.random.default_rng(3)
    shapes = ("layer:4 out:4", "layer:4 io:4 out:4", "step:2 batch:4 io:4")
    args = [
        md.tensor(rng.integers(-1, 2, [d.size for d in dims]).astype("float32"), dims) for dims in map(md.dims, shapes)
    ]
    program = md.compile(steps, "stages:4", "layer:stages").program(*args)
    assert not program.schedules
    for got, wanted in zip(md.simulate(program, *args), steps(*args), strict=True):
        np.testing.assert_array_equal(got, wanted.numpy())


def test_a_recurrent_network_over_a_split_length_is_no_pipeline():
    length = md.Dim("length", 4)

    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.sum(md.scan(lambda h, row: (md.tanh(h * w + row), None), x["x0"], x["x"], over=length)[0])

    def step(w: md.Tensor, x: Any) -> Any:
        return md.accumulate(lambda part: md.grad(loss)(w, part), x, 2)

    io, batch = md.Dim("io", 4), md.Dim("batch", 4)
    args = md.spec([io]), {"x0": md.spec([batch, io]), "x": md.spec([batch, length, io])}
    stages = md.compile(step, "r:2", "length:r").history(*args)
    assert stages["pipeline"] is stages["simplify"]


def test_dims_of_a_pipeline_get_names_that_the_model_lacks():
    work = SMALL
    step = work.train_step(), "stages:2", "layer:stages"
    graph = md.compile(*step).graph(*work.specs())
    assert pipeline.pipelined(graph, md.Mesh("stages:2"), md.Layout("layer:stages"))[2] == ()
    with mock.patch.object(one_tick, "FILL", np.nan):
        history = md.compile(step[0], plan=md.Plan(*step[1:], microbatches=2)).history(*work.specs())
    assert "stage=2" in str(history["pipeline"])


def test_each_saved_value_has_a_ring_of_its_own():
    """Rings that start as one value are copied before the first tick: q and k have one type here, gate and up too."""
    plan = md.Plan("stages:2", "layer:stages", microbatches=4, remat="none")
    program = md.compile(SMALL.train_step(), plan=plan).program(*SMALL.specs())
    rings = [eqn for eqn in program.eqns if eqn.op is EMPTY]
    filled = next(eqn for eqn in program.eqns if eqn.control is not None and rings[0].outs[0] in eqn.ins)
    assert len(rings) > len({eqn.outs[0].type for eqn in rings})
    assert all(filled.ins.count(eqn.outs[0]) == 1 for eqn in rings)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_memory_has_the_ring_of_a_pipeline_once_and_no_transposes_of_its_stages(remat: str):
    plan = md.Plan("stages:4", "layer:stages", remat=remat, microbatches=8)
    program = md.compile(SMALL.train_step(), plan=plan).program(*SMALL.specs())
    found = md.memory(program)
    (steady,) = [eqn for eqn in program.eqns if eqn.scan is not None and eqn.scan.dim.name == "steady"]
    rings = [v for v in steady.outs if "slot" in [d.name for d in v.dims]]
    sums = [v for v in steady.outs if "layer_row" in [d.name for d in v.dims]]
    held = [tensor for tensor in found.by_tensor if tensor.name == "dynamic_update_slice"]
    assert rings and 0 < sum(tensor.bytes for tensor in held) <= sum(map(program.local_bytes, [*rings, *sums]))
    assert all(tensor.name != "transpose" for tensor in found.by_tensor)


def test_the_smallest_row_of_the_published_pipelines():
    row: dict[str, Any] = published_pipelines.predicted(published_pipelines.CASES["small"][0])
    assert (row["devices"], row["bubble"], row["published"]) == (4, 0.429, "")
    assert 0 < row["step_s"] < 1 and 0 < row["exposed"] < 1
