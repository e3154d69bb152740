"""Capacity passing: tokens inside a group in parts keep the tokens, the loss and the results of the whole group.

A group is several sequences of one device. The model routes its tokens in parts, and a plan cuts the batch, so that a
part of the batch is routed, sent and computed without the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import Eqn
from meshdsl.lowering.program import Program
from meshdsl.nn import moe
from meshdsl.overlap.parts import JOIN_PARTS, PART
from meshdsl.overlap.split import split
from tests.overlap.test_routers import DOUBLE, EXPERT, HIDDEN, ROUTERS, SINGLE, ids_of, planned, same

pytestmark = pytest.mark.usefixtures("fixed_order_of_sums")

WHERE = ("rows:4", "batch:rows; group:rows; expert:rows")
SEQUENCES, LENGTH = 4, 4  # of a group; there is one group for each device
PASSING = {"switch": {}, "top_k": {"k": 1, "normalize": "after"}, "hash": {}, "random": {}}


def step_of(router: str, precision: md.nn.Precision, exchange: str, parts: int, dispatch: str) -> tuple[Any, Any]:
    """A function to (loss, results, gradients), and its arguments: two layers of experts with dense ones around."""

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
        for name in ("first", "second"):
            w = md.param(f"{name}_dense", "model:8 inner:8", init=md.init.normal(0.3), dtype=precision.param)
            x = md.rename(md.tanh(md.dot(x, w, "model")), inner="model")
            y, aux = md.nn.moe_layer(
                grouped(x), EXPERT, HIDDEN, name=name, tokens="token", precision=precision, parts=parts,
                router=router, capacity_factor=1.0, exchange=exchange, dispatch=dispatch,
                **PASSING[router], **ids_of(router, grouped(tokens)),
            )  # fmt: skip
            y, total = ungrouped(y), total + aux
            x = x + y
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
def program_of(router: str, precision: md.nn.Precision, exchange: str, parts: int, dispatch: str) -> Program:
    step, types = step_of(router, precision, exchange, parts, dispatch)
    return md.compile(step, *WHERE).program(*types)


@cache
def whole(router: str, precision: md.nn.Precision, dispatch: str) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
    """Arguments, and the results with the tokens of a group routed at once."""
    program = program_of(router, precision, "padded", 1, dispatch)
    rng = np.random.default_rng(5)
    given = tuple(
        rng.integers(0, 6, [d.size for d in v.dims]).astype(v.dtype)
        if v.dtype.kind == "i"
        else rng.standard_normal([d.size for d in v.dims]).astype(v.dtype)
        for v in program.ins
    )
    return given, tuple(md.simulate(program, *given))


def alone(program: Program) -> bool:
    """True if the first exchange of slots needs only the first part of the batch."""
    made = {v: eqn for eqn in program.eqns for v in eqn.outs}
    sends = (e for e in program.eqns if e.collective is not None and "all_to_all" in e.collective.name)
    stack = [next(eqn for eqn in sends if eqn.outs[0].dtype.kind == "f")]
    seen = set[Eqn]()
    while stack:
        eqn = stack.pop()
        if eqn in seen:
            continue
        seen.add(eqn)
        stack += [made[v] for v in eqn.ins if v in made]
    return {eqn.params["index"] for eqn in seen if eqn.op is PART} == {0} and all(e.op is not JOIN_PARTS for e in seen)


def law(router: str, precision: md.nn.Precision, exchange: str, parts: int, dispatch: str, cuts: int) -> None:
    given, wanted = whole(router, precision, dispatch)
    program = program_of(router, precision, exchange, parts, dispatch)
    what = f"{router} in {parts} parts, {exchange}, {dispatch}"
    same(program, wanted, md.simulate(program, *given), what)
    assert alone(split(program, "batch", cuts).program)
    made = planned(program, "halves", dim="batch", parts=cuts)
    same(made, wanted, md.simulate(made, *given), f"{what}, planned in {cuts}")


@pytest.mark.parametrize("k", range(len(PASSING)), ids=list(PASSING))
def test_parts_of_a_group_keep_tokens_loss_and_results(k: int) -> None:
    router, exchange = list(PASSING)[k], ("ragged", "padded")[k % 2]
    law(router, SINGLE, exchange, (2, 2, 4, 2)[k], ("index", "einsum", "einsum", "index")[k], 2)
    _, (_, _, dropped, *_) = whole(router, SINGLE, ("index", "einsum", "einsum", "index")[k])
    assert 0 < dropped.sum() < dropped.size  # the capacity binds


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["index", "einsum"])
@pytest.mark.parametrize("exchange", ["ragged", "padded"])
@pytest.mark.parametrize("router", PASSING)
def test_every_router_that_passes_capacity(router: str, exchange: str, dispatch: str) -> None:
    for precision in (SINGLE, DOUBLE):
        for parts, cuts in ((2, 2), (4, 2), (4, 4)):
            law(router, precision, exchange, parts, dispatch, cuts)


def test_ragged_parts_send_the_bytes_of_the_filled_slots() -> None:
    """Every part has slots for all tokens; the expected bytes of the parts add up to those of one exchange."""

    def filled(parts: int) -> float:
        records = program_of("switch", SINGLE, "ragged", parts, "index").collectives
        return sum(r.bytes * r.op.share for r in records if r.kind == "ragged_all_to_all")

    assert filled(2) == filled(1) > 0


@pytest.mark.parametrize("router", sorted(set(ROUTERS) - set(PASSING)) + ["top_k"])
def test_routers_that_read_the_whole_group_are_refused(router: str) -> None:
    with pytest.raises(md.ShapeError, match=f"parts=2: the router '{router}' orders the tokens of the whole group"):
        md.model(lambda x: md.nn.moe_layer(x, EXPERT, HIDDEN, router=router, parts=2, **ROUTERS[router])).specs(
            md.spec("batch:2 length:8 model:8")
        )
    assert router in moe.options.ROUTERS


def test_parts_divide_the_tokens() -> None:
    with pytest.raises(md.ShapeError, match="parts=3: the 8 tokens of length=8 are cut into equal parts"):
        md.model(lambda x: md.nn.moe_layer(x, EXPERT, HIDDEN, router="switch", parts=3)).specs(
            md.spec("batch:2 length:8 model:8")
        )


def rows_of(rng: np.random.Generator) -> tuple[Any, int, int, int]:
    """A random function of rows of a batch, the devices, the batch and the parts. A row may read the one before it."""
    devices, parts = int(rng.choice([1, 2, 4])), int(rng.choice([2, 3, 4]))
    groups = devices * int(rng.choice([1, 1, 2]))
    rows, chained, merged = int(rng.choice([2, 4, 6, 12])), rng.random() < 0.5, rng.random() < 0.5
    kept = rows if rng.random() < 0.7 else 1
    fine = int(rng.choice([1, 2, 4]))  # a third dim of the batch

    def crossing(x: md.Tensor) -> md.Tensor:
        x = md.unflatten(x + 1, "batch", [md.Dim("group", groups), md.Dim("row", rows), md.Dim("fine", fine)])
        if merged:
            x = md.unflatten(md.flatten(x, "row fine model", "token"), "token", f"row:{rows} fine:{fine} model:4")
        made: list[md.Tensor] = []
        for k, row in enumerate(md.unstack(x, "row")):
            made.append(row * (k + 1) + (md.sum(made[-1]) if chained and made else 0))
        if kept == 1:
            return made[-1]
        return md.flatten(md.transpose(md.stack(made, "row"), "group row fine model"), "group row fine", "batch")

    return crossing, devices, groups * rows * fine, parts


@pytest.mark.parametrize("seed", range(24))
def test_rows_and_inner_dims_of_reshapes_are_cut(seed: int) -> None:
    """Indices and stacks along a cut dim, and reshapes under which the next dim is cut, keep every bit."""
    crossing, devices, batch, parts = rows_of(np.random.default_rng(seed))
    program = md.compile(crossing, f"a:{devices}", "batch:a; group:a").program(md.spec(f"batch:{batch} model:4"))
    x = np.arange(batch * 4, dtype=np.float32).reshape(batch, 4)
    for n in (parts, 2):
        cut = split(program, "batch", n)
        for got, wanted in zip(md.simulate(cut.program, x), md.simulate(program, x), strict=True):
            assert got.tobytes() == wanted.tobytes()


def test_rows_of_one_group_for_each_device_join_only_at_the_end() -> None:
    def crossing(x: md.Tensor) -> md.Tensor:
        x = md.unflatten(md.sin(x), "batch", "group:2 row:4")
        return md.flatten(md.stack([md.cos(row) for row in md.unstack(x, "row")], "row"), "group row", "batch")

    program = md.compile(crossing, "a:2", "batch:a; group:a").program(md.spec("batch:8 model:4"))
    for parts in (2, 4):
        cut = split(program, "batch", parts)
        (join,) = (eqn for eqn in cut.program.eqns if eqn.op is JOIN_PARTS)
        assert join.outs == cut.program.outs and set(cut.part.values()) == set(range(parts))
