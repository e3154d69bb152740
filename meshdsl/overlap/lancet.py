"""Lancet's second pass: split ranges of the forward pass into parts, by dynamic programming (Jiang et al., 2024, 5.1).

    T(n) = min over i of T(i) + min over k of P(i, n, k)

where P(i, n, k) is the time of the groups i to n in k parts that overlap one another. A group is a run of consecutive
tasks that takes about a fifth of the time between two mixture-of-experts layers. The all_to_alls of one layer are in
one group. A range contains an all_to_all and takes at most the time between two layers. The number of parts is
increased until one more part is slower. Neighbouring ranges become one where that is faster, because the first and the
last collective of a range have nothing to hide behind; the paper keeps ranges short to plan faster. Afterwards weight
gradients move behind the all_to_alls of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors.no_effect import NoEffectError
from ..ir import Eqn, Var, read_by
from ..lowering.program import Program
from .dw import dw_schedule
from .parts import Cut
from .planner import Candidates, Planner
from .ranges import expert_ranges, is_exchange, pipelined, reductions_early, staggered
from .reasons import no_parts
from .split import cuts_along, split
from .tasks import ordered

GROUPS = 5  # groups between two mixture-of-experts layers
MOST_PARTS = 8


@dataclass(frozen=True)
class _Range:
    """A range of the forward pass that runs in `parts` parts of the tokens, one behind the other (Lancet, section 5).

    `first` and `last` number groups of its operations, of which `GROUPS` are between two mixture-of-experts layers; the
    range ends before `last`.
    """

    first: int
    last: int
    parts: int


def lancet(planner: Planner, gradients: bool = True) -> Candidates:
    """Lancet's plan along the dim that passes through most of the program.

    Without `gradients`, only ranges are split, and weight gradients stay where they are.
    """
    planner.need_exchanges()
    program, dim = planner.unrolled, planner.request.dim
    cuts = max((cuts_along(program, each, 2) for each in planner.cut_dims()), key=len, default={})
    if dim is not None and not cuts:
        raise NoEffectError(
            f"overlap={planner.request.mode!r}, dim={dim!r} has no effect: nothing runs in parts\n"
            f"  {no_parts(program, dim, 2, split(program, dim, 2))}\n  leave dim out"
        )
    search = _Search(planner, cuts)
    ranges = search.merged(search.best())
    piped = program
    for one in ranges:
        values = {eqn.outs[0] for eqn in search.between(one.first, one.last)}
        among = [eqn for eqn in piped.eqns if eqn.outs[0] in values]
        piped = pipelined(split(piped, "", one.parts, cuts, among), [among], planner.machine, planner.placement)
    tasks = planner.tasks(piped)
    order = dw_schedule(tasks) if gradients else list(tasks.all)
    if not ranges and order == list(tasks.all):
        raise planner.no_effect(
            f"no range around an all_to_all is faster in parts{', and no weight gradient can move' * gradients}\n"
            "  use overlap='auto', which may choose none"
        )
    counts = sorted({one.parts for one in ranges})
    shown = f"{len(ranges)} range{'s' * (len(ranges) > 1)} in {' or '.join(map(str, counts))} parts"
    name = ["dw"] * gradients + [shown if ranges else "no range"]
    yield ", ".join(name), ordered(tasks, reductions_early(order))


class _Search:
    """The dynamic program over the groups of the forward pass."""

    def __init__(self, planner: Planner, cuts: Mapping[Var, Cut]):
        self.planner, self.cuts = planner, cuts
        program = planner.unrolled
        self.known: dict[object, float] = {}
        first = next((i for i, eqn in enumerate(program.eqns) if eqn.backward), len(program.eqns))
        self.forward = program.eqns[:first]
        self.place = {eqn: i for i, eqn in enumerate(self.forward)}
        self.tasks = [t for t in planner.tasks(program).all if t.eqn in self.place]
        self.bounds, self.seconds = self.groups()

    def groups(self) -> tuple[list[int], list[float]]:
        """The equation number at which each group begins, then the end of the last one; and the seconds of each
        group.
        """
        layers = list(expert_ranges(self.forward))
        inside = {i for eqns in layers for i in range(self.place[eqns[0]], self.place[eqns[-1]])}
        whole = sum(t.seconds for t in self.tasks)
        self.longest = whole / max(1, len(layers))
        least = self.longest / GROUPS
        bounds, seconds, now, end = [0], list[float](), 0.0, 0

        def close() -> None:
            nonlocal now
            bounds.append(end)
            seconds.append(now)
            now = 0.0

        for task in sorted(self.tasks, key=lambda t: self.place[t.eqn]):
            if now and task.seconds > least and end - 1 not in inside:
                close()
            now += task.seconds
            end = self.place[task.eqn] + 1
            if now >= least and end - 1 not in inside:
                close()
        if bounds[-1] < len(self.forward):
            end = len(self.forward)
            close()
        return bounds, seconds

    def between(self, first: int, last: int) -> Sequence[Eqn]:
        """The equations of the groups from `first` to before `last`."""
        return self.forward[self.bounds[first] : self.bounds[last]]

    def best(self) -> list[_Range]:
        """The ranges of the fastest partition of the forward pass, first to last; none longer than a layer's time."""
        total: list[tuple[float, list[_Range]]] = [(0.0, [])]
        for n in range(1, len(self.bounds)):
            options: list[tuple[float, list[_Range]]] = []
            for i in range(n - 1, -1, -1):
                if i < n - 1 and sum(self.seconds[i:n]) > 1.001 * self.longest:
                    break
                before, ranges = total[i]
                for parts, seconds in self.times(i, n):
                    chosen = [] if parts == 1 else [_Range(i, n, parts)]
                    options.append((before + seconds, ranges + chosen))
            total.append(min(options, key=lambda one: one[0]))
        return total[-1][1]

    def merged(self, ranges: Sequence[_Range]) -> list[_Range]:
        """Neighbouring ranges as one where that is faster: the ends of a pipeline hide nothing."""
        longer: list[_Range] = []
        left = list(reversed(ranges))
        while left:
            a = left.pop()
            both = _Range(a.first, left[-1].last, min(a.parts, left[-1].parts)) if left else a
            if left and self.of_range(both) < self.of_range(a) + sum(
                self.seconds[a.last : left[-1].first]
            ) + self.of_range(left[-1]):
                left.pop()
                longer.append(both)
            else:
                longer.append(a)
        return longer if len(longer) == len(ranges) else self.merged(longer)

    def of_range(self, one: _Range) -> float:
        return self.time(self.between(one.first, one.last), one.parts)

    def times(self, i: int, n: int) -> Iterator[tuple[int, float]]:
        """P(i, n, k) for k = 1, 2, ..., while more parts are faster."""
        eqns = self.between(i, n)
        last = self.time(eqns, 1)
        yield 1, last
        if not any(map(is_exchange, eqns)):
            return
        for parts in range(2, MOST_PARTS + 1):
            now = self.time(eqns, parts)
            yield parts, now
            if now >= last and parts > 2:
                return
            last = min(last, now)

    def time(self, eqns: Sequence[Eqn], parts: int) -> float:
        """Seconds of a range in parts, overlapped by a list schedule; infinite if it cannot be split that way."""
        key = parts, tuple((str(eqn.op), tuple(v.type for v in eqn.outs)) for eqn in eqns)
        if key not in self.known:
            self.known[key] = self.timed(eqns, parts)
        return self.known[key]

    def timed(self, eqns: Sequence[Eqn], parts: int) -> float:
        program = self.planner.unrolled
        if parts == 1:
            return self.planner.seconds(self.planner.in_order(_body(program, eqns), lambda tasks: tasks.all))
        made = split(program, "", parts, self.cuts, eqns)
        if not any(is_exchange(eqn) for eqn in made.part):
            return float("inf")
        among = set(eqns)
        body = _body(made.program, [eqn for eqn in made.program.eqns if made.of[eqn] in among])
        return staggered(self.planner.tasks(body), made.part)[1]


def _body(program: Program, eqns: Sequence[Eqn]) -> Program:
    """A range as a program: its inputs are values read from outside, its results are values read outside."""
    produced = {v for eqn in eqns for v in eqn.outs}
    ins = dict.fromkeys(v for eqn in eqns for v in eqn.ins if v not in produced)
    mine = set(eqns)
    read = read_by((eqn for eqn in program.eqns if eqn not in mine), program.outs)
    outs = [v for eqn in eqns for v in eqn.outs if v in read]
    return program.replace(ins=tuple(ins), eqns=tuple(eqns), outs=tuple(outs))
