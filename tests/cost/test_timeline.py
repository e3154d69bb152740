"""Times that a hand can work out, and what is true of every program on every machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.cost.lanes import LaneSchedule, LaneSpan
from meshdsl.cost.ledger import ledger
from meshdsl.cost.machine import Machine
from meshdsl.cost.network import Network, NetworkTier
from meshdsl.cost.timeline import Timeline, timeline
from meshdsl.models.transformer import lm
from tests.lowering.programs import draw

ENOUGH = 1e30
SWITCH = Network(
    (NetworkTier("switch", {"x": 64}, bandwidth=1e6),)
)  # an all_gather of V bytes over n: (n-1)/n V microseconds
PRODUCTS_ONLY = Machine(  # one FLOP of a matrix product takes a microsecond, and nothing else takes any time
    name="toy",
    title="a machine to compute by hand",
    device="chip",
    peak={"other": 1e6},
    vector=ENOUGH,
    hbm=ENOUGH,
    hbm_bandwidth=ENOUGH,
    launch=0.0,
    efficiency=((1.0, 1.0),),
    network=SWITCH,
    overlap_slowdown=1.5,
)
CPU = dataclasses.replace(PRODUCTS_ONLY, asynchronous=(), overlapped_by_compiler=())
US = 1e-6
LM = lm.replace(batch=8, length=8, vocab=16, layers=3, d_model=8, heads=4, d_head=2, d_ff=16)


def run(
    f: Callable[..., Any], mesh: str, layout: str, *specs: object, on: Machine = PRODUCTS_ONLY, pipelined: bool = False
) -> Timeline:
    return timeline(ledger(md.compile(f, mesh, layout).program(*specs)), on, pipelined=pipelined)


def checked(found: Timeline) -> Timeline:
    """The laws of every timeline."""
    some = 1e-9 * found.seconds + 1e-15
    assert found.lower_bound <= found.seconds + some
    assert found.compute + found.exposed == pytest.approx(found.seconds, rel=1e-9)
    assert sum(cost.blocking for cost in found.costs) == pytest.approx(found.seconds, rel=1e-9)
    assert -some <= found.exposed <= found.communication + some
    low, high = found.interval
    assert found.lower_bound - some <= low <= found.seconds + some <= high + 2 * some
    assert all(event.start >= 0 and event.start + event.seconds <= found.seconds + some for event in found.events)
    assert 0 <= found.utilisation <= 1 + 1e-9
    return found


X, W, V = md.spec("batch:4 io:8"), md.spec("io:8 hidden:16"), md.spec("hidden:16 out:2")
PRODUCT = 2 * 4 * 2 * 16 * US  # [4, 8/4] by [2, 16]
REDUCED = 2 * 3 / 4 * 4 * 16 * 4 * US  # an all_reduce of float32[4, 16] over four devices


def test_a_chain_takes_the_sum_of_its_parts() -> None:
    def f(x, w, v):
        return md.dot(md.relu(md.dot(x, w, "io")), v, "hidden")

    found = checked(run(f, "x:4", "io:x", X, W, V))
    second = 2 * 4 * 16 * 2 * US
    assert found.seconds == pytest.approx(PRODUCT + REDUCED + second)
    assert [found.exposed, found.communication] == pytest.approx([REDUCED, REDUCED])
    assert [event.name for event in found.events] == ["einsum", "all_reduce", "einsum"]  # the relu is inside
    assert [event.lane for event in found.events] == ["compute", "x", "compute"]
    assert found.lower_bound == pytest.approx(PRODUCT + second)
    assert found.utilisation == pytest.approx((PRODUCT + second) / found.seconds)


@pytest.mark.parametrize("wide", [2, 64])
def test_what_does_not_read_the_sum_runs_beside_it(wide: int) -> None:
    def f(x, w, y, u):
        return md.dot(x, w, "io"), md.dot(y, u, "other")

    beside = 2 * 4 * 4 * wide * US
    found = checked(run(f, "x:4", "io:x", X, W, md.spec("batch:4 other:4"), md.spec(f"other:4 wide:{wide}")))
    if wide == 2:  # hidden, and slowed
        assert found.seconds == pytest.approx(PRODUCT + REDUCED)
        assert found.exposed == pytest.approx(REDUCED - 1.5 * beside)
    else:  # slowed as long as the sum takes, then at full speed
        assert found.seconds == pytest.approx(PRODUCT + REDUCED + beside - REDUCED / 1.5)
        assert found.exposed == 0
    assert found.communication == pytest.approx(REDUCED)
    blocking = checked(run(f, "x:4", "io:x", X, W, md.spec("batch:4 other:4"), md.spec(f"other:4 wide:{wide}"), on=CPU))
    assert blocking.seconds == pytest.approx(PRODUCT + REDUCED + beside)
    assert blocking.exposed == pytest.approx(REDUCED)


def test_collectives_over_different_axes_run_side_by_side() -> None:
    def f(x, w, y, u):
        return md.dot(x, w, "io"), md.dot(y, u, "other")

    args = (X, W, md.spec("batch:4 other:8"), md.spec("other:8 wide:16"))
    one = checked(run(f, "x:4 y:4", "io:x; other:x", *args))
    two = checked(run(f, "x:4 y:4", "io:x; other:y", *args))
    assert one.seconds == pytest.approx(PRODUCT + 2 * REDUCED)
    assert two.seconds == pytest.approx(PRODUCT + 1.5 * PRODUCT + REDUCED)  # the second product runs beside a sum
    assert {event.lane for event in two.events} == {"compute", "x", "y"}


TRIPS = 5
WEIGHTS = md.spec(f"layer:{TRIPS} io:8 out:8")
GATHERED = 3 / 4 * 8 * 8 * 4 * US  # float32[8, 8] over four devices
STEP = 2 * 4 * 8 * 8 * US


def layers(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    """In each trip a weight is gathered, then multiplied by what the last trip made."""

    def body(x, w):
        return md.rename(md.dot(x, md.shard(w, {"out": ()}), "io"), out="io"), None

    return md.scan(body, x, w, over="layer")[0]


def test_a_loop_takes_its_trips_one_after_another() -> None:
    found = checked(run(layers, "x:4", "out:x", md.spec("batch:4 io:8"), WEIGHTS))
    assert found.seconds == pytest.approx(TRIPS * (GATHERED + STEP))
    assert found.exposed == pytest.approx(TRIPS * GATHERED)
    (loop, *body) = found.events
    assert (loop.name, loop.trips, loop.depth, loop.seconds) == ("scan x5", 1, 0, pytest.approx(found.seconds))
    assert [(event.name, event.trips, event.depth) for event in body] == [("all_gather", 5, 1), ("einsum", 5, 1)]
    assert body[1].start + body[1].seconds == pytest.approx(GATHERED + STEP)


def test_exposed_time_that_is_a_rounding_error_belongs_to_no_collective() -> None:
    trip, total = (
        LaneSpan(1.0, 5e-17, seconds_of={0: 0.5}, exposures={0: 0.0}, least={"x": 0}),
        LaneSpan(exposures={0: 0.0}),
    )
    LaneSchedule.add_steady(total, trip, [], 1.25, 4)
    assert total.seconds == 5.0 and total.exposures[0] == pytest.approx(total.exposed)


def test_pipelined_trips_reach_a_steady_interval() -> None:
    found = checked(run(layers, "x:4", "out:x", md.spec("batch:4 io:8"), WEIGHTS, pipelined=True))
    # the first gather is waited for; then the gathers run beside products, which they slow by a half
    assert found.seconds == pytest.approx(GATHERED + TRIPS * STEP + 0.5 * GATHERED / 1.5 * (TRIPS - 1))
    assert found.exposed == pytest.approx(GATHERED)


def test_of_two_arms_the_longer_counts() -> None:
    def f(x, w, v):
        return md.cond(
            md.sum(x) > 0,
            lambda: md.dot(md.dot(x, w, "io"), v, "hidden"),
            lambda: md.broadcast(md.sum(x, "io"), "batch out:2"),
        )

    found = checked(run(f, "x:4", "", X, W, V))
    assert found.seconds == pytest.approx((2 * 4 * 8 * 16 + 2 * 4 * 16 * 2) * US)
    assert {cost.line.op for cost in found.costs if cost.seconds > 1e-12} == {"einsum"}


def test_a_kernel_takes_the_longer_of_its_compute_and_its_memory_and_a_launch() -> None:
    slow = dataclasses.replace(PRODUCTS_ONLY, hbm_bandwidth=1e6, launch=1e-3)
    found = checked(run(lambda x, w: md.dot(x, w, "io"), "x:1", "", X, W, on=slow))
    compute, memory = 2 * 4 * 8 * 16 * US, 4 * (4 * 8 + 8 * 16 + 4 * 16) * US
    assert found.seconds == pytest.approx(max(compute, memory) + 1e-3)
    assert found.lower_bound == pytest.approx(max(compute, memory))


def test_small_products_reach_a_part_of_the_peak() -> None:
    half = dataclasses.replace(PRODUCTS_ONLY, efficiency=((1.0, 0.5),))
    found = checked(run(lambda x, w: md.dot(x, w, "io"), "x:1", "", X, W, on=half))
    assert found.seconds == pytest.approx(2 * 2 * 4 * 8 * 16 * US)
    assert found.lower_bound == pytest.approx(2 * 4 * 8 * 16 * US)
    assert found.utilisation == pytest.approx(0.5)


def test_the_interval_is_what_the_machine_states() -> None:
    found = run(layers, "x:4", "out:x", md.spec("batch:4 io:8"), WEIGHTS)
    assert found.interval == pytest.approx((found.seconds / 1.15, found.seconds * 1.15))
    assert "a step" in str(found) and "of the float32 peak on toy" in str(found)


REAL = Machine(
    name="real",
    title="figures like those of an accelerator",
    device="chip",
    peak={"other": 1e14},
    vector=1e12,
    hbm=16e9,
    hbm_bandwidth=1e12,
    launch=1e-6,
    efficiency=((1e3, 0.05), (1e9, 0.8)),
    network=Network((NetworkTier("switch", {"x": 64}, bandwidth=1e11, latency=1e-6),), launch=5e-6),
)
FASTER = {
    "peak": {"other": 3e14},
    "vector": 3e12,
    "hbm_bandwidth": 3e12,
    "launch": 0.0,
    "efficiency": ((1e3, 0.2), (1e9, 0.9)),
    "network": Network((NetworkTier("switch", {"x": 64}, bandwidth=4e11, latency=1e-6),), launch=1e-6),
}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("name", LM.layouts)
def test_a_train_step_on_faster_machines(name: str, pipelined: bool) -> None:
    account = ledger(md.compile(LM.train_step(), *LM.layouts[name]).program(*LM.specs()))
    base = checked(timeline(account, REAL, pipelined=pipelined))
    ran = {cost.line.index for cost in base.costs}
    assert ran == {line.index for line in account.lines}
    for field, value in FASTER.items():
        faster = checked(timeline(account, dataclasses.replace(REAL, **{field: value}), pipelined=pipelined))
        assert faster.seconds <= base.seconds * (1 + 1e-9), field
        assert faster.lower_bound <= base.lower_bound * (1 + 1e-9), field
    blocking = dataclasses.replace(REAL, asynchronous=(), overlapped_by_compiler=())
    assert timeline(account, blocking).seconds >= timeline(account, REAL).seconds / REAL.overlap_slowdown


@given(st.integers(0, 2**32 - 1))
def test_random_programs(seed: int) -> None:
    case = draw(seed)
    f, args = case.program()
    try:
        program = md.compile(f, case.mesh, case.layout).program(*args)
    except md.LayoutError:
        return
    account = ledger(program)
    for pipelined in (False, True):
        for machine in (REAL, PRODUCTS_ONLY, dataclasses.replace(REAL, asynchronous=(), overlapped_by_compiler=())):
            checked(timeline(account, machine, pipelined=pipelined))


@pytest.mark.parametrize("overlap", ["auto", "list"])
def test_trips_of_an_unrolled_loop_share_the_steps_of_their_branch(overlap: str) -> None:
    def f(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def trip(w: md.Tensor, _: md.Tensor) -> tuple[md.Tensor, None]:
            h = md.tanh(md.einsum(x, w, out="batch hidden"))
            taken = lambda w: w - md.relu(md.sum(h, "batch")) * w  # noqa: E731 - short
            return md.cond(md.sum(w) > 0, taken, lambda w: w, w), None

        return md.scan(trip, w, md.zeros("steps:3"), over="steps")[0]

    args, layout = (md.spec("io:8 hidden:4"), md.spec("batch:8 io:8")), ("a:2 b:4", "batch:a; io:b")
    loop = md.compile(f, *layout).cost(*args, machine="h100")
    unrolled = md.compile(f, *layout, overlap=overlap, machine="h100").cost(*args, machine="h100")
    assert unrolled.to_dict()["flops"] == loop.to_dict()["flops"]
    assert unrolled.seconds == pytest.approx(loop.seconds, rel=0.2)


@pytest.mark.parametrize("overlap", ["none", "list"])
def test_names_of_mesh_axes_do_not_change_times(overlap: str) -> None:
    """Also an axis with the name of a lane."""

    def seconds(axis: str) -> tuple[float, ...]:
        step = md.compile(
            lambda x, w, v: (md.dot(x, w, "io"), md.dot(x, v, "io")), f"{axis}:4", f"io:{axis}", overlap=overlap,
            machine=None if overlap == "none" else "a100-p4de",
        )  # fmt: skip
        specs = md.spec("batch:4096 io:4096"), md.spec("io:4096 hidden:4096"), md.spec("io:4096 out:4096")
        report = step.cost(*specs, machine="a100-p4de")
        return report.seconds, report.exposed, report.lower_bound

    assert seconds("compute") == seconds("rows")
    assert seconds("rows")[1] > 0
