"""The steps of a program as tasks, with times on one machine and the dependencies between them.

A task is a kernel, loop, branch or collective of `cost.fusion`, with the seconds that the timeline gives it. The
schedulers of this package order tasks; `ordered` builds the program with that order.

Reorder a program's steps, and split chosen collectives into a start and a wait.

Only the order changes: all equations keep their operands, so results are bitwise the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..cost.fusion import Kernel, Send, Step, holders
from ..cost.lanes import COMPUTE, LaneSchedule, lane_of
from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.network import Placement
from ..errors import InternalError
from ..ir import Eqn, Fuses, Op, Var
from ..lowering.asynchrony import WAIT, Start
from ..lowering.program import Program


@dataclass(eq=False)
class Task:
    """One step: its `seconds` alone on its lanes, the tasks that it reads from, and the tasks that read from it."""

    number: int  # its place in the program
    step: Step
    lanes: tuple[str, ...]  # those of `cost.lanes` that it occupies
    seconds: float
    share: float = 1.0  # of the time, in which it computes
    sends: bool = False  # it is a collective that runs beside computation
    needs: list[Task] = field(default_factory=list["Task"])
    readers: list[Task] = field(default_factory=list["Task"])
    tail: float = 0.0  # seconds of the longest chain of tasks from this one (included) to the end of the step

    @property
    def eqn(self) -> Eqn:
        """The equation that represents it: a kernel's last one."""
        return self.step.eqns[-1] if isinstance(self.step, Kernel) else self.step.eqn


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks of a program in program order: all of them, or a subset to schedule alone."""

    program: Program
    machine: Machine
    all: tuple[Task, ...]


def tasks_of(program: Program, machine: Machine, placement: Placement) -> Tasks:
    """The tasks of a program without starts and waits.

    A collective of a kind that the machine cannot run beside computation is on the compute lane.
    """
    costs = ledger(program)
    items, _ = LaneSchedule(costs, machine, placement, pipelined=True).items(costs.steps, 0, {})
    of: dict[int, Task] = {}
    for number, item in enumerate(items):
        lanes, sends = item.lanes, False
        if isinstance(item.step, Send):
            record = costs.of(item.step)[0].record
            sends, lane = record.op.timed_as in machine.asynchronous, lane_of(record.axes)
            lanes = (lane,) if sends else (COMPUTE, lane)
        of[id(item)] = Task(number, item.step, lanes, item.work, item.share, sends)
    for item in items:
        for reader in item.readers:
            of[id(item)].readers.append(of[id(reader)])
            of[id(reader)].needs.append(of[id(item)])
    tasks = tuple(of.values())
    _update_after_reads(program, tasks)
    for task in reversed(tasks):
        task.tail = task.seconds + max((reader.tail for reader in task.readers), default=0.0)
    return Tasks(program, machine, tasks)


def _update_after_reads(program: Program, tasks: Sequence[Task]) -> None:
    """Let tasks that write a part of a value in place wait for those before them that read it: otherwise the device
    copies it."""
    stored, readers = holders(program), defaultdict[Var, list[Task]](list)
    for task in tasks:
        eqns = task.step.eqns if isinstance(task.step, Kernel) else ()
        updated = [eqn.ins[0] for eqn in eqns if isinstance(eqn.op, Op) and eqn.op.fuses is Fuses.UPDATE]
        for source in dict.fromkeys(reader for v in updated for reader in readers[stored.get(v, v)]):
            if source not in task.needs:
                source.readers.append(task)
                task.needs.append(source)
        for v in task.step.reads:
            readers[v].append(task)


def ordered(tasks: Tasks, order: Sequence[Task]) -> Program:
    """The program with its tasks in this order.

    A collective starts at its place in the order; its wait is before the first task that reads its result.
    """
    eqns: list[Eqn] = []
    waiting: dict[Task, None] = {}
    for task in order:
        for source in task.needs:
            if source in waiting:
                del waiting[source]
                eqns.append(source.eqn)
        if task.sends:
            waiting[task] = None
        eqns.append(task.eqn)
    return reorder(tasks.program, [*eqns, *(task.eqn for task in waiting)])


def reorder(program: Program, order: Sequence[Eqn]) -> Program:
    """The program with its equations in this order.

    A collective that is in the order twice starts at its first place and is waited for at its second. An equation that
    the order leaves out (a view, a constant, a value computed inside its readers) is placed before its first reader.
    Raises `InternalError` if the order places an equation before its operands.
    """
    places = Counter(order)
    done: set[Eqn] = set()
    eqns: list[Eqn] = []
    flight: dict[Eqn, Var] = {}
    for eqn in order:
        if eqn in flight:
            done.add(eqn)
            eqns.append(Eqn(WAIT, (flight[eqn],), eqn.outs, {}, eqn.where, eqn.backward))
            continue
        eqns += _unlisted(eqn.ins, program.producers, places.keys(), done)
        if places[eqn] == 1:
            done.add(eqn)
            eqns.append(eqn)
        elif eqn.collective is None:
            raise InternalError(f"reorder: {eqn.op} at {eqn.where} is no collective and cannot be started")
        else:
            flight[eqn] = dataclasses.replace(eqn.outs[0])
            eqns.append(eqn.replace(op=Start(eqn.collective), outs=(flight[eqn],)))
    eqns += _unlisted(program.outs, program.producers, places.keys(), done)
    return program.replace(eqns=tuple(eqns))


def _unlisted(ins: Sequence[Var], producers: Mapping[Var, Eqn], listed: Set[Eqn], done: set[Eqn]) -> Iterator[Eqn]:
    """The equations to place before a reader of these values, operands first, which are done then.

    Iterative, because chains may be long. Raises `InternalError` for one that the order lists later.
    """
    stack = [(producers[v], False) for v in reversed(ins) if v in producers]
    while stack:
        eqn, ready = stack.pop()
        if eqn in done:
            continue
        if eqn in listed:
            raise InternalError(f"reorder: {eqn.op} at {eqn.where} is read before its place in the order")
        if ready:
            done.add(eqn)
            yield eqn
            continue
        stack.append((eqn, True))
        stack += [(producers[v], False) for v in reversed(eqn.ins) if v in producers and producers[v] not in done]
