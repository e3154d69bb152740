"""Schedules: the timeline against a simulation of its own, and list schedules against branch and bound."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

import meshdsl as md
from meshdsl.control.host import FETCH, OFFLOAD
from meshdsl.cost.fusion import Kernel, Send, Wait
from meshdsl.cost.lanes import COMPUTE, LaneSchedule
from meshdsl.cost.ledger import ledger
from meshdsl.cost.network import place
from meshdsl.cost.timeline import timeline
from meshdsl.lowering.asynchrony import Start
from meshdsl.lowering.program import Program
from meshdsl.lowering.unroll import unroll
from meshdsl.overlap.list_schedule import fastest_schedule, list_schedule, timed_schedule
from meshdsl.overlap.tasks import Task, Tasks, ordered, tasks_of
from tests.lowering.programs import draw

MACHINE = dataclasses.replace(md.machine("a100-p4de"), overlap_slowdown=1.0)


def simulated(program: Program) -> float:
    """Seconds of a planned program by rules of its own: a thread computes, one for each set of axes sends, one copies.

    The computing thread takes the steps in order. A start costs nothing: it hands the collective to its thread, which
    sends in that order. At a wait it stops until the collective has arrived. Copies to and from the host
    are in the program's order too, each as soon as its operand is there.
    """
    found = ledger(program)
    machine = LaneSchedule(found, MACHINE, place(MACHINE.network, program.mesh), pipelined=False)
    now, free, ready = 0.0, dict[str, float](), dict[object, float]()
    for step in found.steps:
        operands = max((ready.get(v, 0.0) for v in step.reads), default=0.0)
        if isinstance(step, Send) and isinstance(step.eqn.op, Start):
            lane = ",".join(step.axes)
            begin = max(now, free.get(lane, 0.0))
            ready[step.eqn.outs[0]] = free[lane] = begin + machine.item(step, 0).work
        elif isinstance(step, Wait):
            now = max(now, ready[step.eqn.ins[0]])
        elif isinstance(step, Kernel) and step.eqns[-1].op in (OFFLOAD, FETCH):
            begin = max(operands, free.get("the host", 0.0))
            ready[step.writes[0]] = free["the host"] = begin + machine.item(step, 0).work
        else:
            now = max(now, operands) + machine.item(step, 0).work
            ready.update(dict.fromkeys(step.writes, now))
    return max([now, *ready.values()])


def planned(seed: int) -> Program | None:
    """A random program in the order of its list schedule; None where the layout is illegal."""
    case = draw(seed)
    compiled, arguments = case.compiled()
    try:
        flat = unroll(compiled.program(*arguments))
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


def random_tasks(rng: random.Random, least: int, most: int) -> Tasks:
    """Random tasks, a third of them collectives on one of two lanes, with random dependencies."""
    tasks: list[Task] = []
    for number in range(rng.randint(least, most)):
        lane = rng.choice([COMPUTE, COMPUTE, rng.choice(["x", "y"])])
        sends, seconds = lane != COMPUTE, rng.choice([1.0, 2.0, 3.0, 5.0])
        task = Task(number, None, (lane,), seconds, float(not sends), sends)  # pyright: ignore[reportArgumentType]
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
            end[task] = free[task.lanes[0]] = max(now, free.get(task.lanes[0], 0.0)) + task.seconds
        else:
            now = end[task] = ready + task.seconds
    return max(end.values(), default=0.0)


@dataclasses.dataclass(frozen=True)
class State:
    """A partial order: the tasks that are issued, and the times at which the lanes and the results are free."""

    done: int  # bits of the issued tasks
    now: float  # of the computing lane
    free: tuple[float, ...]  # by lane of `Optimum.lanes`
    ends: tuple[float, ...]  # by task; 0 for a task that is not issued, or whose readers all are

    def no_later(self, other: State) -> bool:
        pairs = zip((self.now, *self.free, *self.ends), (other.now, *other.free, *other.ends), strict=True)
        return all(a <= b for a, b in pairs)


class Optimum:
    """The least length over all orders, by branch and bound.

    A state is left out if its bound reaches the best length, or if another one with the same tasks issued is no later
    in anything. The bound is the largest of: the chain of tasks from each task that is not issued; and for each lane,
    the work that is left and the shortest chain behind it.
    """

    def __init__(self, tasks: Tasks, best: float):
        self.tasks, self.best = tasks.all, best
        self.lanes = sorted({t.lanes[0] for t in tasks.all if t.sends})
        self.needs = [sum(1 << s.number for s in t.needs) for t in tasks.all]
        self.readers = [sum(1 << r.number for r in t.readers) for t in tasks.all]
        self.seen: dict[int, list[State]] = {}
        n = len(tasks.all)
        self.grow(State(0, 0.0, (0.0,) * len(self.lanes), (0.0,) * n))

    def grow(self, state: State) -> None:
        if state.done == (1 << len(self.tasks)) - 1:
            self.best = min(self.best, max((state.now, *state.free)))
            return
        known = self.seen.setdefault(state.done, [])
        if any(other.no_later(state) for other in known) or self.bound(state) >= self.best - 1e-9:
            return
        known.append(state)
        ready = [t for t in self.tasks if not state.done >> t.number & 1 and not self.needs[t.number] & ~state.done]
        for task in sorted(ready, key=lambda t: (-t.tail, t.number)):
            self.grow(self.after(state, task))

    def after(self, state: State, task: Task) -> State:
        now = max([state.now, *(state.ends[s.number] for s in task.needs)])
        free, done, ends = list(state.free), state.done | 1 << task.number, list(state.ends)
        if task.sends:
            lane = self.lanes.index(task.lanes[0])
            free[lane] = ends[task.number] = max(now, free[lane]) + task.seconds
        else:
            now += task.seconds
        for t in self.tasks:  # a time in the past, or that nobody reads, tells no states apart
            if not self.readers[t.number] & ~done or ends[t.number] <= now:
                ends[t.number] = 0.0
        return State(done, now, tuple(max(now, one) if one > now else now for one in free), tuple(ends))

    def bound(self, state: State) -> float:
        early: dict[Task, float] = {}
        work = dict.fromkeys([COMPUTE, *self.lanes], 0.0)
        behind = dict.fromkeys([COMPUTE, *self.lanes], float("inf"))
        least = max((state.now, *state.free))
        free = dict(zip(self.lanes, state.free, strict=True))
        for task in self.tasks:
            if state.done >> task.number & 1:
                continue
            ends = (early[s] + s.seconds if s in early else state.ends[s.number] for s in task.needs)
            early[task] = max([state.now, free.get(task.lanes[0], 0.0), *ends])
            least = max(least, early[task] + task.tail)
            work[task.lanes[0]] += task.seconds
            behind[task.lanes[0]] = min(behind[task.lanes[0]], task.tail - task.seconds)
        start = {COMPUTE: state.now, **free}
        return max([least, *(start[lane] + work[lane] + behind[lane] for lane in work if work[lane])])


def every(tasks: Tasks) -> float:
    """The least length over all orders, one after another."""
    best = float("inf")

    def grow(order: list[Task], left: list[Task]) -> None:
        nonlocal best
        if not left:
            best = min(best, length(order))
        for task in left:
            if all(source in order for source in task.needs):
                grow([*order, task], [t for t in left if t is not task])

    grow([], list(tasks.all))
    return best


def test_branch_and_bound_finds_the_least_of_all_orders() -> None:
    for seed in range(30):
        tasks = random_tasks(random.Random(seed), 4, 6)
        assert Optimum(tasks, float("inf")).best == every(tasks), f"seed {seed}"


def gaps(seeds: range) -> list[float]:
    """The lengths of the fastest list schedules, as ratios to the optimum."""
    found = []
    for seed in seeds:
        tasks = random_tasks(random.Random(seed), 4, 16)
        ours = length(fastest_schedule(tasks))
        found.append(ours / Optimum(tasks, ours).best)
    return found


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_list_schedule_is_near_the_optimum_on_small_graphs(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    ratios = gaps(range(count))
    with capsys.disabled():
        print(f"list schedule over optimum: mean {sum(ratios) / len(ratios):.4f}, worst {max(ratios):.3f}")
    assert sum(ratios) / len(ratios) < 1.02 and max(ratios) < 1.2


def test_a_schedule_keeps_dependencies_and_states_its_seconds() -> None:
    for seed in range(20):
        tasks = random_tasks(random.Random(seed), 4, 60)
        order, seconds = timed_schedule(tasks, lambda task: task.tail)
        place = {task: i for i, task in enumerate(order)}
        assert sorted(task.number for task in order) == list(range(len(tasks.all)))
        assert all(place[source] < place[task] for task in order for source in task.needs)
        assert seconds == pytest.approx(length(order), rel=1e-12), f"seed {seed}"
