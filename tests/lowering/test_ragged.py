"""A ragged exchange sends what is filled and gives what the padded one gives; where there is none, no mark is left."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.ir import Eqn, Op, Var, walk
from meshdsl.lowering.blocks import FILLED
from meshdsl.lowering.emit import PLAIN, emit
from meshdsl.lowering.ragged import RaggedAllToAll
from meshdsl.ops.ragged import RAGGED
from tests.lowering.test_mutants import mutants, noticed, with_op


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: Any,
) -> Any:
    """`lax.ragged_all_to_all` on CPU as JAX documents it: rows move to their senders' offsets; -1 for broken rules."""

    def everybodys(a: Any) -> Any:
        return lax.all_gather(a, axis_name)

    n, me, rows = lax.axis_size(axis_name), lax.axis_index(axis_name), jnp.arange(len(output))[:, None]
    each = len(input_offsets) // n
    sent, starts, sizes, ends = (
        lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    starts, sizes, ends = (
        lax.dynamic_slice_in_dim(a, me * each, each, axis=1).reshape(-1) for a in (starts, sizes, ends)
    )
    here = (rows >= ends) & (rows < ends + sizes)  # [row, run]
    run = here.argmax(1)
    came = sent[run // each, jnp.clip(rows[:, 0] - ends[run] + starts[run], 0, len(operand) - 1)]
    broken = (here.sum(1) > 1) | (recv_sizes[run] != sizes[run])

    def each_row(a: Any) -> Any:
        return a.reshape((-1,) + (1,) * (output.ndim - 1))

    return jnp.where(each_row(here.any(1)), jnp.where(each_row(broken), -1, came), output)


def crossing(x: md.Tensor, n: md.Tensor) -> md.Tensor:
    """Slots of groups to experts and back, marked on the groups' side, doubled."""
    there = md.rename(md.ragged(x, n, "slot"), group="expert_group", gate="expert")
    slots = md.prefer(md.relu(there), "expert")
    return md.ragged(md.rename(md.prefer(slots * 2, "expert"), expert_group="group", expert="gate"), n, "slot")


X, N = "group:8 gate:8 slot:4 model:3", "group:8 gate:8"
CASES = [
    ("a:4", "group:a expert:a", X, 2),
    ("a:2 b:2", "group:a,b expert:a,b", X, 2),
    ("a:2 b:2", "group:b,a expert:b,a", X, 2),  # another order of the axes than the mesh's
    ("a:2 b:2", "group:b,a expert:a expert_group:b", X, 2),
    ("a:2 b:2", "group:a expert:a slot:b", X, 2),  # each device has some slots of each expert
    ("a:2 b:2", "group:a expert:a model:b", X, 2),
    ("a:2", "group:a expert:a", "model:3 gate:8 slot:4 group:8", 2),  # stored in another order
    ("a:2", "group:a expert:a", "group:8 gate:8 slot:4", 2),  # a number in each slot
    ("a:2 b:2 c:2", "group:b,a expert:a expert_group:b slot:c", "group:7 gate:8 slot:3 model:3", 2),  # padding in all
    ("a:4", "group:a expert:a", "group:8 gate:6 slot:4 model:3", 2),  # experts are padded, what the gate sees is not
]


def values(x: str) -> tuple[np.ndarray, np.ndarray]:
    """Slots, filled throughout, and counts from none to all."""
    random = np.random.default_rng(0)
    sizes = {d.name: d.size for d in md.dims(x)}
    counts = random.integers(0, 5, (sizes["group"], sizes["gate"]), np.int32)
    return random.integers(1, 100, list(sizes.values())).astype(np.float32), counts


def filled(x: np.ndarray, counts: np.ndarray, dims: str) -> np.ndarray:
    """Zeros past the counts."""
    order = [d.name for d in md.dims(dims)]
    first = ["group", "gate", "slot", *(d for d in order if d == "model")]
    y = np.transpose(x, [order.index(d) for d in first])
    there = np.arange(x.shape[order.index("slot")]) < counts[..., None]
    y = np.where(there.reshape(there.shape + (1,) * (y.ndim - 3)), y, 0)
    return np.transpose(y, [first.index(d) for d in order])


@pytest.mark.parametrize(("mesh", "layout", "dims", "exchanges"), CASES)
def test_what_is_filled_arrives(
    mesh: str, layout: str, dims: str, exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, counts = values(dims)
    groups = f"group:{len(counts)} gate:{counts.shape[1]}"
    compiled = md.compile(crossing, mesh, layout)
    program = compiled.program(md.spec(dims), md.spec(groups, "int32"))
    kinds = [c.kind for c in program.collectives]
    assert kinds.count("ragged_all_to_all") == exchanges
    assert kinds.count("all_to_all") + kinds.count("all_gather") == 1  # the counts go once
    (simulated,) = md.simulate(program, x, counts)
    np.testing.assert_array_equal(simulated, 2 * filled(x, counts, dims))
    found = md.verify(compiled.lower(md.spec(dims), md.spec(groups, "int32")).as_text(), program)
    assert found.equal, str(found)
    arguments = md.tensor(x, dims), md.tensor(counts, groups)
    np.testing.assert_array_equal(compiled(*arguments).numpy(), simulated)  # CPU devices send every slot
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(sys.modules["meshdsl.compile.signature"], "emit", lambda program, mesh, _: emit(program, mesh))
    ran = md.compile(crossing, mesh, layout)(*arguments)
    np.testing.assert_array_equal(ran.numpy(), simulated)


@pytest.mark.parametrize(("mesh", "layout", "dims", "exchanges"), CASES)
def test_runs_of_slots_arrive(
    mesh: str, layout: str, dims: str, exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two numbers for a cell, the slots of a run are sent, from its first one on, and arrive at their places."""
    if "slot:" in layout or "gate:6" in dims or "model:b" in layout:
        pytest.skip("a run is of one device's slots, and plans have no runs of padded cells; this test pads nothing")
    x, counts = values(dims)
    groups = f"group:{len(counts)} gate:{counts.shape[1]}"
    program = md.compile(crossing, mesh, layout).program(md.spec(dims), md.spec(groups, "int32"))
    first = np.minimum(np.random.default_rng(2).integers(0, 4, counts.shape, np.int32), 4 - counts)
    cells = program.ins[1].dims
    run = Var((*cells, md.Dim("run", 2)), np.dtype("int32"), "run", program.ins[1].sharding)
    made: dict[Var, Var] = {program.ins[1]: run}
    eqns: list[Eqn] = []
    for eqn in program.eqns:  # the counts, and what follows from them alone, become runs
        if eqn.ins and all(v in made for v in eqn.ins):
            (out,), shape = eqn.outs, (*(d for d in eqn.outs[0].dims if not d.name.endswith("__parts")), run.dims[-1])
            made[out] = made[eqn.ins[0]] if eqn.op is FILLED else replace(out, dims=shape)
            params = {key: shape if key == "shape" else value for key, value in eqn.params.items()}
            if eqn.op is not FILLED:
                eqns.append(eqn.replace(ins=(made[eqn.ins[0]],), outs=(made[out],), params=params))
        else:
            eqns.append(eqn.replace(ins=tuple(made.get(v, v) for v in eqn.ins)))
    runs = program.replace(ins=(program.ins[0], run), eqns=tuple(eqns))
    both = np.stack([first, counts], -1)
    (simulated,) = md.simulate(runs, x, both)
    place = (np.arange(4) >= first[..., None]) & (np.arange(4) < (first + counts)[..., None])
    order = [d.name for d in md.dims(dims)]
    names = ["group", "gate", "slot", *(d for d in order if d == "model")]
    there = np.transpose(x, [order.index(d) for d in names])
    wanted = np.where(place.reshape(place.shape + (1,) * (there.ndim - 3)), 2 * there, 0)
    np.testing.assert_array_equal(simulated, np.transpose(wanted, [names.index(d) for d in order]))
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    for emission in (PLAIN, replace(PLAIN, ragged=False)):
        (ran,) = jax.jit(emit(runs, runs.mesh.bind(), emission))(x, both)
        np.testing.assert_array_equal(np.asarray(ran), simulated)


SPECS = md.spec(X), md.spec(N, "int32")


def test_every_mutant_is_noticed() -> None:
    program = md.compile(crossing, "a:2 b:2", "group:a expert:a").program(*SPECS)
    runs = [(list(values(X)), md.simulate(program, *values(X)))]
    hows = set[str]()
    for eqn in program.eqns:
        if isinstance(eqn.op, RaggedAllToAll) or str(eqn.op).startswith("all_to_all"):
            for mutant in mutants(eqn.op, program.mesh):
                assert noticed(with_op(program, eqn, mutant), runs), f"nobody notices: {mutant}"
                hows.add(mutant.how)
    assert hows == {"dropped", "wrong axis in", "one slot less of"}


def test_the_counts_are_exchanged_once_and_the_report_says_at_most() -> None:
    program = md.compile(crossing, "a:4", "group:a expert:a").program(*SPECS)
    counts, there, back = program.collectives
    assert (counts.kind, counts.dtype, counts.bytes) == ("all_to_all", np.int32, 2 * 8 * 4)
    assert str(counts.cause) == f"{there.cause}, the counts" == "group -> gate for rename, the counts"
    assert there.bytes == back.bytes == 2 * 8 * 4 * 3 * 4 and there.wire_bytes == there.bytes * 3 // 4
    assert "at most 768 B" in str(there) and "at most 768 B" in str(program) and "at most" not in str(counts)


@pytest.mark.parametrize("layout", ["group:a expert_group:a", "expert:a", "gate:a", "slot:a", "model:a", ""])
def test_where_nothing_is_exchanged_the_program_is_that_without_marks(layout: str) -> None:
    def plain(x: md.Tensor, n: md.Tensor) -> md.Tensor:
        there = md.rename(x, group="expert_group", gate="expert")
        slots = md.prefer(md.relu(there), "expert")
        return md.rename(md.prefer(slots * 2, "expert"), expert_group="group", expert="gate")

    def lines(f: Callable[..., md.Tensor]) -> list[str]:
        return [line.partition("  #")[0] for line in str(md.compile(f, "a:4", layout).program(*SPECS)).splitlines()]

    assert lines(crossing) == lines(plain)


def test_slots_that_hold_nothing_need_no_counts() -> None:
    compiled = md.compile(crossing, "a:4", "group:a expert:a")
    specs = md.spec("group:8 gate:8 slot:4 model:0"), SPECS[1]
    assert [c.kind for c in compiled.program(*specs).collectives] == ["all_to_all", "all_to_all"]
    assert md.verify(compiled.lower(*specs).as_text(), compiled.program(*specs)).equal


def test_what_others_read_on_another_way_is_sent_whole() -> None:
    def f(x: md.Tensor, n: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """The mark is on a tensor that somebody else exchanges as it is."""
        whole = md.rename(x, group="expert_group", gate="expert")
        return md.relu(whole), crossing(x, n)

    program = md.compile(f, "a:4", "group:a expert:a").program(*SPECS)
    x, counts = values(X)
    whole, some = md.simulate(program, x, counts)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(some, 2 * filled(x, counts, X))


def test_the_gradient_is_marked_with_the_same_counts() -> None:
    step = md.compile(md.grad(lambda x, n: md.sum(md.square(crossing(x, n)))), "a:4", "group:a expert:a")
    assert [c.kind for c in step.program(*SPECS).collectives].count("all_to_all") == 1
    backward = [c.backward for c in step.program(*SPECS).collectives if c.kind == "ragged_all_to_all"]
    assert backward == [False, False, True, True]
    x, counts = values(X)
    (got,) = md.simulate(step.program(*SPECS), x, counts)
    np.testing.assert_array_equal(got, 8 * filled(x, counts, X))


def test_in_loops_and_branches() -> None:
    def looped(x: md.Tensor, n: md.Tensor) -> md.Tensor:
        y = md.scan(lambda y, _: (crossing(y, n), None), x, None, over=md.Dim("t", 3))[0]
        return md.cond(md.sum(n) > 0, crossing, lambda x, n: x, y, n)

    program = md.compile(looped, "a:4", "group:a expert:a").program(*SPECS)
    assert [(c.kind, c.count) for c in program.collectives if c.kind == "ragged_all_to_all"] == [
        *[("ragged_all_to_all", 3)] * 2,
        *[("ragged_all_to_all", 1)] * 2,
    ]
    assert not any(eqn.op is RAGGED for eqn, _ in walk(program))
    x, counts = values(X)
    np.testing.assert_array_equal(md.simulate(program, x, counts)[0], 16 * filled(x, counts, X))


@pytest.mark.parametrize(("layout", "dim"), [("slot:a expert:a", "slot"), ("model:a expert:a", "model")])
def test_an_exchange_that_cuts_what_is_not_counted_is_refused(layout: str, dim: str) -> None:
    with pytest.raises(md.LayoutError) as caught:
        md.compile(crossing, "a:2", layout).program(md.spec("group:8 gate:8 slot:4 model:2"), SPECS[1])
    assert f"'all_to_all {dim} -> gate over a'" in str(caught.value)
    assert f"cuts or joins {dim!r} of [group=8 gate=8 slot=4 model=2]" in str(caught.value)
    assert "runs of whole 'slot', one for each place of 'group', 'gate'" in str(caught.value)


def test_counts_that_come_after_the_exchange_are_refused() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        there = md.rename(x, group="expert_group", gate="expert")
        return md.ragged(there, md.cast(md.sum(there > 0, ["slot", "model"]), "int32"), "slot")

    with pytest.raises(md.LayoutError, match=r"the counts that md\.ragged got are computed after it"):
        md.compile(f, "a:4", "group:a expert:a").program(SPECS[0])


@pytest.mark.parametrize(
    ("counts", "share", "text"),
    [
        (md.tensor([1, 1], "a"), 1.0, "counts are [a=2]"),
        (md.tensor([1, 1], "other"), 1.0, "counts are [other=2]"),
        (md.tensor([1.0, 1.0], "b"), 1.0, "counts in integers"),
        (md.tensor([1, 1], "b"), 1.5, "from 0 to 1, got 1.5"),
    ],
)
def test_what_are_no_counts_is_refused(counts: md.Tensor, share: float, text: str) -> None:
    with pytest.raises(md.ShapeError) as caught:
        md.ragged(md.tensor([[1.0, 2.0], [3.0, 4.0]], "b a"), counts, "a", share)
    assert text in str(caught.value)


def test_the_simulator_notices_counts_that_differ() -> None:
    program = md.compile(crossing, "a:4", "group:a expert:a").program(*SPECS)
    first = next(eqn for eqn in program.eqns if isinstance(eqn.op, RaggedAllToAll))
    zeros = next(eqn for eqn in program.eqns if eqn.outs[0] is first.ins[2])
    assert isinstance(zeros.op, Op)
    off = dataclasses.replace(zeros.op, kernel=lambda c, n, **_: c.xp.zeros((*n.shape, 1), np.int32))
    with pytest.raises(md.InternalError, match="expects other counts than are sent"):
        md.simulate(with_op(program, zeros, off), *values(X))


@pytest.mark.parametrize("model", [6, 7])
@pytest.mark.parametrize("experts", [3, 5, 8])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("r:4 c:2", "batch:r; expert:r,c"),
        ("r:4 c:2", "batch:r; expert:c,r"),
        ("r:2 c:2", "batch:r,c; expert:r,c"),
        ("r:4", "batch:r; expert:r"),
    ],
)
def test_any_number_of_experts_over_any_axes_gives_what_the_padded_exchange_gives(
    mesh: str, layout: str, experts: int, model: int
) -> None:
    """A plan may not split a dim without counts on the way, even if that sends less."""

    def loss(exchange: str) -> Any:
        expert, hidden = md.Dim("expert", experts), md.Dim("expert_hidden", 9)
        layer = md.model(
            lambda x: md.nn.moe_layer(x, expert, hidden, router="switch", dispatch="index", exchange=exchange)[0]
        )
        return layer, md.value_and_grad(lambda p, x: md.sum(md.square(layer(p, x))), argnums=(0, 1))

    x = md.tensor(np.random.default_rng(0).normal(size=(4, 20, model)), f"batch:4 length:20 model:{model}")
    layer, padded = loss("padded")
    params = layer.init(md.random.key(0), x)
    program = md.compile(loss("ragged")[1], mesh, layout).program(params, x)
    assert any(isinstance(record.op, RaggedAllToAll) for record in program.collectives)
    arrays = jax.tree.leaves((params, x))
    wanted = md.simulate(md.compile(padded, mesh, layout).program(params, x), *arrays)
    for a, b in zip(md.simulate(program, *arrays), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
