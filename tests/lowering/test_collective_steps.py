"""Collectives in steps: the same results, the bytes stated, chosen by time, and refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.network import place
from meshdsl.errors import InternalError
from meshdsl.ir import walk
from meshdsl.lowering.check import check
from meshdsl.lowering.collective_steps import REGROUP, in_steps
from meshdsl.models.transformer import lm
from tests.lowering import phases_law
from tests.stablehlo import cost_law

H100, MESH = md.machine("h100"), "node:4 gpu:8"
SMALL = lm.replace(length=8, vocab=40, layers=2, d_model=16, heads=2, d_head=8, d_ff=24, batch=32)


def steps_of(f: Any, layout: str, *specs: Any, steps: str = "always", mesh: str = MESH) -> md.Program:
    return md.compile(f, mesh, layout, steps=steps, machine=None if steps == "flat" else H100).program(*specs)


def slow(program: md.Program) -> list[Any]:
    return [record for record in program.collectives if "node" in record.axes]


def total(x: md.Tensor) -> md.Tensor:
    return md.sum(x, "batch")


@pytest.mark.parametrize("seed", range(30))
def test_steps_give_the_results_of_the_flat_program(seed: int):
    phases_law.case(seed)


CASES = {
    "all_reduce": (total, "batch:node,gpu", "batch:64 io:1024"),
    "all_gather": (lambda x: md.rename(x, batch="whole"), "batch:node,gpu", "batch:64 io:1024"),
    "reduce_scatter": (lambda x: md.rename(total(x), io="hidden"), "batch:node,gpu; hidden:node,gpu", "batch:64 io:64"),
    "all_to_all": (lambda x: md.rename(x, batch="a", io="b"), "batch:gpu,node; b:gpu,node", "batch:64 io:64"),
}


@pytest.mark.parametrize("kind", CASES)
def test_steps_send_less_over_the_slow_axis(kind: str):
    """A share of 1/8 with 8 devices along the fast axis; of an all_to_all, all bytes in messages 8 times as large."""
    f, layout, spec = CASES[kind]
    (flat,), step = slow(steps_of(f, layout, md.spec(spec), steps="flat")), steps_of(f, layout, md.spec(spec))
    (one,) = slow(step)
    assert (flat.kind, one.kind, one.axes) == (kind, kind, ("node",))
    assert str(one.cause).endswith("in steps: 'node' is slow on h100")
    assert one.bytes == (flat.bytes if kind == "all_to_all" else flat.bytes // 8)


@pytest.mark.parametrize("size", [7, 8, 9, 1024, 1025])
def test_steps_of_sizes_that_do_not_divide(size: int):
    """Fewer elements than devices along the fast axis stay flat; others are padded to a multiple."""
    (one,) = slow(steps_of(total, "batch:node,gpu", md.spec(f"batch:64 io:{size} more:3"))) if size > 7 else [None]
    assert one is None or one.bytes == -(-size * 3 // 8) * 4

    def two(x: md.Tensor, y: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return total(x), total(y)

    program = steps_of(two, "batch:node,gpu", md.spec("batch:64 io:5"), md.spec("batch:64 io:8"))
    assert [str(r.cause) for r in slow(program) if r.axes != ("node",)] == [
        "sum over 'batch' of sum, flat: 5 elements for 8 devices"
    ]


def test_steps_of_a_training_step_are_its_stablehlo():
    """Gradients in loops and in buckets, and a sharded update that gathers and scatters over both axes."""
    for update in (md.WeightUpdate(), md.WeightUpdate("sharded"), md.WeightUpdate("sharded", bucket_bytes=1e6)):
        step = md.compile(
            SMALL.train_step(), MESH, "batch:node,gpu; vocab:gpu", weight_update=update, steps="always", machine=H100
        )
        program = step.program(*SMALL.specs())
        assert cost_law(program, step.lower(*SMALL.specs()).as_text()) > 3
        flat = [r for r in slow(program) if len(r.axes) > 1]
        assert all("1 element for 8 devices" in str(r.cause) for r in flat), flat


def test_steps_are_taken_in_loops():
    def f(x: md.Tensor) -> md.Tensor:
        return md.scan(lambda c, row: (c, md.rename(row, io="whole")), md.tensor(0.0), x, over="layer")[1]

    program = steps_of(f, "io:node,gpu", md.spec("layer:3 io:64 n:2"))
    assert [(r.kind, r.axes, r.count) for r in program.collectives] == [
        ("all_gather", ("node",), 3), ("all_gather", ("gpu",), 3)
    ]  # fmt: skip


def test_steps_over_three_levels():
    mesh, layout = "slice:2 x:4 core:2", "batch:slice,x,core"
    step = md.compile(total, mesh, layout, steps="always", machine=phases_law.machine(mesh, 3))
    program = step.program(md.spec("batch:64 io:1000"))
    assert [(r.kind, r.axes, r.bytes) for r in program.collectives] == [
        ("reduce_scatter", ("core",), 4000), ("reduce_scatter", ("x",), 2000), ("all_reduce", ("slice",), 500),
        ("all_gather", ("x",), 2000), ("all_gather", ("core",), 4000),
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [16, 1024, 2**17, 2**22])
@pytest.mark.parametrize("kind", CASES)
def test_steps_auto_is_never_slower_than_flat(kind: str, columns: int):
    f, layout, _ = CASES[kind]
    spec = md.spec(f"batch:64 io:{columns}")
    seconds = {
        mode: md.compile(f, MESH, layout, steps=mode, machine=None if mode == "flat" else H100)
        .cost(spec, machine=H100).seconds
        for mode in ("flat", "auto", "always")
    }  # fmt: skip
    assert seconds["auto"] <= min(seconds["flat"], seconds["always"]) * (1 + 1e-9)


def test_steps_auto_takes_steps_where_latency_counts_and_not_where_bytes_do():
    kinds = [
        [r.kind for r in steps_of(total, "batch:node,gpu", md.spec(f"batch:64 io:{n}"), steps="auto").collectives]
        for n in (2**16, 2**26)
    ]
    assert kinds == [["all_reduce", "all_reduce"], ["all_reduce"]]


@pytest.mark.parametrize("kind", ["all_to_all", "all_reduce", "all_gather"])
def test_an_idle_fast_axis_carries_what_a_slow_one_would(kind: str):
    """Values that are replicated along `gpu`: by time, its devices divide what goes over `node`."""
    f, layout, _ = CASES[kind]
    f, layout, spec = f, layout.replace("gpu,node", "node").replace("node,gpu", "node"), md.spec("batch:64 io:1048576")
    flat, auto = (md.compile(f, MESH, layout, machine=machine) for machine in (None, H100))
    assert auto.cost(spec, machine=H100).seconds < 0.7 * flat.cost(spec, machine=H100).seconds
    (one,) = flat.program(spec).collectives
    assert f"faster than {one.kind}" in str(auto.program(spec).collectives[-1].cause)
    assert cost_law(auto.program(spec), auto.lower(spec).as_text()) == len(auto.program(spec).collectives)


def test_steps_without_a_machine_change_nothing():
    program = md.compile(total, MESH, "batch:node,gpu", steps="auto").program(md.spec("batch:64 io:65536"))
    assert [r.kind for r in program.collectives] == ["all_reduce"]
    with pytest.raises(md.LayoutError, match="needs a machine"):
        md.compile(total, MESH, "batch:node,gpu", steps="always")


@pytest.mark.parametrize(
    ("mesh", "layout", "spec", "says"),
    [
        ("node:4 gpu:2", "batch:node,gpu", "batch:64 io:64", "can be in steps\n  none is over mesh axes of"),
        ("data:32", "batch:data", "batch:64 io:64", r"data:32 on node:4 x gpu:8"),
        (MESH, "batch:node", "batch:64 io:64", "has no effect"),
        (MESH, "batch:node,gpu", "batch:64 io:4", "4 elements for 8 devices"),
    ],
)  # fmt: skip
def test_steps_always_without_effect_says_why(mesh: str, layout: str, spec: str, says: str):
    with pytest.raises(md.LayoutError, match=says):
        steps_of(total, layout, md.spec(spec), mesh=mesh)


def test_steps_of_a_max_stay_flat():
    with pytest.raises(md.LayoutError, match="a max cannot be scattered"):
        steps_of(lambda x: md.max(x, "batch"), "batch:node,gpu", md.spec("batch:64 io:64", "int32"))


def test_a_machine_decides_steps_only_on_a_mesh_with_a_slow_axis():
    assert md.compile(total, MESH, "batch:node,gpu", machine=H100).program(md.spec("batch:64 io:8")).collectives
    with pytest.raises(md.LayoutError, match="no slow axis on it"):
        md.compile(total, "node:4 gpu:2", "batch:node,gpu", machine=H100).program(md.spec("batch:64 io:8"))
    with pytest.raises(md.LayoutError, match="has no effect"):
        md.compile(total, MESH, "batch:node,gpu", machine=H100, steps="flat").program(md.spec("batch:64 io:8"))


def test_regroup_of_blocks_in_another_order_is_refused():
    """A mutant of the pass: the fast axis is taken for the major one."""
    f, layout, spec = CASES["all_gather"]
    program = steps_of(f, layout, md.spec(spec))
    (first, *_) = [eqn for eqn, _ in walk(program) if eqn.op is REGROUP]
    ((dim, parts),) = first.params["dims"].items()
    swapped = first.replace(params={**first.params, "dims": {dim: tuple(reversed(parts))}})
    wrong = program.replace(eqns=tuple(swapped if eqn is first else eqn for eqn in program.eqns))
    with pytest.raises(InternalError, match="regroup"):
        check(wrong, "test")


def test_results_of_a_step_in_steps_on_devices():
    """On eight CPU devices, as two nodes of four, beside the flat program: whole numbers, bit for bit."""
    on = phases_law.machine("node:2 gpu:4", 2)
    x = md.tensor(np.arange(8 * 5 * 3.0).reshape(8, 5, 3) % 7, "batch io n")
    flat = md.compile(total, "node:2 gpu:4", "batch:node,gpu")
    step = md.compile(total, "node:2 gpu:4", "batch:node,gpu", steps="always", machine=on)
    assert np.array_equal(step(x).numpy(), flat(x).numpy())
    same = in_steps(flat.program(x), "always", on.name, place(on.network, flat.mesh))
    assert [r.kind for r in same.collectives] == [r.kind for r in step.program(x).collectives]


def test_steps_of_a_divided_axis() -> None:
    """An axis that a weight update divides has a name with a dot, which no dim may have."""

    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return w - 0.1 * md.grad(lambda w: md.mean(md.square(md.dot(x, w, "io"))))(w)

    update = md.WeightUpdate("sharded", group=("node:2", "gpu"))
    compiled = md.compile(step, MESH, "batch:node,gpu", weight_update=update, steps="always", machine=H100)
    program = compiled.program(md.spec("io:64 hidden:64"), md.spec("batch:64 io:64"))
    assert {"node.inner", "node.outer"} <= {axis for record in program.collectives for axis in record.axes}
