"""One collective in flight: a planned program whose windows do not intersect.

A plan may start a collective while another one is in flight: along the same axes, where it queues, or along others. A
compiler that runs one collective at a time (TPU) moves one of the two windows away from its products. Here the first
one's wait is placed where the timeline says that it is complete, and the second one's start directly after it.
"""

from __future__ import annotations

from ..cost.fusion import Kernel, Send, Wait
from ..cost.lanes import LaneSchedule
from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.network import Placement
from ..ir import Eqn
from ..lowering.asynchrony import WAIT, Start, pairs
from ..lowering.program import Program


def one_in_flight(program: Program, machine: Machine, placement: Placement) -> Program:
    """The program with later starts and earlier waits; the order of everything else is the same."""
    begins, ends = _times(program, machine, placement)
    queue = _Queue(pairs(program), ends)
    for eqn in program.eqns:
        if eqn in begins:
            queue.complete(begins[eqn])
        if isinstance(eqn.op, Start):
            queue.start(eqn)
        elif eqn.op is WAIT:
            queue.wait(eqn)
        else:
            queue.eqns.append(eqn)
    return program.replace(eqns=tuple(queue.eqns))


def _times(program: Program, machine: Machine, placement: Placement) -> tuple[dict[Eqn, float], dict[Eqn, float]]:
    """The start time of each kernel, by its last equation, and the time at which each started collective completes."""
    costs = ledger(program)
    begins: dict[Eqn, float] = {}
    ends: dict[Eqn, float] = {}
    for item in LaneSchedule(costs, machine, placement, pipelined=False).ran(costs.steps):
        if isinstance(item.step, Kernel):
            begins[item.step.eqns[-1]] = item.start
        elif isinstance(item.step, Send) and isinstance(item.step.eqn.op, Start):
            ends[item.step.eqn] = max(item.end, ends.get(item.step.eqn, 0.0))
        elif not isinstance(item.step, Wait):
            begins[item.step.eqn] = item.start
    return begins, ends


class _Queue:
    """A program under rewriting: its new equations, and the collectives in flight and queued."""

    def __init__(self, wait_of: dict[Eqn, Eqn], ends: dict[Eqn, float]):
        self.wait_of, self.ends = wait_of, ends
        self.start_of = {wait: start for start, wait in wait_of.items()}
        self.eqns: list[Eqn] = []
        self.flight: list[Eqn] = []  # the first one is in flight, the others are queued
        self.done: set[Eqn] = set()

    def start(self, eqn: Eqn) -> None:
        self.flight.append(eqn)
        if len(self.flight) == 1:
            self.eqns.append(eqn)

    def wait(self, eqn: Eqn) -> None:
        """Complete the collectives in flight, in order, up to the one that this equation waits for."""
        start = self.start_of[eqn]
        while start not in self.done:
            self.next()

    def complete(self, now: float) -> None:
        """Complete the collectives that have ended by `now` and that delay another one."""
        while len(self.flight) > 1 and self.ends[self.flight[0]] <= now:
            self.next()

    def next(self) -> None:
        """Wait for the collective in flight, and start the next one."""
        first = self.flight.pop(0)
        self.done.add(first)
        self.eqns.append(self.wait_of[first])
        self.eqns += self.flight[:1]
