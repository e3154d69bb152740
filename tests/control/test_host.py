"""Values that are offloaded to the host's memory: md.checkpoint(f, "offload")."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.control.host import FETCH, OFFLOAD, host_values
from meshdsl.errors import InternalError
from meshdsl.ir import walk
from meshdsl.lowering import Program
from meshdsl.lowering.check import check
from meshdsl.models.transformer import lm

TINY = lm.replace(layers=3, d_model=16, d_ff=32, vocab=24, heads=2, d_head=8, batch=8, length=8)
H100 = md.machine("h100")


def step_of(remat: str, layout: str = "data_model", **knobs: Any) -> md.Compiled:
    mesh, rules = TINY.layouts[layout]
    return md.compile(TINY.train_step(), plan=md.Plan(mesh, rules, remat=remat, **knobs), donate=(0, 1))


def count(program: Program) -> tuple[int, int]:
    """The number of equations that copy to the host, and from it."""
    ops = [eqn.op for eqn, _ in walk(program)]
    return ops.count(OFFLOAD), ops.count(FETCH)


def arguments() -> tuple[Any, Any, dict[str, md.Tensor]]:
    params, state = TINY.init(md.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 24, 64)
    specs = TINY.inputs(TINY.config)
    batch = {name: md.tensor(tokens.reshape(8, 8).astype(x.dtype), x.dims) for name, x in specs.items()}
    return params, state, batch


def leaves_of(values: Any) -> list[Any]:
    return jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, md.Tensor))


@pytest.mark.parametrize("layout", list(TINY.layouts))
def test_offload_sends_and_computes_the_same_as_full(layout: str) -> None:
    full, offload = (step_of(remat, layout).program(*TINY.specs()) for remat in ("full", "offload"))
    assert count(offload) == (1, 1) and count(full) == (0, 0)  # the layer's input, and none of its parameters
    assert list(map(str, offload.collectives)) == list(map(str, full.collectives))
    values = [x.numpy() for x in leaves_of(arguments())]
    for a, b in zip(md.simulate(offload, *values), md.simulate(full, *values), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("microbatches", [1, 8])  # 8: parts of one sequence, which no layout splits
def test_offload_in_a_run_equals_full_bitwise(microbatches: int) -> None:
    mesh, rules = TINY.layouts["data_model"]
    plan = md.Plan(mesh, rules, microbatches=microbatches)
    full, offload = (
        leaves_of(md.compile(TINY.train_step(), plan=plan.replace(remat=remat))(*arguments()))
        for remat in ("full", "offload")
    )
    for a, b in zip(offload, full, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_offloaded_values_leave_the_devices_memory() -> None:
    full, offload = (step_of(remat) for remat in ("full", "offload"))
    before, after = (md.memory(s.program(*TINY.specs()), donated=s.donated(*TINY.specs())) for s in (full, offload))
    rows = 3 * (8 // 2) * 8 * 16 * 4  # layers, the local batch, length, model, float32
    assert after.host == rows and before.host == 0
    assert after.peak <= before.peak and "in the host's memory" in str(after)
    held = [x for x in before.by_tensor if x.category == "saved activations" and x.bytes == rows]
    assert held and not [x for x in after.by_tensor if x.bytes == rows and x.category == "saved activations"]


def test_offload_of_layers_in_python_keeps_parameters_on_the_device() -> None:
    def loss(params: Any, x: md.Tensor) -> md.Tensor:
        for w in params:
            x = md.checkpoint(lambda x, w: md.tanh(md.rename(md.dot(x, w, "io"), out="io")), "offload")(x, w)
        return md.sum(md.square(x))

    weights, x = [md.spec("io:8 out:8")] * 3, md.spec("batch:4 io:8")
    program = md.compile(md.grad(loss), "r:2", "batch:r").program(weights, x)
    assert count(program) == (2, 2)  # the inputs of the second and of the third layer
    assert md.memory(program).host == 2 * 2 * 8 * 4


def test_unrolled_loops_offload_every_layer() -> None:
    mesh, rules = TINY.layouts["data"]
    step = md.compile(TINY.train_step(), plan=md.Plan(mesh, rules, remat="offload", unroll=True))
    program = step.program(*TINY.specs())
    assert count(program) == (3, 3)
    assert md.memory(program).host == 3 * 8 * 8 * 16 * 4 // md.Mesh(mesh).size


def test_under_vmap_stacks_stay_on_the_host() -> None:
    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        layer = md.checkpoint(lambda x, w: md.tanh(md.rename(md.dot(x, w, "io"), out="io")), "offload")
        return md.sum(md.square(md.scan(lambda x, w: (layer(x, w), None), x, w, over="layer")[0]))

    w, x = md.random.normal(md.random.key(0), "copy:2 layer:3 io:4 out:4"), md.tensor(np.ones((4, 4)), "batch io")
    step = md.compile(lambda w, x: md.vmap(md.grad(loss), over="copy")(w, x), "r:2", "copy:r")
    assert count(step.program(w, x)) == (1, 1)
    for i in range(2):
        one = md.tensor(w.numpy()[i], "layer io out")
        np.testing.assert_allclose(step(w, x).numpy()[i], md.grad(loss)(one, x).numpy(), rtol=1e-6)


def test_check_refuses_a_reader_of_an_offloaded_value() -> None:
    program = step_of("offload").program(*TINY.specs())
    loop = next(eqn for eqn in program.eqns if not host_values(program).isdisjoint(eqn.outs))
    (stack,) = host_values(program) & set(loop.outs)
    reader = next(eqn for eqn in program.eqns if not eqn.control and not eqn.sends and len(eqn.ins) == 1)
    wrong = dataclasses.replace(reader, ins=(stack,), outs=(dataclasses.replace(stack),))
    with pytest.raises(InternalError, match="reads a value in the host's memory"):
        check(program.replace(eqns=(*program.eqns, wrong)), "a test")
    with pytest.raises(InternalError, match="a result is in the host's memory"):
        check(program.replace(outs=(*program.outs, stack)), "a test")


def test_copies_are_hidden_if_the_link_is_fast_and_exposed_if_it_is_slow() -> None:
    step, specs = step_of("offload"), TINY.specs()
    fast, slow = (step.cost(*specs, machine=dataclasses.replace(H100, host_bandwidth=rate)) for rate in (1e15, 1e3))
    full = step_of("full").cost(*specs, machine=H100)
    assert fast.seconds == pytest.approx(full.seconds, rel=0.02)
    copied = 2 * fast.memory.host
    assert slow.seconds == pytest.approx(copied / 1e3, rel=0.02)
    assert slow.constraint == "link to the host's memory"
    assert sum(slow.parts.values()) == pytest.approx(slow.seconds)


def test_a_machine_without_a_host_link_says_what_to_add() -> None:
    with pytest.raises(md.MachineError, match=r"'tpu-v4' gives no host_bandwidth(.*\n)*.*add host_bandwidth"):
        step_of("offload").cost(*TINY.specs(), machine="tpu-v4")


def test_search_offloads_where_nothing_else_fits() -> None:
    deep = TINY.replace(layers=24)
    mesh, rules = deep.layouts["data_model"]
    plan = md.Plan(mesh, rules, remat="offload")
    need = md.compile(deep.train_step(), plan=plan, donate=(0, 1)).cost(*deep.specs(), machine=H100).peak_bytes
    options: dict[str, Any] = {"mesh": mesh, "layout": rules, "dims": [], "knobs": {"remat": ["full", "offload"]}}
    found = md.search(deep, machine=H100, limit=need, **options)
    assert found.plan is not None and found.plan.remat == "offload" and found.best.peak_bytes == need
    with pytest.raises(md.LayoutError, match=r"no plan costed fits(.*\n)*.*remat +full"):
        md.search(deep, machine=dataclasses.replace(H100, host_bandwidth=0.0), limit=need, **options)
