"""A plan is one value: it is printed, written, read and compared, and it changes no result."""

from __future__ import annotations

import dataclasses
import inspect
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.compile.knobs import KNOBS
from meshdsl.models import gpt_moe, mlp, resnet, transformer

VALUES: dict[str, list[Any]] = {
    "mesh": ["", "rows:8", "rows:2 cols:4", md.Mesh("rows:4", device_order=[3, 1, 2, 0])],
    "layout": ["", "batch:rows", md.Layout("batch:rows,cols", overrides={"moe/*/w": {"io": "rows"}, 'a"b': "io:"})],
    "weight_update": [
        "sharded",
        "auto",
        md.WeightUpdate("sharded", group="rows:2", bucket_bytes=1e5, regather=True),
        md.WeightUpdate("sharded", group={"rows": 2}),
    ],
    "remat": ["model", "none", "full", "products", "collectives", "names:a,b"],
    "microbatches": [1, 4],
    "overlap": ["none", "list", md.Overlap("halves", dim="batch", parts=4, memory_limit=1e9)],
    "attention_kernel": ["auto", "blockwise", "pallas"],
    "unroll": [False, True],
    "steps": ["auto", "flat", "always"],
    "machine": [None, "tpu-v5e"],
    "chunks": [1, 2],
}


def drawn(rng: random.Random) -> md.Plan:
    values: dict[str, Any] = {name: rng.choice(options) for name, options in VALUES.items()}
    without: dict[str, Any] = {**values, "machine": None}
    plan = md.Plan(**without)
    return md.Plan(**values) if plan.may_use_machine else plan


def test_plan_knobs_are_its_fields():
    assert [knob.name for knob in KNOBS] == [f.name for f in dataclasses.fields(md.Plan)] == list(VALUES)
    assert all(getattr(md.Plan(), knob.name) == knob.default for knob in KNOBS)


@pytest.mark.parametrize("seed", range(40))
def test_plan_is_read_as_written(seed: int, tmp_path: Path):
    plan = drawn(random.Random(seed))
    plan.save(tmp_path / "plan.toml")
    read = md.Plan.load(tmp_path / "plan.toml")
    assert read.to_toml() == plan.to_toml()
    assert str(read) == str(plan) and read.mesh == plan.mesh and read.layout == plan.layout
    assert md.Plan.from_dict(plan.to_dict()) == read


@pytest.mark.parametrize("seed", range(40))
def test_plan_diff_names_the_knobs_that_differ(seed: int):
    rng = random.Random(seed)
    one, other = drawn(rng), drawn(rng)
    differ = {k.title for k in KNOBS if getattr(one, k.name) != getattr(other, k.name)} - {"layout"}
    named = {name for name, _, _ in one.diff(other).changes}
    assert differ <= named and all(name in differ or name.startswith(("layout ", "overrides")) for name in named)
    assert one.diff(one).changes == () and str(one.diff(one)) == "the plans are equal"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mesh = ", "not TOML"),
        ("mush = 'rows:2'", "no key 'mush'; did you mean 'mesh'"),
        ("microbatches = 0", "1 part or more"),
        ("unroll = 2", "unroll must be true or false, got 2"),
        ("steps = 'two'", "steps='two' is not available; there are: 'auto', 'flat', 'always'"),
        ("microbatches = 'two'", "microbatches must be an integer, got 'two'"),
        ("remat = 'everything'", "not available"),
        ("remat = 1", "remat must be text, got 1"),
        ("overlap = { mode = 'halves', part = 2 }", "overlap.part: unknown key; did you mean 'parts'"),
        ("weight_update = 3", "weight_update must be a table, got 3"),
        ("layout = { overrides = { w = 1 } }", "layout.overrides.w must be text, got 1"),
        ("machine = 'tpu-v5e'", "decides nothing"),
        (
            "mesh = { axes = 'rows:2', device_order = 'x' }",
            "mesh.device_order must be a list, each an integer, got 'x'",
        ),
        ("overlap = { mode = 5 }", "overlap.mode must be text, got 5"),
        ("weight_update = { mode = 'sharded', bucket_bytes = 'x' }", "bucket_bytes must be a number, got 'x'"),
        ("weight_update = { mode = 'sharded', regather = 3 }", "regather must be true or false, got 3"),
    ],
)
def test_plan_file_errors_name_the_key(text: str, says: str, tmp_path: Path):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(md.LayoutError, match=r"plan\.toml") as caught:
        md.Plan.load(tmp_path / "plan.toml")
    assert says in str(caught.value)


ODD = [3, -1, True, 1.5, "", "rows:2", [], [1], ["rows"], {}, {"mode": 5}, {"mode": "sharded", "group": 5}, "names:",
       {"axes": 3}, {"axes": "rows:2", "device_order": [[0, "a"]]}, {"rules": 3}, {"overrides": {"w": {"io": "rows"}}},
       {"mode": "halves", "parts": "x"}, {"mode": "halves", "memory_limit": "x"}, "\0"]  # fmt: skip


@pytest.mark.parametrize("knob", list(VALUES))
def test_plan_of_odd_values_is_a_plan_or_an_error_of_ours(knob: str):
    for value in ODD:
        try:
            plan = md.Plan.from_dict({knob: value})
        except md.LayoutError:
            continue
        assert md.Plan.from_toml(plan.to_toml()) == plan, value


def test_plan_file_that_is_missing():
    with pytest.raises(md.LayoutError, match="cannot be read: No such file"):
        md.Plan.load("nowhere.toml")


def test_compile_takes_a_plan_alone():
    plan = md.Plan("rows:4", "batch:rows")
    assert md.compile(md.exp, plan=plan).plan == plan
    with pytest.raises(md.LayoutError, match="also layout, which the plan decides"):
        md.compile(md.exp, layout="batch:rows", plan=plan)
    with pytest.raises(md.LayoutError, match="also unroll, which the plan decides"):
        md.compile(md.exp, plan=plan, unroll=True)
    with pytest.raises(md.LayoutError, match="needs a mesh, or a plan"):
        md.compile(md.exp)


@pytest.mark.parametrize("unroll", [False, True])
def test_compile_unrolls_loops_as_the_plan_says(unroll: bool):
    plan = md.Plan("rows:2", "batch:rows", unroll=unroll)
    compiled = md.compile(LM.train_step(), plan=plan)
    loops = [eqn for eqn in compiled.program(*LM.specs()).eqns if eqn.control is not None]
    assert bool(loops) is not unroll
    assert compiled.plan == plan


def test_compile_with_a_plan_returns_the_plan():
    plan = md.Plan("rows:4", "batch:rows", "auto", "full", 2, machine="h100")
    assert md.compile(mlp.mlp.train_step(), plan=plan).plan == plan
    under = md.compile(mlp.mlp.train_step(), plan=plan).under("rows:2", "")
    assert under.plan == plan.replace(mesh="rows:2", layout="")


@pytest.mark.parametrize("knob", [{"remat": "full"}, {"microbatches": 2}])
def test_compile_refuses_knobs_that_a_step_does_not_take(knob: dict[str, Any]):
    with pytest.raises(md.LayoutError, match=f"does not take {next(iter(knob))}"):
        md.compile(md.exp, plan=md.Plan("rows:4", **knob))


def plain_loss(config: Any) -> Any:
    """The loss of mlp as a scalar that does not say how parts of the batch are joined."""
    return lambda params, batch: md.mean(md.square(mlp.model(config)(params, batch) - batch["target"]))


PLAIN = dataclasses.replace(mlp.mlp, loss=plain_loss)


@pytest.mark.parametrize(
    ("workload", "knob", "says"),
    [
        (mlp.mlp, {"remat": "full"}, "no field remat"),
        (resnet.digits, {"microbatches": 2}, "not declared to be a mean"),
        (PLAIN, {"microbatches": 2}, "'loss' is a plain scalar, not declared to be a mean"),
        (transformer.lm.replace(dropout=0.1), {"microbatches": 2}, "not declared to be a mean"),
        (mlp.mlp.replace(batch=9), {"microbatches": 2}, "2 micro-batches"),
    ],
)
def test_workload_says_why_it_does_not_take_a_knob(workload: md.Workload, knob: dict[str, Any], says: str):
    step = md.compile(workload.train_step(), plan=md.Plan("rows:1", **knob))
    with pytest.raises(md.ShapeError, match=says):
        step.program(*workload.specs(), *([md.spec("key_word:2", "uint32")] if "dropout" in vars(workload.config) and
                                          workload.config.dropout else []))  # fmt: skip


SMALL = {"length": 8, "layers": 2, "d_model": 16, "heads": 2, "d_head": 8, "d_ff": 32, "batch": 8}
LM = transformer.lm.replace(**SMALL)
MOE = gpt_moe.gpt_moe.replace(**SMALL, expert_hidden=32, optimizer="momentum")
PLANS = [
    {"microbatches": 2},
    {"unroll": True},
    {"remat": "full", "weight_update": "sharded"},
    {"remat": "products", "microbatches": 2, "weight_update": md.WeightUpdate("sharded", regather=True)},
    {"remat": "collectives", "overlap": "list", "machine": "h100"},
]


def stepped(workload: md.Workload, plan: md.Plan) -> list[np.ndarray]:
    """Parameters, optimizer state and loss after one simulated step on random inputs."""
    rng = np.random.default_rng(1)
    *_, specs = workload.specs()
    inputs = {
        name: md.tensor(
            (rng.integers(0, 200, [d.size for d in s.dims]) if s.dtype.kind == "i"
             else rng.normal(size=[d.size for d in s.dims])).astype(s.dtype), s.dims
        )
        for name, s in specs.items()
    }  # fmt: skip
    key = (md.random.key(3),) if workload.name == "gpt_moe" else ()
    args = (*workload.init(md.random.key(0)), inputs, *key)
    program = md.compile(workload.train_step(), plan=plan).program(*args)
    return md.simulate(program, *jax.tree.leaves(args))


@pytest.mark.parametrize("workload", [LM, MOE, mlp.mlp.replace(batch=16, io=8, hidden=16)], ids=lambda w: w.name)
def test_plans_change_no_result(workload: md.Workload):
    layout = {"lm": "batch:rows heads:cols d_ff:cols", "gpt_moe": "batch:rows group:rows expert:rows"}
    rules = layout.get(workload.name, "batch:rows hidden:cols")
    expected = stepped(workload, md.Plan("all:1"))
    plans = {"lm": PLANS, "gpt_moe": PLANS[2:3], "mlp": [{"microbatches": 2, "weight_update": "sharded"}]}
    for knobs in plans[workload.name]:
        found = stepped(workload, md.Plan("rows:2 cols:2", rules, **knobs))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=str(knobs))


def test_a_knob_has_its_longer_name_too():
    plan = md.Plan("node:2", "", collective_steps="flat", interleave=2)
    assert (
        plan
        == md.Plan("node:2", "", steps="flat", chunks=2)
        == md.Plan("node:2").replace(collective_steps="flat", interleave=2)
    )
    assert (plan.collective_steps, plan.interleave) == ("flat", 2)
    assert md.Plan.from_toml("mesh = 'node:2'\ninterleave = 2\ncollective_steps = 'flat'") == plan
    for both in (lambda: md.Plan(chunks=2, interleave=2), lambda: plan.replace(chunks=2, interleave=2)):
        with pytest.raises(md.LayoutError, match="interleave and chunks are one knob"):
            both()
    names = inspect.signature(md.compile).parameters
    assert {"collective_steps", "interleave"} <= names.keys() and not {"steps", "chunks"} & names.keys()
    x = md.spec("batch:64 io:65536")
    compiled = md.compile(lambda x: md.sum(x, "batch"), "node:4 gpu:8", "batch:node", collective_steps="flat")
    assert compiled.plan.steps == "flat" and compiled.program(x).collectives
    assert "collective_steps" not in str(md.search(lambda x: md.sum(x, "batch"), x, mesh="a:2", knobs="interleave"))
