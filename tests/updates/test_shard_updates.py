"""A sharded update has the results of the replicated one, and the collectives of the paper."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.gpt_moe import gpt_moe
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm
from tests.updates.law import OPTIMIZERS, TOLERANCE, compiled_with, difference, loss, run, start, undecided

CASES = [
    ("adam", "x:8", "batch:x"),
    ("clipped", "x:2 y:4", "batch:x hidden:y"),
    ("lamb", "x:4 y:2", "batch:y,x"),
    ("adafactor", "x:3 y:2", "batch:x next:y"),
    pytest.param("muon", "x:2 y:4", "batch:x hidden:y", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "layout"), CASES)
def test_a_sharded_update_is_the_replicated_one(name: str, mesh: str, layout: str) -> None:
    right, _ = run(OPTIMIZERS[name](), mesh, layout, "replicated", steps=3)
    got, compiled = run(OPTIMIZERS[name](), mesh, layout, "sharded", steps=3)
    assert difference(right, got) <= TOLERANCE
    assert all(d.sharded for d in compiled.weight_update.decisions)
    assert not undecided(compiled, start()[0])


@pytest.mark.parametrize("layout", [name for name in lm.layouts if "batch" in lm.layouts[name][1]])
@pytest.mark.parametrize("remat", [False, True])
def test_shard_updates_decides_about_every_parameter_and_about_no_activation(layout: str, remat: bool) -> None:
    workload = lm.replace(layers=3, batch=8, length=8, d_model=16, d_ff=32, vocab=64, remat=remat)
    specs = workload.specs()
    step = md.compile(workload.train_step(), *workload.layouts[layout], weight_update="sharded", donate=(0, 1))
    step.program(*specs)
    assert not undecided(step, specs[0])
    assert all(d.sharded for d in step.weight_update.decisions)


def test_weights_updated_in_a_loop_and_weights_updated_around_it_are_all_sharded() -> None:
    def descend(params: Any, batch: Any) -> Any:
        grads = md.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def step(params: Any, batch: Any) -> Any:
        looped, _ = md.scan(lambda p, _: (descend(p, batch), 0.0), params["looped"], None, over=md.Dim("step", 3))
        return {"looped": looped, "once": descend(params["once"], batch)}

    params, batch = start()
    params = {"looped": params, "once": params}
    steps = [md.compile(step, "x:4 y:2", "batch:x hidden:y", weight_update=mode) for mode in ("replicated", "sharded")]
    right, got = (jax.tree.map(lambda x: x.numpy(), f(params, batch)) for f in steps)
    assert difference(right, got) <= TOLERANCE
    assert not undecided(steps[1], params)
    assert all(d.sharded for d in steps[1].weight_update.decisions)


def adam_mlp() -> md.Workload:
    given = mlp.replace(batch=16, io=16, hidden=32)
    return md.Workload(
        "adam_mlp", given.config, model=given.model, inputs=given.inputs, loss=given.loss, layouts=given.layouts,
        optimizer=lambda config: md.optim.adam(1e-3),
    )  # fmt: skip


def test_each_weight_has_one_reduce_scatter_and_one_all_gather_and_no_all_reduce() -> None:
    workload = adam_mlp()
    specs = workload.specs()
    step = md.compile(workload.train_step(), "x:8", "batch:x", weight_update="sharded", donate=(0, 1))
    found = Counter(record.kind for record in step.program(*specs).collectives)
    assert found == {"reduce_scatter": 3, "all_gather": 3, "all_reduce": 1}
    lowered = step.lower(*specs)
    smallest = 32 * 4
    for record in step.program(*specs).collectives:
        assert record.kind != "all_reduce" or record.bytes < smallest
    text = lowered.compile().as_text()
    assert text.count(" reduce-scatter(") == 3 and text.count(" all-gather(") == 3
    assert all("f32[]" in line for line in text.splitlines() if " all-reduce(" in line)


def test_state_and_weights_stay_sharded_between_steps() -> None:
    workload = adam_mlp()
    replicated, sharded = (
        md.compile(workload.train_step(), "x:8", "batch:x", weight_update=mode).program(*workload.specs())
        for mode in ("replicated", "sharded")
    )

    def stored(program: Any) -> int:
        return sum(program.local_bytes(v) for v in program.ins if v.name.startswith(("params/", "state/m", "state/v")))

    assert stored(sharded) * 8 == stored(replicated)


def test_the_cast_comes_before_the_gather_and_sums_are_scattered_in_loops() -> None:
    """Sums of large stacks in every trip, so that no device stores all of its parts; those of small ones together."""

    def records_of(width: int) -> list[Any]:
        sizes = {"layers": 16, "batch": 8, "length": 8, "d_model": width, "d_ff": width, "d_head": width // 8}
        workload = lm.replace(**sizes, compute_dtype="bfloat16")
        layout = "batch:x; d_ff:y; heads:y; vocab:y"
        step = md.compile(workload.train_step(), "x:4 y:2", layout, weight_update="sharded")
        return list(step.program(*workload.specs()).collectives)

    small = [r for r in records_of(16) if r.kind == "reduce_scatter" and r.dtype.name == "float32"]
    assert all(r.count == 1 for r in small)
    records = records_of(2048)
    wide = [r for r in records if r.kind == "all_gather" and "feed_forward/w" in r.name]
    assert [r.dtype.name for r in wide] == ["bfloat16"] * 2
    scattered = [r for r in records if r.kind == "reduce_scatter" and r.count == 16]
    assert len(scattered) == 6  # q, k, v, o and the two of the feed-forward layer, in every trip
    assert not [r for r in records if r.kind == "all_reduce" and "x" in r.axes and r.bytes > 8]


@pytest.mark.parametrize("name", ["adam", "accumulated"])
def test_weights_that_nothing_divides_are_scattered_too(name: str) -> None:
    _, compiled = run(OPTIMIZERS[name](), "x:4 y:2", "batch:x hidden:y", "sharded", steps=0)
    records = compiled.program(*example(name)).collectives
    found = Counter(r.kind for r in records if "x" in r.axes)
    assert (found["reduce_scatter"], found["all_gather"]) == (5, 5)
    assert all(r.op.name != "all_reduce" or r.bytes <= 40 for r in records if "x" in r.axes)  # numbers, packed


def example(name: str) -> tuple[Any, ...]:
    params, batch = start()
    return params, OPTIMIZERS[name]().init(params), batch


def test_steps_in_a_loop_gather_their_state_after_it() -> None:
    adam = OPTIMIZERS["adam"]()

    def many(params: Any, state: Any, batch: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            value, grads = md.value_and_grad(loss)(params, batch)
            return adam.update(grads, state, params), value

        return md.scan(step, (params, state), None, over=md.Dim("step", 4))

    steps = [md.compile(many, "x:4 y:2", "batch:x hidden:y", weight_update=mode) for mode in ("replicated", "sharded")]
    right, got = (jax.tree.map(lambda x: x.numpy(), step(*example("adam"))) for step in steps)
    assert difference(right, got) <= TOLERANCE
    records = [r for r in steps[1].program(*example("adam")).collectives if "x" in r.axes]
    inside, after = ([r for r in records if (r.count == 4) == looped] for looped in (True, False))
    assert Counter(r.kind for r in inside) == {"reduce_scatter": 5, "all_gather": 5}
    assert Counter(r.kind for r in after) == {"all_gather": 15, "all_reduce": 1}  # weights and moments; the losses


def test_steps_in_a_loop_may_return_the_weights_of_each_step() -> None:
    def steps(w: md.Tensor, last: md.Tensor, x: md.Tensor) -> Any:
        def step(carry: Any, _: None) -> Any:
            new = (carry[0] - md.grad(lambda w: md.sum(md.einsum(x, w, out="batch hidden")))(carry[0])) % 3.0
            return (new, new), (new, md.sum(carry[1]))

        return md.scan(step, (w, last), None, over=md.Dim("step", 3))

    compiled = md.compile(steps, "x:4", "batch:x", weight_update="sharded")
    w, x = (md.tensor(np.arange(16).reshape(4, 4) % 3.0, dims) for dims in ("io hidden", "batch io"))
    results = md.simulate(compiled.program(w, w, x), w, w, x)
    assert compiled.weight_update.decisions[0].sharded
    for got, wanted in zip(results, jax.tree.leaves(steps(w, w, x)), strict=True):
        np.testing.assert_array_equal(got, np.asarray(wanted))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("loop", ["accumulate", "scan"])
def test_a_sharded_update_reads_the_sum_of_any_number_of_parts(loop: str, steps: int) -> None:
    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.sum(md.square(md.dot(x, w, "io")))

    def by_scan(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        parts = md.unflatten(x, "batch", [md.Dim("batch", 8 // steps), md.Dim("part", steps)])
        return md.scan(lambda total, part: (total + md.grad(loss)(w, part), None), w * 0, parts, over="part")[0]

    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        grad = by_scan(w, x) if loop == "scan" else md.accumulate(lambda part: md.grad(loss)(w, part), x, steps)
        return w - 0.125 * grad

    w = md.tensor(np.arange(4.0, dtype="float32").reshape(2, 2), "io:2 out:2")
    x = md.tensor(np.arange(16.0, dtype="float32").reshape(8, 2) % 3, "batch:8 io:2")
    program = md.compile(step, "rows:2", "batch:rows", weight_update="sharded").program(w, x)
    assert [record.kind for record in program.collectives] == ["all_gather", "reduce_scatter"]
    np.testing.assert_array_equal(md.simulate(program, w, x)[0], step(w, x).numpy())


def test_accumulated_gradients_are_reduced_once() -> None:
    adam = OPTIMIZERS["adam"]()

    def step(params: Any, state: Any, batch: Any) -> Any:
        def one(total: Any, part: Any) -> Any:
            value, grads = md.value_and_grad(loss)(params, part)
            return jax.tree.map(lambda a, b: a + b, total, grads), value

        parts = {k: md.unflatten(v, "batch", [md.Dim("micro", 2), md.Dim("batch", 8)]) for k, v in batch.items()}
        zero = jax.tree.map(lambda p: md.broadcast(md.cast(0.0, p.dtype), p.dims), params)
        grads, values = md.scan(one, zero, parts, over=md.Dim("micro", 2))
        return *adam.update(jax.tree.map(lambda g: g / 2, grads), state, params), values

    steps = [md.compile(step, "x:4 y:2", "batch:x hidden:y", weight_update=mode) for mode in ("replicated", "sharded")]
    right, got = (jax.tree.map(lambda x: x.numpy(), step(*example("adam"))) for step in steps)
    assert difference(right, got) <= TOLERANCE
    scattered = [r for r in steps[1].program(*example("adam")).collectives if r.kind == "reduce_scatter"]
    assert [r.count for r in scattered] == [1] * 5


def test_gradients_that_are_subtracted_one_by_one_are_scattered_each() -> None:
    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        first, second = (md.grad(lambda w, n=n: md.sum(md.einsum(x, w, out="batch hidden") ** n))(w) for n in (2, 3))
        return w - first - second

    compiled = md.compile(step, "x:4", "batch:x", weight_update="sharded")
    shapes = {"io hidden": (4, 2), "batch io": (8, 4)}
    args = [md.tensor(np.arange(n * m).reshape(n, m) % 3.0, dims) for dims, (n, m) in shapes.items()]
    program = compiled.program(*args)
    assert [record.kind for record in program.collectives] == ["all_gather", "reduce_scatter", "reduce_scatter"]
    np.testing.assert_array_equal(md.simulate(program, *args)[0], step(*args).numpy())


def test_weights_gathered_again_take_less_memory_and_change_nothing() -> None:
    right, _ = run(OPTIMIZERS["adam"](), "x:4 y:2", "batch:x hidden:y", "sharded", steps=2)
    got, again = run(OPTIMIZERS["adam"](), "x:4 y:2", "batch:x hidden:y", "sharded", steps=2, regather=True)
    assert difference(right, got) <= TOLERANCE
    gathers = [r.count for r in again.program(*example("adam")).collectives if r.kind == "all_gather" and "x" in r.axes]
    assert sorted(gathers) == [1, 1, 1, 1, 1, 3, 3, 3]  # the layers' one by one, forward and backward
    workload = lm.replace(layers=8, batch=8, length=8, d_model=64, d_ff=256)
    peaks = [
        compiled_with(
            workload.train_step(), "x:8", "batch:x", weight_update="sharded", donate=(0, 1), regather=regather
        )
        .cost(*workload.specs(), machine="tpu-v5e")
        .memory.peak
        for regather in (False, True)
    ]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("layers", [False, True])
def test_weights_of_a_float32_copy_are_stored_sharded_if_they_are_gathered_again(layers: bool) -> None:
    """The update computes the bfloat16 weights, and reads only their float32 copies."""

    def loss(p: Any, x: md.Tensor) -> md.Tensor:
        def layer(h: md.Tensor, w: md.Tensor) -> Any:
            return md.tanh(md.rename(md.einsum(h, w, out="batch out"), out="io")), None

        h = md.cast(x, "bfloat16")
        h = md.scan(layer, h, p["w"], over="layer")[0] if layers else layer(h, p["w"])[0]
        return md.mean(md.square(md.cast(h * p["scale"], "float32")))

    def step(p: Any, master: Any, x: md.Tensor) -> Any:
        grads = md.grad(loss)(p, x)
        master = jax.tree.map(lambda m, g: m - 0.1 * md.cast(g, "float32"), master, grads)
        return jax.tree.map(lambda m: md.cast(m, "bfloat16"), master), master

    rng = np.random.default_rng(0)
    dims = {"w": "layer:3 io:16 out:16" if layers else "io:16 out:16", "scale": "io:16"}
    master = {k: md.tensor(rng.normal(size=[d.size for d in md.dims(v)]).astype("float32"), v) for k, v in dims.items()}
    given = (
        {k: md.cast(v, "bfloat16") for k, v in master.items()},
        master,
        md.tensor(rng.normal(size=(32, 16)).astype("float32"), "batch io"),
    )
    wanted = jax.tree.leaves(compiled_with(step, "x:8", "batch:x")(*given))
    for update in (md.WeightUpdate("sharded"), md.WeightUpdate("sharded", regather=True)):
        compiled = md.compile(step, "x:8", "batch:x", weight_update=update)
        made = compiled.program(*given)
        assert all(v.sharding.split_axes for v in (*made.ins, *made.outs) if v.dtype == "float32" or update.regather)
        for got, right in zip(jax.tree.leaves(compiled(*given)), wanted, strict=True):
            np.testing.assert_allclose(
                got.numpy().astype("float32"), right.numpy().astype("float32"), rtol=2e-2, atol=2e-3
            )


def test_weights_that_no_backward_pass_reads_cannot_be_gathered_again() -> None:
    def step(p: md.Tensor, x: md.Tensor) -> md.Tensor:
        return p - 0.1 * md.grad(lambda p: md.mean(md.square(md.dot(x, p, "io"))))(p)

    regather = md.WeightUpdate("sharded", regather=True)
    compiled = md.compile(step, "x:4", "batch:x", weight_update=regather)
    with pytest.raises(md.NoEffectError, match=r"regather=True has no effect: .* \(p\)"):
        compiled.program(md.spec("io:8 out:8"), md.spec("batch:8 io:8"))


def test_expert_weights_whose_gradients_are_not_summed_say_so() -> None:
    def step(params: Any, x: md.Tensor) -> Any:
        def loss(params: Any) -> md.Tensor:
            y = md.einsum(x, params["experts"], out="expert token out")
            return md.mean(md.square(md.einsum(y, params["head"], out="expert token")))

        grads = md.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    compiled = md.compile(step, "x:4", "expert:x", weight_update="sharded")
    params = {"experts": md.spec("expert:4 io:8 out:8"), "head": md.spec("out:8")}
    compiled.program(params, md.spec("expert:4 token:8 io:8"))
    experts, head = compiled.weight_update.decisions
    assert not experts.sharded and experts.reason == "its gradient is not a sum over devices"
    assert head.sharded and head.split == (("out", ("x",)),)


def test_groups_over_several_axes_and_weights_that_the_layout_splits() -> None:
    workload = adam_mlp()
    step = md.compile(workload.train_step(), "x:2 y:2 z:2", "batch:x,y; hidden:z", weight_update="sharded")
    step.program(*workload.specs())
    splits = {d.weight: d.split for d in step.weight_update.decisions}
    assert splits["params/w"] == (("io", ("x", "y")),)
    assert splits["params/bias"] == (("hidden", ("z", "x", "y")),)
    assert splits["params/v"] == (("hidden", ("z", "x", "y")),)


def test_auto_asks_the_machine() -> None:
    workload = adam_mlp()
    step = md.compile(workload.train_step(), "x:8", "batch:x", weight_update="auto", machine="tpu-v5e")
    step.program(*workload.specs())
    saved = [(d.sharded, d.seconds_saved) for d in step.weight_update.decisions]
    assert all(seconds is not None and sharded == (seconds > 0) for sharded, seconds in saved)


def test_auto_shards_slower_updates_where_the_fastest_do_not_fit_the_machine() -> None:
    def report(machine: md.Machine) -> Any:
        update = md.WeightUpdate("auto", regather=True)
        step = md.compile(
            mlp.train_step(), "rows:8", "batch:rows", weight_update=update, machine=machine, donate=(0, 1)
        )
        return step.cost(*mlp.specs(), machine=machine)

    fast = report(h100 := md.machine("h100"))
    small = report(dataclasses.replace(h100, hbm=fast.peak_bytes - 1.0))
    assert small.fits and small.seconds > fast.seconds


def test_auto_times_ragged_exchanges() -> None:
    experts = gpt_moe.replace(layers=2, exchange="ragged")
    mesh, layout = experts.layouts["experts"]
    step = md.compile(experts.train_step(), mesh, layout, weight_update="auto", machine="h100")
    assert "ragged_all_to_all" in {record.kind for record in step.program(*experts.specs()).collectives}


def test_weights_that_are_arguments_themselves():
    def step(w: md.Tensor, v: md.Tensor, x: md.Tensor) -> Any:
        def loss(w: md.Tensor, v: md.Tensor) -> md.Tensor:
            return md.mean(md.square(md.einsum(md.tanh(md.einsum(x, w, out="batch h")), v, out="batch")))

        value, (dw, dv) = md.value_and_grad(loss, argnums=(0, 1))(w, v)
        return value, w - 0.1 * dw, v - 0.1 * dv

    draw = np.random.RandomState(0)
    w, v, x = (
        md.tensor(draw.randn(*sizes), dims) for sizes, dims in (((4, 8), "io h"), ((8,), "h"), ((16, 4), "b io"))
    )
    x = md.rename(x, b="batch")
    compiled = md.compile(step, "x:4", "batch:x", weight_update="sharded")
    for right, got in zip(step(w, v, x), compiled(w, v, x), strict=True):
        assert difference(right.numpy(), got.numpy()) <= TOLERANCE
    assert [(d.weight, d.sharded) for d in compiled.weight_update.decisions] == [("w", True), ("v", True)]
    alone = md.compile(lambda w, x: step(w, v, x)[1], "x:4", "batch:x", weight_update="sharded")
    assert "1 of 1 sharded" in (alone.program(w, x) and str(alone.weight_update))


def test_an_average_of_the_weights_has_their_paths_too():
    adam = OPTIMIZERS["adam"]()

    def step(params: Any, state: Any, average: Any, batch: Any) -> Any:
        grads = md.grad(loss)(params, batch)
        params, state = adam.update(grads, state, params)
        return params, state, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)

    params, state, batch = example("adam")
    steps = [md.compile(step, "x:4", "batch:x", weight_update=mode) for mode in ("replicated", "sharded")]
    right, got = (jax.tree.map(lambda x: x.numpy(), f(params, state, params, batch)) for f in steps)
    assert difference(right, got) <= TOLERANCE
    assert all(d.weight.startswith("params/") for d in steps[1].weight_update.decisions)
    records = steps[1].program(params, state, params, batch).collectives
    found = Counter(r.kind for r in records)
    assert found["reduce_scatter"] == found["all_gather"] == len(jax.tree.leaves(params)), found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weight_update": "shraded"}, "weight_update='shraded' is not available; did you mean 'sharded'?"),
        ({"regather": True}, "regather=True has no effect with weight_update='replicated'"),
        ({"weight_update": "sharded", "machine": "tpu-v5e"}, "has no effect with weight_update='sharded'"),
    ],
)
def test_flags_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(md.LayoutError, match=text.replace("(", r"\(").replace("?", r"\?")):
        compiled_with(lambda x: x, "x:8", "", **options).program(md.spec("batch:8"))


def test_an_update_inside_a_while_loop_says_so() -> None:
    def update(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return w - 0.1 * md.grad(lambda w: md.mean(md.square(md.einsum(x, w, out="batch"))))(w)

    def loop(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, update(c[1], x)), (md.tensor(0, ""), w))[1]

    compiled = md.compile(loop, "x:4", "batch:x", weight_update="sharded")
    with pytest.raises(md.LayoutError, match=r"w: its update is inside a while_loop at tests/updates"):
        compiled.program(md.spec("io:8"), md.spec("batch:8 io:8"))


def pooled(params: Any, x: md.Tensor) -> md.Tensor:
    """The readout of a whole batch: the gradient of its bias is no sum over a batch."""
    h = md.mean(md.einsum(x, params["w"], out="batch model"), "batch")
    logits = md.einsum(h, params["out"], out="vocab") + params["b"]
    return md.nn.softmax_cross_entropy(logits, md.cast(md.sum(logits) * 0, "int32"), over="vocab")


def convolved(params: Any, x: md.Tensor) -> md.Tensor:
    return md.mean(md.square(md.conv(x, params["k"], window={"length": "kk"}, out="batch length cout")))


POOLED = {"w": md.spec("io:4 model:8"), "out": md.spec("model:8 vocab:5"), "b": md.spec("vocab:5")}


@pytest.mark.parametrize(
    ("loss", "params", "x", "layout", "sharded"),
    [
        (pooled, POOLED, "batch:8 io:4", "model:p batch:q", ["w"]),
        (pooled, POOLED, "batch:8 io:4", "batch:p,q", ["w"]),
        (convolved, {"k": md.spec("kk:3 model:4 cout:4")}, "batch:8 length:6 model:4", "batch:q kk:q", []),
        (convolved, {"k": md.spec("kk:3 model:4 cout:4")}, "batch:8 length:6 model:4", "batch:p,q kk:q", ["k"]),
    ],
)
def test_what_is_legal_replicated_is_legal_sharded(
    loss: Any, params: Any, x: str, layout: str, sharded: list[str]
) -> None:
    def step(params: Any, x: md.Tensor) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, md.grad(loss)(params, x))

    compiled = md.compile(step, "p:3 q:2", layout, weight_update="sharded")
    program = compiled.program(params, md.spec(x))
    assert all(record.kind != "all_reduce" or record.bytes <= 32 for record in program.collectives)  # activations only
    decisions = compiled.weight_update.decisions
    assert [d.weight for d in decisions if d.sharded] == [f"params/{name}" for name in sharded]
    assert all(d.sharded or "gradient" in d.reason for d in decisions)


def test_nothing_to_shard_is_an_error_that_says_why() -> None:
    workload = adam_mlp()
    step = md.compile(workload.train_step(), "x:8", "hidden:x", weight_update="sharded")
    with pytest.raises(md.LayoutError, match="nothing to shard") as error:
        step.program(*workload.specs())
    assert "params/w: its gradient is not a sum over devices" in str(error.value)
    gradients, (params, _, batch) = md.grad(workload.loss(workload.config)), workload.specs()
    with pytest.raises(md.LayoutError, match="params/w: it is replaced by its gradient, so there is no update"):
        md.compile(gradients, "x:8", "batch:x", weight_update="sharded").program(params, batch)
    assert md.compile(gradients, "x:8", "batch:x", weight_update="auto").program(params, batch).collectives


def test_results_can_be_read_and_given_back_whatever_their_storage() -> None:
    params, x = {"w": md.tensor(np.arange(15.0).reshape(3, 5), "a b")}, md.tensor(np.ones((8, 3)), "batch a")

    def step(params: Any, x: md.Tensor) -> Any:
        grads = md.grad(lambda p: md.mean(md.square(md.dot(x, p["w"], "a"))))(params)
        return {"w": params["w"] - 0.1 * grads["w"]}

    sharded = md.compile(step, "x:8", "batch:x", weight_update="sharded")
    plain = md.compile(step, "x:8", "batch:x")
    one, other = sharded(params, x), plain(params, x)
    assert one["w"].dims == other["w"].dims and one["w"].stored.shape == (3, 8)
    np.testing.assert_allclose(one["w"].numpy(), other["w"].numpy(), rtol=1e-13)
    np.testing.assert_allclose(plain(one, x)["w"].numpy(), sharded(other, x)["w"].numpy(), rtol=1e-13)


def test_single_tensors_are_matched_by_name() -> None:
    def step(w: md.Tensor, rate: md.Tensor, x: md.Tensor) -> dict[str, md.Tensor]:
        g = md.grad(lambda w: md.mean(md.square(md.dot(x, w, "io"))))(w)
        return {"rate": 0.5 * rate, "w": w - rate * g}  # results are in the order of their names

    args = md.spec("io:4 hidden:3"), md.spec("io:4 hidden:3"), md.spec("batch:4 io:4")
    compiled = md.compile(step, "p:2", "batch:p", weight_update="sharded")
    program = compiled.program(*args)
    assert [(d.weight, d.sharded) for d in compiled.weight_update.decisions if d.sharded] == [("w", True)]
    assert program.outs[1].sharding == program.ins[0].sharding
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=t.shape).astype("f4") for t in args]
    plain = md.compile(step, "", "").program(*args)
    for got, want in zip(md.simulate(program, *xs), md.simulate(plain, *xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_rename_of_a_sharded_update_prints_no_cause() -> None:
    args = md.spec("io:4 hidden:3"), md.spec("batch:4 io:4")
    f = lambda w, x: w - md.grad(lambda w: md.mean(md.square(md.dot(x, w, "io"))))(w)  # noqa: E731 - one step
    program = md.compile(f, "p:2", "batch:p", weight_update="sharded").program(*args)
    assert {program.note(eqn) for eqn in program.eqns if not eqn.sends} == {""}
