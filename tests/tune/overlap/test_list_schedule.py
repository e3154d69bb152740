"""Schedules: the timeline against a simulation of its own, and list schedules against branch and bound."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

import meshdsl as md
from meshdsl.cost.fusion import Send, Wait
from meshdsl.cost.lanes import COMPUTE, Schedule
from meshdsl.cost.ledger import ledger
from meshdsl.cost.network import place
from meshdsl.cost.timeline import timeline
from meshdsl.lowering.asynchrony import Start
from meshdsl.lowering.program import Program
from meshdsl.schedule.unroll import unroll
from meshdsl.tune.overlap.insertion import insertion_moves
from meshdsl.tune.overlap.list_schedule import list_schedule
from meshdsl.tune.overlap.tasks import Task, Tasks, ordered, tasks_of
from tests.lowering.programs import draw

MACHINE = dataclasses.replace(md.machine("a100-p4de"), overlap_slowdown=1.0)


def simulated(program: Program) -> float:
    """Seconds of a planned program by rules of its own: one thread computes, one thread for each set of axes sends.

    The computing thread takes the steps in order. A start costs nothing: it hands the collective to its thread, which
    sends in the order of hand-overs. A wait stands still until the collective has arrived.
    """
    found = ledger(program)
    machine = Schedule(found, MACHINE, place(MACHINE.network, program.mesh), pipelined=False)
    now, free, arrival = 0.0, dict[str, float](), dict[object, float]()
    for step in found.steps:
        if isinstance(step, Send) and isinstance(step.eqn.op, Start):
            lane = ",".join(step.eqn.op.axes)
            begin = max(now, free.get(lane, 0.0))
            arrival[step.eqn.outs[0]] = free[lane] = begin + machine.item(step, 0).work
        elif isinstance(step, Wait):
            now = max(now, arrival[step.eqn.ins[0]])
        else:
            now += machine.item(step, 0).work
    return max([now, *arrival.values()])


def planned(seed: int) -> Program | None:
    """A random program in the order of its list schedule; None where the layout is illegal."""
    case = draw(seed)
    function, arguments = case.program()
    try:
        flat = unroll(md.compile(function, case.mesh, case.layout).program(*arguments))
    except md.LayoutError:
        return None
    tasks = tasks_of(flat, MACHINE, place(MACHINE.network, flat.mesh))
    return ordered(tasks, list_schedule(tasks))


def test_timeline_equals_a_simulation_of_its_own() -> None:
    judged = 0
    for seed in range(60):
        program = planned(seed)
        if program is None or any(eqn.control is not None for eqn in program.eqns):
            continue
        span = timeline(ledger(program), MACHINE, place(MACHINE.network, program.mesh))
        assert span.seconds == pytest.approx(simulated(program), rel=1e-9), f"seed {seed}"
        judged += any(isinstance(eqn.op, Start) for eqn in program.eqns)
    assert judged > 20


def random_tasks(rng: random.Random) -> Tasks:
    """Up to nine tasks, a third of them collectives on one of two lanes, with random dependencies."""
    tasks: list[Task] = []
    for number in range(rng.randint(4, 9)):
        lane = rng.choice([COMPUTE, COMPUTE, rng.choice(["x", "y"])])
        task = Task(number, None, lane, rng.choice([1.0, 2.0, 3.0, 5.0]))  # pyright: ignore[reportArgumentType]
        for source in rng.sample(tasks, min(len(tasks), rng.choice([0, 1, 1, 2]))):
            task.needs.append(source)
            source.readers.append(task)
        tasks.append(task)
    for task in reversed(tasks):
        task.tail = task.seconds + max((reader.tail for reader in task.readers), default=0.0)
    return Tasks(None, MACHINE, tuple(tasks))  # pyright: ignore[reportArgumentType]


def length(order: Sequence[Task]) -> float:
    """Seconds of an order: collectives leave when the computing lane comes to them, and are waited for when read."""
    now, free, end = 0.0, dict[str, float](), dict[Task, float]()
    for task in order:
        ready = max([now, *(end[source] for source in task.needs)])
        if task.sends:
            now = max([now, *(end[source] for source in task.needs)])
            end[task] = free[task.lane] = max(now, free.get(task.lane, 0.0)) + task.seconds
        else:
            now = end[task] = ready + task.seconds
    return max(end.values(), default=0.0)


def optimum(tasks: Tasks) -> float:
    """The least length over all orders, by branch and bound."""
    best = [length(list_schedule(tasks))]

    def grow(order: list[Task], left: set[Task]) -> None:
        if not left:
            best[0] = min(best[0], length(order))
            return
        done = set(order)
        ready = [task for task in left if all(source in done for source in task.needs)]
        work = sum(task.seconds for task in left if not task.sends)
        if length(order) >= best[0] or _computed(order) + work >= best[0]:
            return
        for task in sorted(ready, key=lambda t: -t.tail):
            grow([*order, task], left - {task})

    grow([], set(tasks.all))
    return best[0]


def _computed(order: Sequence[Task]) -> float:
    return sum(task.seconds for task in order if not task.sends)


def gaps(seeds: range) -> list[float]:
    """How much longer list schedules with insertion moves are than the optimum, as ratios."""
    found = []
    for seed in seeds:
        tasks = random_tasks(random.Random(seed))
        found.append(length(insertion_moves(tasks, list_schedule(tasks))) / optimum(tasks))
    return found


def test_list_schedule_is_near_the_optimum_on_small_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = gaps(range(100))
    with capsys.disabled():
        print(f"list schedule over optimum: mean {sum(ratios) / len(ratios):.4f}, worst {max(ratios):.3f}")
    assert sum(ratios) / len(ratios) < 1.005 and max(ratios) < 1.07
