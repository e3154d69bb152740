"""Loops unrolled, parts, a new order and fences never change a result: random programs, random layouts, bit for bit.

Values are small whole numbers, so sums are exact in any order, and parts that are added give the bits of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.network import KINDS, place
from meshdsl.ir import verify
from meshdsl.lowering.asynchrony import FENCE, WAIT, Start
from meshdsl.lowering.check import check
from meshdsl.lowering.program import Program
from meshdsl.lowering.unroll import unroll
from meshdsl.overlap.combine import combine
from meshdsl.overlap.fences import fence, kernels_with_products
from meshdsl.overlap.list_schedule import fastest_schedule, list_schedule
from meshdsl.overlap.one_in_flight import one_in_flight
from meshdsl.overlap.parts import PART
from meshdsl.overlap.ranges import pipelined
from meshdsl.overlap.split import cuts_along, split
from meshdsl.overlap.tasks import ordered, tasks_of
from tests.lowering.maker import Draw
from tests.lowering.programs import draw, same_bits

MACHINE = md.machine("a100-p4de")
PROGRAMS, BLOCKS = 40, 2


def variants(program: Program, rng: Draw) -> Iterator[tuple[str, Program]]:
    """The program unrolled; in parts along a random dim; each in the order of a list schedule, and fenced."""
    flat = unroll(program)
    yield "unrolled", flat
    yield "combined", combine(flat, dict.fromkeys(KINDS, 1e9))
    dims = sorted({d.name for v in (*program.ins, *(v for eqn in flat.eqns for v in eqn.outs)) for d in v.dims})
    n = rng.choice([2, 2, 3, 4])
    cut = split(flat, rng.choice(dims), n).program if dims else flat
    yield f"{n} parts", cut
    yield "ranges", in_ranges(flat, rng.choice(dims), rng) if dims else flat
    for name, one in (("list", flat), ("parts, list", cut)):
        tasks = tasks_of(one, MACHINE, place(MACHINE.network, program.mesh))
        hold = rng.choice([0.0, 1e-4])
        order = ordered(tasks, list_schedule(tasks, lambda t, hold=hold: t.tail - hold * (t.number % 2)))
        yield name, order
        limit = rng.choice([0, 64, 256, 1e9])
        delayed = list_schedule(tasks, lambda t, hold=hold: t.tail - hold * (t.number % 2), limit)
        yield f"{name}, delays, least memory", ordered(tasks, delayed)
        yield f"{name}, least memory", ordered(tasks, fastest_schedule(tasks, limit))
        yield f"{name}, fenced", fence(order, kernels_with_products(order))
        apart = one_in_flight(order, MACHINE, place(MACHINE.network, program.mesh))
        assert not queued(apart)
        yield f"{name}, one in flight, fenced", fence(apart, kernels_with_products(apart))


def in_ranges(program: Program, dim: str, rng: Draw) -> Program:
    """The program with two neighbouring ranges of its equations in parts, each in an order of its own."""
    first, middle, last = sorted(rng.choice(range(len(program.eqns) + 1)) for _ in range(3))
    cuts, placement = cuts_along(program, dim, 2), place(MACHINE.network, program.mesh)
    made = program
    for eqns in (program.eqns[first:middle], program.eqns[middle:last]):
        values = {eqn.outs[0] for eqn in eqns if eqn.outs}
        among = [eqn for eqn in made.eqns if eqn.outs and eqn.outs[0] in values]
        made = pipelined(split(made, dim, 2, cuts, among), [among], MACHINE, placement)
    return made


def queued(program: Program) -> bool:
    """True if a collective starts before another one has been waited for."""
    in_flight = 0
    for eqn in program.eqns:
        in_flight += isinstance(eqn.op, Start) - (eqn.op is WAIT)
        if in_flight > 1:
            return True
    return False


def law(seeds: range) -> Counter[str]:
    """Counts of the variants of so many random programs; fails on the first wrong bit."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        case = draw(seed)
        compiled, arguments = case.compiled()
        try:
            program = compiled.program(*arguments)
        except md.LayoutError:
            counts["illegal"] += 1
            continue
        arrays = [x.numpy() for x in arguments]
        wanted = md.simulate(program, *arrays)
        for name, one in variants(program, Draw(seed)):
            check(verify(one, name), name)
            assert same_bits(md.simulate(one, *arrays), wanted), f"{name} of seed {seed}: {case!r}"
            counts["ranges"] += name == "ranges" and any(eqn.op is PART for eqn in one.eqns)
            counts["starts"] += sum(isinstance(eqn.op, Start) for eqn in one.eqns)
            counts["parts"] += sum(eqn.op is PART for eqn in one.eqns)
            counts["fences"] += sum(eqn.op is FENCE for eqn in one.eqns)
        counts["programs"] += 1
    return counts


@pytest.mark.parametrize("block", range(BLOCKS))
def test_overlap_passes_keep_every_bit_of_random_programs(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    n = PROGRAMS // BLOCKS
    counts = law(range(block * n, (block + 1) * n))
    with capsys.disabled():
        print(f"overlap law: {dict(counts)}")
    assert counts["starts"] > n and counts["parts"] > n and counts["fences"] > 0
    assert counts["ranges"] > n / 6


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_overlap_passes_keep_every_bit_of_thousands_of_random_programs(block: int) -> None:
    law(range(10_000 + 200 * block, 10_000 + 200 * (block + 1)))


def test_a_reshape_of_a_tensor_without_elements_is_cut_as_any_other() -> None:
    step = md.compile(lambda x: md.reshape(2 * x, "n:4 a:0 c:5"), "m:2", "")
    program = step.program(md.spec("n:4 a:0"))
    cut = split(program, "n", 2).program
    assert same_bits(md.simulate(cut, [[]] * 4), md.simulate(program, [[]] * 4))


@pytest.mark.parametrize("layout", ["memory:z", "memory:z; batch:x", "length:z", "length:x; memory:z"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 2}, {"causal": True, "offset": 1}], ids=str)
def test_attention_in_parts_sees_the_positions_of_the_whole(options: dict[str, Any], layout: str) -> None:
    """Also where each device attends to its own keys, and parts are of the queries."""

    def gradients(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> Any:
        return md.grad(lambda q, k, v: md.sum(md.attention(md.sin(q), k, v, **options)), argnums=(0, 1, 2))(q, k, v)

    specs = md.spec("batch:2 length:4 head:2"), *[md.spec("batch:2 memory:4 head:2")] * 2
    rng = np.random.default_rng(0)
    given = [rng.normal(size=[d.size for d in x.dims]).astype(np.float32) for x in specs]
    program = md.compile(gradients, "x:2 z:2", layout).program(*specs)
    wanted = md.simulate(program, *given)
    for dim in ("batch", "length", "memory", "head"):
        for got, right in zip(md.simulate(split(program, dim, 2).program, *given), wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
