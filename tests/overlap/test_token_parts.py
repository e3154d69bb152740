"""Parts of the tokens of a group keep the tokens, the loss and the results of the whole group, for every gate.

A group is several sequences of one device. A plan cuts the batch: routers in token order pass on the used slots from
part to part, and routers that order all tokens first have parts behind the gate.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import Eqn, verify
from meshdsl.lowering.check import check
from meshdsl.lowering.program import Program
from meshdsl.lowering.unroll import unroll
from meshdsl.models.gpt_moe import gpt2_moe
from meshdsl.overlap.filled import FILLED_DOT, FILLED_OUTER
from meshdsl.overlap.loops import LoopsInParts
from meshdsl.overlap.parts import JOIN_PARTS, PART, PLACED
from meshdsl.overlap.planner import bodies
from meshdsl.overlap.split import split
from tests.overlap.test_routers import DOUBLE, EXPERT, HIDDEN, MACHINE, ROUTERS, SINGLE, ids_of, planned, same

pytestmark = pytest.mark.usefixtures("fixed_order_of_sums")

WHERE = ("rows:4", "batch:rows; group:rows; expert:rows")
SEQUENCES, LENGTH = 4, 4  # of a group; there is one group for each device
HALF = md.nn.Precision(compute="bfloat16")
PASSING = {"switch": {}, "hash": {}, "random": {}, "top_k": {"k": 1, "normalize": "after"}}
BEHIND = {name: options for name, options in ROUTERS.items() if name not in (*PASSING, "expert_choice")}
CHOSEN = PASSING | BEHIND | {"top_k of 2": ROUTERS["top_k"]}


def step_of(router: str, precision: md.nn.Precision, **options: Any) -> tuple[Any, Any]:
    """A function to (loss, results, gradients), and its arguments: two layers of experts with dense ones around."""
    name = router.partition(" ")[0]
    options |= CHOSEN.get(router, ROUTERS.get(router, {}))

    def grouped(x: md.Tensor) -> md.Tensor:
        x = md.unflatten(x, "batch", [md.Dim("group", 4), md.Dim("sequence", SEQUENCES)])
        return md.flatten(x, "sequence length", "token")

    def ungrouped(y: md.Tensor) -> md.Tensor:
        y = md.unflatten(y, "token", [md.Dim("sequence", SEQUENCES), md.Dim("length", LENGTH)])
        return md.flatten(y, "group sequence", "batch")

    @md.model
    def model(x: md.Tensor, tokens: md.Tensor) -> Any:
        found: list[md.Tensor] = []
        total: Any = 0
        for layer in ("first", "second"):
            w = md.param(f"{layer}_dense", "model:8 inner:8", init=md.init.normal(0.3), dtype=precision.param)
            x = md.rename(md.tanh(md.dot(x, w, "model")), inner="model")
            y, aux = md.nn.moe_layer(
                grouped(x), EXPERT, HIDDEN, name=layer, tokens="token", precision=precision, router=name,
                **{"capacity_factor": 1.0, "dispatch": "index", **options}, **ids_of(name, grouped(tokens)),
            )  # fmt: skip
            y, total = ungrouped(y), total + aux
            x = x + md.cast(y, x.dtype)
            found += [y, md.all(y == 0, "model")]  # a dropped token's result is zero
        return x, total, found

    def step(params: dict[str, md.Tensor], x: md.Tensor, tokens: md.Tensor) -> Any:
        def loss(params: dict[str, md.Tensor]) -> Any:
            y, aux, found = model(params, x, tokens)
            return md.sum(md.sin(y)) + aux, found

        (value, found), grads = md.value_and_grad(loss, has_aux=True)(params)
        return value, found, grads

    x = md.spec(f"batch:{4 * SEQUENCES} length:{LENGTH} model:8", precision.param)
    tokens = md.spec(f"batch:{4 * SEQUENCES} length:{LENGTH}", "int32")
    return step, (model.specs(x, tokens), x, tokens)


@cache
def program_of(router: str, precision: md.nn.Precision = SINGLE, **options: Any) -> Program:
    step, types = step_of(router, precision, **options)
    return md.compile(step, *WHERE).program(*types)


@cache
def whole(router: str, precision: md.nn.Precision, uneven: float) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
    """Arguments, and the results of the whole groups. Of `uneven` tokens, most choose the same expert."""
    program = program_of(router, precision)
    rng = np.random.default_rng(5)
    given = tuple(
        np.minimum(rng.integers(0, 6, [d.size for d in v.dims]), 6 - 5 * uneven).astype(v.dtype)
        if v.dtype.kind == "i"
        else (rng.standard_normal([d.size for d in v.dims]) + 3 * uneven * (v.name == "1")).astype(v.dtype)
        for v in program.ins
    )
    return given, tuple(md.simulate(program, *given))


def filled_bytes(program: Program) -> float:
    """The expected bytes of the exchanges of slots; those of counts are left out."""
    sends = (r for r in program.collectives if "all_to_all" in r.kind and r.dtype.kind != "i")
    return sum(r.bytes * r.op.share for r in sends)


def law(
    router: str, parts: int, *, precision: md.nn.Precision = SINGLE, exchange: str = "padded", uneven: float = 0
) -> Program:
    """The program in parts along the batch, after the comparison with the whole, as it is and as a plan orders it."""
    given, wanted = whole(router, precision, uneven)
    program = program_of(router, precision, exchange=exchange)
    made = split(program, "batch", parts).program
    verify(made, "split")
    check(made, "split")
    same(made, wanted, md.simulate(made, *given), f"{router} in {parts} parts, {exchange}, {precision.compute}")
    assert filled_bytes(made) == filled_bytes(program) > 0
    ordered = planned(program, "halves", dim="batch", parts=parts)
    same(ordered, wanted, md.simulate(ordered, *given), f"{router}, planned in {parts}, {exchange}")
    return made


def alone(program: Program) -> bool:
    """True if the first exchange of slots needs only the first part of the batch."""
    made = {v: eqn for eqn in program.eqns for v in eqn.outs}
    sends = (e for e in program.eqns if e.collective is not None and "all_to_all" in e.collective.name)
    stack = [next(eqn for eqn in sends if eqn.outs[0].dtype.kind != "i")]
    seen = set[Eqn]()
    while stack:
        eqn = stack.pop()
        if eqn in seen:
            continue
        seen.add(eqn)
        stack += [made[v] for v in eqn.ins if v in made]
    return {eqn.params["index"] for eqn in seen if eqn.op is PART} == {0} and all(e.op is not JOIN_PARTS for e in seen)


@pytest.mark.parametrize("k", range(len(CHOSEN)), ids=list(CHOSEN))
def test_parts_of_a_group_keep_tokens_loss_and_results(k: int) -> None:
    router = list(CHOSEN)[k]
    made = law(router, (2, 4)[k % 2], exchange=("ragged", "padded")[k % 2], uneven=(0, 1)[k % 2])
    assert alone(made) == (router in PASSING)  # else the gate reads the whole group, and parts begin behind it
    _, (_, _, dropped, *_) = whole(router, SINGLE, (0, 1)[k % 2])
    assert 0 < dropped.sum() < dropped.size  # the capacity binds


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ragged", "padded"])
@pytest.mark.parametrize("router", CHOSEN)
def test_every_gate_in_every_number_of_parts(router: str, exchange: str) -> None:
    for precision in (SINGLE, DOUBLE):
        for parts in (2, 4):
            for uneven in (0, 0.3, 1):
                law(router, parts, precision=precision, exchange=exchange, uneven=uneven)


def test_products_of_parts_have_the_filled_slots_and_the_dtype_of_their_cast() -> None:
    """The results of the experts and the loss have the bits of the whole in narrow dtypes too."""
    given, wanted = whole("switch", HALF, 0)
    made = split(program_of("switch", HALF), "batch", 2).program
    verify(made, "split")
    for a, b in list(zip(wanted, md.simulate(made, *given), strict=True))[:5]:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    products = [eqn for eqn in made.eqns if eqn.op in (FILLED_DOT, FILLED_OUTER)]
    assert len(products) == 2 * 2 * 6 and all(eqn.params["share"] == 0.5 for eqn in products)
    assert {eqn.outs[0].dtype.name for eqn in products if not eqn.backward} == {"bfloat16"}


def test_routers_where_experts_choose_read_the_whole_group() -> None:
    assert not any(eqn.op is PLACED for eqn in split(program_of("expert_choice"), "batch", 2).program.eqns)


def test_dispatch_by_masks_is_not_cut() -> None:
    with pytest.raises(md.LayoutError, match=r"(?s)'batch': its parts end before every collective.*einsum"):
        planned(program_of("switch", dispatch="einsum"), "halves", dim="batch")


@cache
def layers_in_a_loop(router: str, remat: str) -> tuple[Program, tuple[np.ndarray, ...], tuple[Any, ...]]:
    """A step of four layers, two of them with experts; its arguments and its results."""
    model = gpt2_moe.replace(
        layers=4, d_model=8, heads=2, d_head=4, d_ff=8, expert_hidden=8, vocab=16, batch=16, length=4, experts=4,
        sequences=4, capacity_factor=1.0, router=router, dispatch="index",
    )  # fmt: skip
    program = md.compile(model.train_step(), plan=md.Plan("rows:4", WHERE[1], remat=remat)).program(*model.specs())
    rng = np.random.default_rng(0)
    given = tuple(
        rng.integers(0, 16, [d.size for d in v.dims]).astype(v.dtype)
        if v.dtype.kind == "i"
        else (0.5 * rng.standard_normal([d.size for d in v.dims])).astype(v.dtype) ** (1 + v.name.startswith("state"))
        for v in program.ins
    )
    return program, given, tuple(md.simulate(program, *given))


@pytest.mark.parametrize("loops", [False, True], ids=["unrolled", "loops"])
@pytest.mark.parametrize("remat", ["none", "collectives"])
@pytest.mark.parametrize("router", ["switch", "batch_prioritised"])
def test_layers_in_a_loop(router: str, loops: bool, remat: str) -> None:
    """A step stores the indices and the slots of a part for the backward pass; loops have one body for all layers.

    A backward pass that routes again has the numbers of the whole group, and so have the exchanged values it reads.
    """
    program, given, wanted = layers_in_a_loop(router, remat)
    made = LoopsInParts("batch", 2).split(program) if loops else split(unroll(program), "batch", 2).program
    verify(made, "split")
    check(made, "split")
    if remat == "none":  # of two layers with experts, by loop: forward, backward
        assert [sum(eqn.op is PLACED for eqn in one.eqns) for one in bodies(made)] == ([0, 2, 2] if loops else [2 * 2])
    for a, b in zip(wanted, md.simulate(made, *given), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(1, np.abs(a).max()))  # gradients in another order


def test_loops_in_parts_keep_one_body_and_hide_exchanges() -> None:
    model = gpt2_moe.replace(batch=24 * 16, length=512, experts=32, sequences=24, capacity_factor=1.0)

    def step(overlap: md.Overlap) -> md.Compiled:
        where = ("rows:16", "batch:rows; group:rows; expert:rows")
        return md.compile(model.train_step(), *where, overlap=overlap, machine=MACHINE.name)

    compiled = step(md.Overlap("skew", dim="batch"))
    program = compiled.program(*model.specs())
    assert [eqn.scan.trips for eqn in program.eqns if eqn.scan] == [6, 6]
    assert compiled.overlap.chosen == "loops in 2 parts of batch"
    assert compiled.overlap.after.exposed < 0.25 * compiled.overlap.before.exposed
    with pytest.raises(md.NoEffectError, match=r"(?s)no collective in a loop runs in 2 parts.*loop at .*'length'"):
        step(md.Overlap("skew", dim="length")).program(*model.specs())


def test_parts_of_tokens_run_on_devices_as_simulated() -> None:
    step, types = step_of("switch", DOUBLE)
    compiled = md.compile(step, *WHERE, overlap=md.Overlap("halves", dim="batch"), machine=MACHINE.name)
    given, _ = whole("switch", DOUBLE, 0)
    leaves, structure = jax.tree.flatten(types, is_leaf=lambda x: hasattr(x, "shape"))
    tensors = [md.tensor(x, spec.dims) for x, spec in zip(given, leaves, strict=True)]
    ran = jax.tree.leaves(compiled(*jax.tree.unflatten(structure, tensors)))
    assert "of batch" in compiled.overlap.chosen
    for x, y in zip(ran, md.simulate(compiled.program(*types), *given), strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_halves_cut_the_tokens_where_a_delay_makes_them_faster_than_slots() -> None:
    model = gpt2_moe.replace(
        layers=4, batch=24 * 16, length=512, experts=32, sequences=24, capacity_factor=1.0, compute_dtype="bfloat16"
    )  # fmt: skip
    compiled = md.compile(
        model.train_step(), "rows:16", "batch:rows; group:rows; expert:rows", overlap="halves", machine=MACHINE.name
    )
    compiled.program(*model.specs())
    assert (
        "of batch" in compiled.overlap.chosen and compiled.overlap.after.exposed < 0.1 * compiled.overlap.before.exposed
    )


READS = {
    "at the indices": lambda slots, i: md.take(slots, i, "slot"),
    "summed": lambda slots, i: md.take(slots, i, "slot") + md.sum(slots, "slot"),
    "shifted": lambda slots, i: md.take(md.shift(slots, "slot", 1), i, "slot"),
    "ones elsewhere": lambda slots, i: md.take(slots + 1, i, "slot"),
    "at other indices": lambda slots, i: md.take(slots, i + 1, "slot"),
    "at their numbers": lambda slots, i: md.take(slots * md.arange("slot:12"), i, "slot"),
    "at the negated": lambda slots, i: md.take(slots, -i, "slot"),
}


@pytest.mark.parametrize("way", READS)
def test_slots_that_are_read_in_another_way_are_not_cut(way: str) -> None:
    def crossing(x: md.Tensor, i: md.Tensor) -> md.Tensor:
        holder = md.inverse_index(i, over="token", into="slot:12")
        return READS[way](md.sin(md.take(x, holder, "token")), i)

    program = md.compile(crossing, "a:1", "").program(md.spec("token:8 model:4"), md.spec("token:8", "int32"))
    rng = np.random.default_rng(1)
    x, i = rng.standard_normal((8, 4)).astype("float32"), rng.permutation(14)[:8].astype("int32")
    made = split(program, "token", 2).program
    assert any(eqn.op is PLACED for eqn in made.eqns) == (way in ("at the indices", "ones elsewhere"))
    (got,), (wanted,) = md.simulate(made, x, i), md.simulate(program, x, i)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def rows_of(rng: np.random.Generator) -> tuple[Any, int, int, int]:
    """A random function that cuts a batch into rows and back, the devices, the batch and the parts."""
    devices, parts = int(rng.choice([1, 2, 4])), int(rng.choice([2, 3, 4]))
    groups = devices * int(rng.choice([1, 1, 2]))
    rows, merged = int(rng.choice([2, 4, 6, 12])), rng.random() < 0.5
    fine = int(rng.choice([1, 2, 4]))  # a third dim of the batch

    def crossing(x: md.Tensor) -> md.Tensor:
        x = md.unflatten(x + 1, "batch", [md.Dim("group", groups), md.Dim("row", rows), md.Dim("fine", fine)])
        if merged:
            x = md.unflatten(md.flatten(x, "row fine model", "token"), "token", f"row:{rows} fine:{fine} model:4")
        counts = md.cumsum(md.cast(md.sum(x, "model") > 4, "int32"), "row")
        return md.flatten(x * md.cast(counts, x.dtype), "group row fine", "batch")

    return crossing, devices, groups * rows * fine, parts


@pytest.mark.parametrize("seed", range(24))
def test_counts_and_inner_dims_of_reshapes_are_cut(seed: int) -> None:
    """Running counts along a cut dim, and reshapes under which the next dim is cut, keep every bit."""
    crossing, devices, batch, parts = rows_of(np.random.default_rng(seed))
    program = md.compile(crossing, f"a:{devices}", "batch:a; group:a").program(md.spec(f"batch:{batch} model:4"))
    x = np.arange(batch * 4, dtype=np.float32).reshape(batch, 4)
    for n in (parts, 2):
        cut = split(program, "batch", n)
        for got, wanted in zip(md.simulate(cut.program, x), md.simulate(program, x), strict=True):
            assert got.tobytes() == wanted.tobytes()
