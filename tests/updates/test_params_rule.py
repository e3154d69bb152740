"""`params:rows` in a layout: the parameters of any model are stored as shards and gathered where they are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import walk
from meshdsl.models.llama import llama
from tests.lowering.programs import same_bits

SMALL = llama.replace(batch=16, length=4, vocab=32, layers=2, d_model=16, d_ff=32, query_heads=4, heads=2, remat=True)
FSDP = md.WeightUpdate("sharded", regather=True)


def layered(params: Any, x: Any) -> Any:
    """A network of layers, whose numbers are small integers."""

    def layer(h: md.Tensor, w: md.Tensor) -> Any:
        return md.rename(md.einsum(h, w, out="batch next"), next="io"), None

    h, _ = md.scan(layer, x, params["w"], over="layer:3")
    return md.sum(h * params["scale"], "io")


def step(params: Any, batch: Any, *, microbatches: int = 1) -> Any:
    def grads(x: Any) -> Any:
        return md.grad(lambda p: md.sum(layered(p, x), "batch"))(params)

    found = md.accumulate(grads, batch, microbatches)
    return {name: params[name] - found[name] for name in params}


SPECS = {"w": md.spec("layer:3 io:8 next:8"), "scale": md.spec("io:8")}, md.spec("batch:16 io:8")


def numbers() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    leaves = (SPECS[0]["scale"], SPECS[0]["w"], SPECS[1])
    return [draw.integers(-1, 2, x.shape).astype(np.float32) for x in leaves]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("mesh", "layout"), [("rows:8", "batch:rows; params:rows"), ("a:2 b:4", "batch:a,b; params:b")]
)
def test_a_step_gathers_and_scatters_layer_by_layer(mesh: str, layout: str, microbatches: int) -> None:
    compiled = md.compile(step, mesh, layout, microbatches=microbatches)
    program = compiled.program(*SPECS)
    plain = md.compile(step, "", "", microbatches=microbatches).program(*SPECS)
    assert same_bits(md.simulate(program, *numbers()), md.simulate(plain, *numbers()))
    ways = 8 if mesh == "rows:8" else 4
    assert program.local_bytes(program.ins[1]) * ways == 4 * 3 * 8 * 8
    kinds = [(r.kind, r.count) for r in program.collectives if len(r.shape) == 2]
    assert ("all_gather", 3 * microbatches) in kinds and ("reduce_scatter", 3 * microbatches) in kinds
    inside = {v for eqn, _ in walk(program) if eqn.scan is not None for v in eqn.outs}
    assert all(program.local_bytes(v) <= 4 * 3 * 8 * 8 // ways for v in inside if any(d.name == "next" for d in v.dims))


def test_it_is_the_sharded_update_with_regather() -> None:
    """And for every optimizer; a group of whole axes may be divided, as no group may."""
    args = SMALL.specs()
    rule = md.compile(SMALL.train_step(), "rows:8", "batch:rows; params:rows")
    update = md.compile(SMALL.train_step(), "rows:8", "batch:rows", weight_update=FSDP)
    assert str(rule.program(*args)) == str(update.program(*args))
    assert str(rule.weight_update) == str(update.weight_update)


def test_gradients_of_micro_batches_are_sent_in_the_dtype_that_the_model_says() -> None:
    """And added up in float32, as shards."""
    workload = SMALL.replace(reduce_dtype="bfloat16", compute_dtype="bfloat16")
    program = md.compile(workload.train_step(), "rows:4", "batch:rows; params:rows", microbatches=2).program(
        *workload.specs()
    )
    sent = [r for r in program.collectives if r.kind == "reduce_scatter"]
    assert sent and {r.dtype.name for r in sent} == {"bfloat16"} and all(r.count >= 2 for r in sent)
    loop = next(eqn for eqn in program.eqns if eqn.scan is not None and eqn.scan.dim.name == "micro")
    totals = [v for v in loop.outs if len(v.dims) > 1]
    assert {v.dtype.name for v in totals} == {"float32"} and all(
        v.sharding.split and not v.sharding.partial for v in totals
    )


def test_parameters_that_nothing_updates_are_shards_too() -> None:
    """In a loss, and where a function makes them; the dim of a loop is not split."""
    loss = md.compile(layered, "rows:8", "batch:rows; params:rows").program(*SPECS)
    plain = md.compile(layered, "", "").program(*SPECS)
    assert same_bits(md.simulate(loss, *numbers()), md.simulate(plain, *numbers()))
    assert [loss.show(v) for v in loss.ins[:2]] == [
        "float32[io__rows=1/rows]",
        "float32[layer=3 io__rows=1/rows next=8]",
    ]
    assert [(str(r.op), r.count) for r in loss.collectives] == [
        ("all_gather io__rows over rows", 3), ("all_gather io__rows over rows", 1)
    ]  # fmt: skip
    made = md.compile(lambda key: {"params": SMALL.init(key)[0]}, "rows:8", "params:rows").program(md.random.key(0))
    assert all(any(v.sharding.axes(d) for d in v.dims) for v in made.outs)


def test_an_imported_function() -> None:
    """Nothing in it names a dim of a parameter."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - x) ** 2)

    one = jnp.ones((), "float32")
    arrays = {"w1": jnp.full((4, 6), one), "w2": jnp.full((6, 4), one)}, jnp.full((8, 4), one)
    imported = md.from_jax(loss, *arrays, names={"x": "batch model"})

    def train(params: Any, x: Any) -> Any:
        found = md.grad(imported)(params, x)
        return {name: params[name] - 0.5 * found[name] for name in params}

    program = md.compile(train, "rows:4", "batch:rows; params:rows").program(*imported.specs)
    assert [program.local_bytes(v) for v in program.ins[:2]] == [4 * 6, 4 * 6]
    assert {r.kind for r in program.collectives} == {"all_gather", "reduce_scatter"}
    gradients = md.compile(md.grad(imported), "rows:4", "batch:rows; params:rows").program(*imported.specs)
    assert [gradients.local_bytes(v) for v in (*gradients.ins[:2], *gradients.outs)] == [4 * 6] * 4


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ("batch:rows; params:row", {}, "'params' is mapped to axis 'row', which the mesh 'rows:8' lacks"),
        ("params:rows", {"weight_update": md.WeightUpdate("sharded", group="rows:4")}, "leave one of them out"),
        ("params:rows", {"weight_update": "auto", "machine": "tpu-v4"}, "weight_update='auto' says how"),
    ],
)
def test_a_rule_that_cannot_be_followed(layout: str, options: Any, said: str) -> None:
    with pytest.raises(md.LayoutError, match=said):
        md.compile(step, "rows:8", layout, **options).program(*SPECS)


def test_a_function_without_parameters_says_so() -> None:
    with pytest.raises(md.LayoutError, match="no argument that is a tree"):
        md.compile(lambda x: x * 2, "rows:8", "params:rows").program(SPECS[1])
    named = md.compile(lambda x: x * 2, "rows:8", "params:rows").program(md.spec("params:8"))  # a dim as any other
    assert named.show(named.ins[0]) == "float32[params=1/rows]"


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("mesh", "layout", "microbatches"),
    [
        ("rows:4", "batch:rows; params:rows", 1),
        ("rows:4", "batch:rows; params:rows", 2),
        ("stages:2 rows:2", "layer:stages; batch:rows; params:rows", 2),
        ("rows:2 cols:2", "batch:rows; length:cols; d_ff:cols; params:rows", 1),
    ],
    ids=["layers", "micro-batches", "pipeline", "two axes"],
)
def test_buckets_join_the_weights_and_the_gradients_of_a_layer(
    mesh: str, layout: str, microbatches: int, remat: str
) -> None:
    """With buckets for all, a pass over a layer sends one all_gather of weights, and one reduce_scatter; results are
    those without."""
    work, random = SMALL.replace(layers=4), np.random.default_rng(0)
    given = [
        np.asarray(random.integers(0, 3, [d.size for d in x.dims]), x.dtype)
        for x in jax.tree_util.tree_leaves(work.specs())
    ]
    plan = md.Plan(mesh, layout, remat=remat, microbatches=microbatches)
    found: list[list[np.ndarray]] = []
    sent: list[Counter[str]] = []
    for limit in (None, 1e9):
        update = md.WeightUpdate(bucket_bytes=limit)
        program = md.compile(work.train_step(), plan=plan.replace(weight_update=update)).program(*work.specs())
        found.append(md.simulate(program, *given))
        records = [eqn.collective for eqn, _ in walk(program) if eqn.collective is not None and eqn.ins[0].dims]
        sent.append(Counter(record.name for record in records if record.axes == ("rows",)))
    assert sent[1]["all_gather"] < sent[0]["all_gather"] / 2
    assert "stages" in mesh or sent[1]["reduce_scatter"] < sent[0]["reduce_scatter"] / 2
    assert same_bits(*found)
