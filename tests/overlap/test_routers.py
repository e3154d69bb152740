"""Every router under every overlap plan: equal loss, tokens and experts' results, gradients to rounding, equal bytes.

A plan in parts runs the same operations on the same elements, so the loss, the kept tokens and the results of the
experts have the same bits. Gradients of weights are sums over tokens in another order. Two such sums of n terms differ
by up to n eps times the sum of the terms' sizes, so a bound relative to each element means nothing where terms cancel:
the bound is relative to the largest element of the gradient, 1e-6 in float32 (8 eps) and 1e-12 in float64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from benchmarks.overlap_baselines import BASELINES
from benchmarks.overlap_baselines import planned as baseline
from meshdsl.cost.network import place
from meshdsl.lowering.asynchrony import Start
from meshdsl.lowering.program import Program
from meshdsl.nn import moe
from meshdsl.overlap.parts import FILLED_PART, PART
from meshdsl.overlap.plan import plan_overlap
from meshdsl.overlap.values import Overlap

pytestmark = pytest.mark.usefixtures("fixed_order_of_sums")

EXPERT, HIDDEN = md.dims("expert:4 expert_hidden:16")
SINGLE, DOUBLE = md.nn.Precision(), md.nn.Precision("float64", "float64", "float64")
BOUND = {"float32": 1e-6, "float64": 1e-12}
WHERE = ("rows:4", "batch:rows; expert:rows")
MACHINE = md.machine("a100-p4de")
LEVELS = tuple(replace(level, bandwidth=1e10, latency=0.0) for level in MACHINE.network.levels)
# On a machine without latencies, whose network is slow, ranges of toy size are faster in parts
SLOW = replace(MACHINE, launch=0.0, network=replace(MACHINE.network, levels=LEVELS, launch=0.0, tables=(), combine={}))
MODES = ("dw", "partition", "lancet", "experts", "list", "halves")
ROUTERS: dict[str, dict[str, Any]] = {
    "gshard_paper": {"policy": "threshold"},
    "top2": {"policy": "threshold", "threshold": 0.3},
    "switch": {},
    "top_k": {"k": 2, "normalize": "after"},
    "batch_prioritised": {"k": 2, "score": "sum"},
    "expert_choice": {},
    "hash": {},
    "random": {},
}


def ids_of(router: str, tokens: md.Tensor) -> dict[str, Any]:
    """The options of the routers without gates, from the ids of the tokens."""
    if router == "hash":
        return {"token_ids": tokens, "table": moe.balanced_table([5, 4, 3, 3, 2, 1], EXPERT.size)}
    return {"ids": (tokens * 3) % EXPERT.size} if router == "random" else {}


def step_of(router: str, precision: md.nn.Precision, batch: int, exchange: str) -> tuple[Any, tuple[Any, ...]]:
    """A function to (loss, gradients, (results of the experts, dropped tokens, filled slots)), and its arguments.

    Two layers of experts between dense ones, so that collectives of both layers and both directions can move.
    """
    options = {**ROUTERS[router], "router": router, "capacity_factor": 1.0, "capacity_formula": "switch"}
    options["exchange"] = exchange

    @md.model
    def model(x: md.Tensor, tokens: md.Tensor) -> Any:
        found: list[md.Tensor] = []
        total: Any = 0
        for name in ("first", "second"):
            gates = {**options, **ids_of(router, tokens)}
            y, aux = md.nn.moe_layer(x, EXPERT, HIDDEN, name=name, precision=precision, **gates)
            w = md.param(f"{name}_dense", "model:8 inner:8", init=md.init.normal(0.3), dtype=precision.param)
            x = md.rename(md.tanh(md.dot(x + y, w, "model")), inner="model")
            total = total + aux
            found += [y, md.all(y == 0, "model")]  # a dropped token's result is zero
        return x, total, found

    def step(params: dict[str, md.Tensor], x: md.Tensor, tokens: md.Tensor) -> Any:
        def loss(params: dict[str, md.Tensor]) -> Any:
            y, aux, found = model(params, x, tokens)
            return md.sum(md.sin(y)) + aux, found

        (value, found), grads = md.value_and_grad(loss, has_aux=True)(params)
        return value, found, grads

    x = md.spec(f"batch:{batch} length:8 model:8", precision.param)
    tokens = md.spec(f"batch:{batch} length:8", "int32")
    return step, (model.specs(x, tokens), x, tokens)


@cache
def plain(
    router: str, precision: md.nn.Precision = SINGLE, batch: int = 8, exchange: str = "padded"
) -> tuple[Program, tuple[np.ndarray, ...], tuple[Any, ...]]:
    """The program without a plan, arguments for it, and its results."""
    step, types = step_of(router, precision, batch, exchange)
    program = md.compile(step, *WHERE).program(*types)
    rng = np.random.default_rng(3)
    given = tuple(
        rng.integers(0, 6, [d.size for d in v.dims]).astype(v.dtype)
        if v.dtype.kind == "i"
        else rng.standard_normal([d.size for d in v.dims]).astype(v.dtype)
        for v in program.ins
    )
    return program, given, tuple(md.simulate(program, *given))


def planned(program: Program, mode: str, **options: Any) -> Program:
    machine = SLOW if mode in ("partition", "lancet") else MACHINE
    if mode in BASELINES:
        return baseline(mode, program, machine, **options)[0]
    return plan_overlap(program, Overlap(mode, **options), machine, place(machine.network, program.mesh))[0]


def same(program: Program, wanted: Any, got: Any, what: str) -> None:
    """Results without a path of a parameter are bitwise equal; gradients are close, relative to their largest."""
    count = len(program.outs)
    gradients = count - sum(d.name.startswith("params") for d in program.ins)
    for k, (a, b) in enumerate(zip(wanted, got, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        if k < gradients:
            assert a.tobytes() == b.tobytes(), f"{what}: result {k} has other bits"
        else:
            worst = np.abs(a - b).max() / max(np.abs(a).max(), np.finfo(a.dtype).tiny)
            assert worst <= BOUND[a.dtype.name], f"{what}: gradient {k} differs by {worst:.1e} of its largest element"


def sent(program: Program) -> Counter[str]:
    """Bytes by kind of collective."""
    found = Counter[str]()
    for record in program.collectives:
        found[record.kind] += round(record.bytes * record.count)
    return found


def law(case: tuple[Any, ...], mode: str, **options: Any) -> Program:
    """The planned program of a case of `plain`, after the comparison with the program without a plan."""
    program, given, wanted = plain(*case)
    made = planned(program, mode, **options)
    what = f"{case} under {mode} {options or ''}"
    same(program, wanted, md.simulate(made, *given), what)
    assert sent(made) == sent(program), what
    return made


def in_two(program: Program, made: Program) -> bool:
    """True if every all_to_all became two of half its bytes; those of counts may stay."""
    before, after = (
        Counter(record.bytes for record in one.collectives if "all_to_all" in record.kind and record.dtype.kind == "f")
        for one in (program, made)
    )
    return bool(before) and after == {size // 2: 2 * count for size, count in before.items()}


@pytest.mark.parametrize("k", range(len(ROUTERS)), ids=list(ROUTERS))
def test_overlap_keeps_loss_tokens_and_bytes_of_every_router(k: int) -> None:
    """In parts, and one order: each router takes another one of the modes."""
    router = list(ROUTERS)[k]
    program, _, (_, _, dropped, *_) = plain(router)
    assert 0 < dropped.sum() < dropped.size  # the capacity binds
    assert in_two(program, law((router,), "halves"))
    made = law((router,), ("dw", "experts", "lancet", "list")[k % 4])
    if k % 4 in (1, 2):
        assert any(eqn.op is PART for eqn in made.eqns)  # a range runs in parts
    if k % 4 == 0:
        law((router, DOUBLE), "halves")


def test_experts_cut_dispatch_experts_and_combine_alone() -> None:
    """In halves of their two slots; the last exchange of the backward pass has no second one."""
    made = planned(plain("switch")[0], "experts")
    exchanges = [record.bytes for record in made.collectives if record.kind == "all_to_all"]
    assert sorted(exchanges) == [256] * 12 + [512]
    cut = [eqn for eqn in made.eqns if any(d.name == "slot" and d.size == 1 for v in eqn.outs for d in v.dims)]
    kinds = {str(eqn.op).split(" ")[0] for eqn in cut} - {"start", "wait", "fence"}
    assert kinds == {"part", "rename", "einsum", "relu", "where"}


def test_every_layer_of_the_forward_pass_is_in_a_range() -> None:
    """Ranges that follow one another are all in parts: the values between them are cut in the second one too."""
    program = plain("switch")[0]
    for mode in ("partition", "lancet"):
        made = planned(program, mode)
        sends = [eqn for eqn in made.eqns if isinstance(eqn.op, Start) and "all_to_all" in eqn.op.collective.name]
        assert [eqn.backward for eqn in sends] == [False] * 8 + [True] * 3, mode


def test_reductions_start_when_their_gradients_are_complete() -> None:
    program = plain("switch")[0]
    made, _ = plan_overlap(program, Overlap("dw"), SLOW, place(SLOW.network, program.mesh))
    starts = [eqn.op.collective.name for eqn in made.eqns if isinstance(eqn.op, Start) and eqn.backward]
    assert "all_reduce" in starts[: starts.index("all_to_all", 1)]  # of the last layer's gradients


@pytest.mark.slow
@pytest.mark.parametrize("precision", [SINGLE, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_overlap_mode_keeps_every_router(router: str, precision: md.nn.Precision) -> None:
    for mode in (*MODES, "auto"):
        law((router, precision), mode)


def test_routers_of_the_law_are_all_routers() -> None:
    assert set(ROUTERS) == set(moe.options.ROUTERS)


GROUP_PER_DEVICE = 4  # sequences: one per device, so that parts are cut inside a group


@pytest.mark.parametrize("exchange", ["padded", "ragged"])
@pytest.mark.parametrize("router", ["switch", "gshard_paper", "expert_choice"])
def test_one_group_is_cut_along_its_slots(router: str, exchange: str) -> None:
    """Routing reads the whole group, so all routers keep the same tokens, and an exchange in parts sends no more."""
    case = router, SINGLE, GROUP_PER_DEVICE, exchange
    made = law(case, "halves")
    assert in_two(plain(*case)[0], made)
    kind = "all_to_all" if exchange == "padded" else "ragged_all_to_all"
    counted = [eqn.params for eqn in made.eqns if eqn.op is FILLED_PART]
    assert {(one["start"], one["size"]) for one in counted} == ({(0, 1), (1, 1)} if exchange == "ragged" else set())
    started = [record.asynchronous for record in made.collectives if record.kind == kind]
    assert started and all(started)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["padded", "ragged"])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_is_cut_along_slots(router: str, exchange: str) -> None:
    for batch in (4, 8):
        for precision in (SINGLE, DOUBLE):
            case = router, precision, batch, exchange
            assert in_two(plain(*case)[0], law(case, "halves", dim="slot"))
            law(case, "halves")


@pytest.mark.parametrize("router", ROUTERS)
def test_parts_of_tokens_inside_a_group_are_refused_with_the_reason(router: str) -> None:
    """They are dispatched by masks, whose sums over tokens read the whole group."""
    reason = "'length': its parts end before every collective, at .*use dim='slot'"
    with pytest.raises(md.LayoutError, match=f"(?s){reason}"):
        planned(plain(router)[0], "halves", dim="length")


@pytest.mark.slow
def test_parts_of_slots_run_on_devices_as_simulated() -> None:
    """In float64: in float32, gradients of the router, whose terms cancel, have no four digits with any plan."""
    step, types = step_of("top_k", DOUBLE, GROUP_PER_DEVICE, "padded")
    compiled = md.compile(step, *WHERE, overlap="halves", machine=MACHINE.name)
    _, given, _ = plain("top_k", DOUBLE, GROUP_PER_DEVICE)
    leaves, structure = jax.tree.flatten(types, is_leaf=lambda x: hasattr(x, "shape"))
    tensors = [md.tensor(x, spec.dims) for x, spec in zip(given, leaves, strict=True)]
    ran = jax.tree.leaves(compiled(*jax.tree.unflatten(structure, tensors)))
    assert "of slot" in compiled.overlap.chosen
    for x, y in zip(ran, md.simulate(compiled.program(*types), *given), strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-10, atol=1e-11)


EMITTED = [("batch_prioritised", "halves")]
LONG = [(r, mode) for r in ROUTERS for mode in MODES if (r, mode) not in EMITTED and mode not in BASELINES]


@pytest.mark.parametrize(("router", "mode"), [*EMITTED, *(pytest.param(*one, marks=pytest.mark.slow) for one in LONG)])
def test_overlap_modes_run_on_devices_as_without_a_plan(router: str, mode: str) -> None:
    step, types = step_of(router, SINGLE, 8, "padded")
    _, given, _ = plain(router)
    leaves, structure = jax.tree.flatten(types, is_leaf=lambda x: hasattr(x, "shape"))
    tensors = [md.tensor(x, spec.dims) for x, spec in zip(given, leaves, strict=True)]
    arguments = jax.tree.unflatten(structure, tensors)
    loss, found, grads = md.compile(step, *WHERE)(*arguments)
    value, kept, made = md.compile(step, *WHERE, overlap=mode, machine=MACHINE.name)(*arguments)
    np.testing.assert_allclose(value.numpy(), loss.numpy(), rtol=1e-6)
    for dropped, also in zip(found[1::2], kept[1::2], strict=True):
        np.testing.assert_array_equal(dropped.numpy(), also.numpy())
    for path, x in grads.items():
        a, b = x.numpy(), made[path].numpy()
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(a).max(), 1e-30), path  # XLA fuses the two programs differently


def test_experts_without_slots_that_divide_are_refused() -> None:
    with pytest.raises(md.NoEffectError, match=r"(?s)no all_to_all runs in parts.*'nothing'"):
        planned(plain("switch")[0], "experts", dim="nothing")
