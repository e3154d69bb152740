"""Updates shared by groups of devices, and small tensors that travel together: results, shards and collectives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import combinations
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.transformer import lm
from tests.stablehlo import cost_law
from tests.updates.law import OPTIMIZERS, TOLERANCE, compiled_with, difference, loss, run
from tests.updates.test_shard_updates import adam_mlp, example

CASES = [
    ("clipped", "x:2 y:4", "batch:x,y", {"group": "y:2", "bucket_bytes": 1e9}),
    ("adafactor", "x:3 y:2", "batch:x next:y", {"bucket_bytes": 1e6}),
    pytest.param("adam", "x:2 y:2 z:2", "batch:x,y,z", {"group": "z x"}, marks=pytest.mark.slow),
    pytest.param("adafactor", "x:8", "batch:x", {"group": {"x": 4}}, marks=pytest.mark.slow),
    pytest.param("lamb", "x:2 y:2 z:2", "batch:x,y hidden:z", {"bucket_bytes": 200}, marks=pytest.mark.slow),
    pytest.param("lars", "x:4 y:2", "batch:y,x", {"group": "x", "bucket_bytes": 1e9}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "layout", "options"), CASES)
def test_the_update_is_the_replicated_one(name: str, mesh: str, layout: str, options: dict[str, Any]) -> None:
    right, _ = run(OPTIMIZERS[name](), mesh, layout, "replicated", steps=2)
    got, compiled = run(OPTIMIZERS[name](), mesh, layout, "sharded", steps=2, **options)
    assert difference(right, got) <= TOLERANCE
    given = example(name)
    program = compiled.program(*given)
    ran, simulated = jax.tree.leaves(compiled(*given)), md.simulate(program, *jax.tree.leaves(given))
    for x, y in zip(ran, simulated, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=TOLERANCE, atol=TOLERANCE)
    cost_law(program, compiled.lower(*given).as_text())


def program(mesh: str, layout: str, **options: Any) -> tuple[Any, md.Compiled]:
    workload = adam_mlp()
    step = compiled_with(workload.train_step(), mesh, layout, **{"weight_update": "sharded", **options})
    return step.program(*workload.specs()), step


def test_shards_are_summed_across_groups_and_nothing_whole_is() -> None:
    made, step = program("x:2 y:4", "batch:x,y", group="y")
    found = Counter((r.kind, r.axes) for r in made.collectives)
    assert found[("reduce_scatter", ("y",))] == found[("all_gather", ("y",))] == found[("all_reduce", ("x",))] == 3
    scattered, summed = ([r for r in made.collectives if r.kind == k] for k in ("reduce_scatter", "all_reduce"))
    shards = sorted(r.bytes for r in summed if r.axes == ("x",))
    assert shards == sorted(r.bytes // 4 for r in scattered)
    assert all((d.group, d.pending) == (("y",), ("x", "y")) for d in step.weight_update.decisions)
    assert "y of x,y" in str(step.weight_update)


def test_tensors_that_travel_together_keep_their_shards() -> None:
    for options in ({}, {"group": "y"}):
        apart, _ = program("x:2 y:4", "batch:x,y", **options)
        together, _ = program("x:2 y:4", "batch:x,y", bucket_bytes=1e9, **options)
        for one, other in ((apart.ins, together.ins), (apart.outs, together.outs)):
            assert [(v.type, v.sharding) for v in one] == [(v.type, v.sharding) for v in other]
        found = Counter(r.kind for r in together.collectives if r.bytes > 8)
        across = {"all_reduce": 1} if options else {}
        assert found == {"reduce_scatter": 1, "all_gather": 1, **across}
        sent = [sum(r.bytes * r.count for r in p.collectives) for p in (apart, together)]
        assert sent[0] == sent[1]


def test_what_travels_together_arrives_bit_for_bit() -> None:
    adam = OPTIMIZERS["adam"]()

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = md.value_and_grad(loss)(params, batch)
        return *adam.update(grads, state, params), value

    given = example("adam")
    arrays = [x.numpy() for x in jax.tree.leaves(given)]
    options = {"weight_update": "sharded", "group": "y:2"}
    apart, together = (
        compiled_with(step, "x:2 y:4", "batch:x,y", bucket_bytes=limit, **options).program(*given) for limit in (0, 1e9)
    )
    assert len(together.collectives) < len(apart.collectives)
    for x, y in zip(md.simulate(apart, *arrays), md.simulate(together, *arrays), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("options", [{}, {"regather": True}], ids=["", "regather"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("steps", [0, 3])
def test_tensors_travel_together_inside_loops(steps: int, microbatches: int, options: dict[str, Any]) -> None:
    """In a loop over steps (Xu et al., 2020, section 5.2), and in a step with a loop over micro-batches."""
    adam = OPTIMIZERS["adam"]()

    def step(params: Any, state: Any, batch: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            params, state = carry
            part = lambda part: md.value_and_grad(loss)(params, part)  # noqa: E731 - short
            value, grads = md.accumulate(part, batch, steps=microbatches) if microbatches > 1 else part(batch)
            return adam.update(grads, state, params), value

        carry = params, state
        last, value = md.scan(one, carry, None, over=f"step:{steps}") if steps else one(carry, None)
        return *last, value

    given = example("adam")
    arrays = [x.numpy() for x in jax.tree.leaves(given)]
    options = {"weight_update": "sharded", "group": "y:2", **options}
    apart, together = (
        compiled_with(step, "x:2 y:4", "batch:x,y", bucket_bytes=limit, **options).program(*given) for limit in (0, 1e9)
    )
    for x, y in zip(md.simulate(apart, *arrays), md.simulate(together, *arrays), strict=True):
        assert x.tobytes() == y.tobytes()
    count = [Counter((r.kind, r.axes, r.count) for r in p.collectives if r.shape) for p in (apart, together)]
    trips = max(steps, 1) * (microbatches if "regather" in options else 1)  # then each part is reduced
    inside = [key for key in count[0] if key[0] != "all_gather" and key[2] == trips]
    assert inside and all(count[1][key] == 1 < count[0][key] for key in inside)


def test_a_limit_joins_what_is_smaller_only() -> None:
    def step(params: Any, x: md.Tensor) -> Any:
        grads = md.grad(lambda p: md.mean(md.square(md.dot(x, p["w"], "io") * p["a"] + p["b"])))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"w": md.spec("io:16 hidden:8"), "a": md.spec("hidden:8"), "b": md.spec("hidden:8")}
    found = {}
    for limit in (0, 33, 512, 513):
        compiled = compiled_with(step, "x:8", "batch:x", weight_update="sharded", bucket_bytes=limit)
        records = compiled.program(params, md.spec("batch:16 io:16")).collectives
        found[limit] = sorted(r.bytes for r in records if r.kind == "reduce_scatter")
    assert found == {0: [32, 32, 512], 33: [64, 512], 512: [64, 512], 513: [576]}


def test_auto_takes_the_group_that_saves_most() -> None:
    sizes = {"batch": 64, "io": 512, "hidden": 2048}
    workload = adam_mlp().replace(**sizes)
    options = {"weight_update": "auto", "machine": "tpu-v3"}
    where = "y:4 x:4 core:2", "batch:y,x,core"
    best = _decisions(workload, *where, **options)
    others = [
        _decisions(workload, *where, group=group, **options)
        for n in (1, 2, 3)
        for group in combinations(("y", "x", "core"), n)
    ]
    for i, decision in enumerate(best):
        assert decision.seconds_saved == max(other[i].seconds_saved for other in others)
    assert any(d.sharded for d in best)


def _decisions(workload: md.Workload, mesh: str, layout: str, **options: Any) -> Any:
    step = compiled_with(workload.train_step(), mesh, layout, **options)
    step.program(*workload.specs())
    return step.weight_update.decisions


def test_auto_joins_where_the_step_is_predicted_to_be_faster() -> None:
    workload = adam_mlp().replace(batch=4096)
    packaged = md.machine("tpu-v3")  # its compiler joins small all_reduces by itself
    plain = dataclasses.replace(packaged, network=dataclasses.replace(packaged.network, combine={}))
    seconds: dict[Any, float] = {}
    for on in (packaged, plain):
        for limit in (0, None):
            options = {"weight_update": "auto", "machine": on, "bucket_bytes": limit}
            step = compiled_with(workload.train_step(), "x:32 y:32", "batch:x,y", **options)
            seconds[limit] = step.cost(*workload.specs(), machine=on).seconds
        assert seconds[None] <= seconds[0]
    assert seconds[None] < seconds[0]


def test_auto_compares_modes_with_their_buckets() -> None:
    """Without buckets, the fastest choice is another one here."""

    def seconds(**options: Any) -> float:
        step = compiled_with(lm.train_step(), "x:16", "batch:x", **options)
        return step.cost(*lm.specs(), machine="tpu-v5e").seconds

    sharded = min(seconds(weight_update="sharded", bucket_bytes=size) for size in (2**20, 2**21, 2**23))
    assert seconds(weight_update="auto", machine="tpu-v5e") <= sharded


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group": "x"}, "has no effect with weight_update='replicated'"),
        ({"weight_update": "sharded", "group": "xx"}, "the mesh has no axis 'xx'; did you mean 'x'?"),
        ({"weight_update": "sharded", "group": ""}, "group='' is one device, and a group has several"),
        ({"weight_update": "sharded", "group": "x:1"}, "group='x:1' is one device"),
        ({"weight_update": "sharded", "group": "x:3"}, "cannot have 3 of the 8 devices along the mesh axis 'x'"),
        ({"weight_update": "sharded", "group": {"x": 2.5}}, "cannot have 2.5 of the 8 devices"),
        ({"weight_update": "sharded", "group": "x:a"}, "a group is written axis or axis:size"),
        ({"bucket_bytes": -1}, "bucket_bytes is a number of bytes from 0"),
    ],
)
def test_wishes_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(md.LayoutError, match=text.replace("?", r"\?")):
        compiled_with(lambda x: x, "x:8", "", **options)


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_a_limit_that_joins_nothing_is_an_error(mode: str) -> None:
    with pytest.raises(md.LayoutError, match="bucket_bytes=16 joins nothing"):
        program("x:8", "batch:x", weight_update=mode, bucket_bytes=16)


def test_a_group_that_no_gradient_is_summed_over_is_an_error() -> None:
    with pytest.raises(md.LayoutError, match="is a sum over x, and no axis of the group is among them"):
        program("x:4 y:2", "batch:x", group="y")


PART = {"weight_update": "sharded", "group": "x:4"}


def marked(params: Any, state: Any, x: md.Tensor) -> Any:
    """A step whose model names an axis of the mesh."""

    def loss(params: Any) -> md.Tensor:
        h = md.shard(md.tanh(md.dot(x, params["w"], "io")), {"batch": "x"})
        return md.mean(md.square(h))

    value, grads = md.value_and_grad(loss)(params)
    return *OPTIMIZERS["adam"]().update(grads, state, params), value


def marked_arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(5)
    params = {"w": md.tensor(rng.normal(size=(8, 8)), "io:8 hidden:8")}
    return params, OPTIMIZERS["adam"]().init(params), md.tensor(rng.normal(size=(16, 8)), "batch:16 io:8")


def test_a_part_of_an_axis_is_an_axis_of_the_program_and_of_nothing_else(tmp_path: Any) -> None:
    given = marked_arguments()
    plain, parts = (compiled_with(marked, "x:8", "batch:x", donate=(), **options) for options in ({}, PART))
    made = parts.program(*given)
    assert (str(parts.mesh), str(made.mesh)) == ("x:8", "x.outer:2 x.inner:4")
    params, state, _ = parts(*given)
    again, _, value = parts(params, state, given[2])  # what came out goes in as it lies
    stages, leaves = parts._for((params, state, given[2]))
    assert stages.arrays(leaves)[0] is params["w"].stored
    right, _, right_value = plain(params, state, given[2])  # and into a program on the mesh itself
    assert difference([again["w"].numpy(), value.numpy()], [right["w"].numpy(), right_value.numpy()]) <= TOLERANCE
    back = parts(*plain(*given)[:2], given[2])[0]  # and the other way
    assert difference(back["w"].numpy(), again["w"].numpy()) <= TOLERANCE

    checkpoints = md.Checkpoints(tmp_path)
    checkpoints.save(1, {"params": params, "state": state})
    checkpoints.wait()
    where: dict[str, Any]
    for where in ({"program": made}, {"mesh": md.Mesh("x:8"), "layout": md.Layout("io:x")}):
        found = checkpoints.restore(like={"params": params, "state": state}, **where).tree
        assert difference(found["params"]["w"].numpy(), params["w"].numpy()) == 0
        resumed, _, _ = parts(found["params"], found["state"], given[2])
        assert resumed["w"].numpy().tobytes() == again["w"].numpy().tobytes()


def test_a_part_of_an_axis_is_costed_where_the_axis_lies() -> None:
    parts, whole = (compiled_with(marked, "x:8", "batch:x", **{**PART, **more}) for more in ({}, {"group": "x"}))
    given = marked_arguments()
    for assignment in (None, {"x": "x:4 y:2"}):
        report = parts.cost(*given, machine="tpu-v5e", assignment=assignment)
        placement = report.timeline.placement
        coarse = whole.cost(*given, machine="tpu-v5e", assignment=assignment).timeline.placement
        for kind in ("all_reduce", "all_gather", "all_to_all"):
            fine = placement.seconds(kind, ["x.outer", "x.inner"], 1e6)
            assert fine == coarse.seconds(kind, ["x"], 1e6)
        assert str(report.mesh) == "x:8" and "on x:8" in str(report)
    assert str(parts.under("x:4 y:2", "batch:x io:y").program(*given).mesh) == "x:4 y:2"  # a group of all along x


def test_auto_takes_parts_of_an_axis_where_that_wastes_less() -> None:
    workload = adam_mlp().replace(batch=2048, io=512, hidden=8192)
    options = {"weight_update": "auto", "machine": "tpu-v3", "bucket_bytes": 0}
    step = compiled_with(workload.train_step(), "x:1024", "batch:x", **options)
    assert list(step.program(*workload.specs()).mesh.axes) == ["x.outer", "x.inner"]
    found = step.weight_update.decisions
    whole = _decisions(workload, "x:1024", "batch:x", group="x", **options)
    assert sum(d.seconds_saved or 0 for d in found) > sum(d.seconds_saved or 0 for d in whole)
