"""Find the best splits of single parameters beyond a layout's rules, as overrides chosen from cost tables.

A variable is a parameter: an input and everything else that its path names (its optimizer state and the results);
stacked layers are one variable. Its choices are no override, or one or two of its dims split over axes that the layout
does not use in it.

Measured, from real programs: the cost of each choice alone, and of any two choices whose parameters interact
(`interacting_inputs`). Exact: the choice that minimises the sum of these tables, by elimination (`eliminate`); with a
memory limit, the best choice found by a Lagrangian and by single changes, with the gap to a bound on every choice of
the tables. Assumed: costs add up beyond pairs. Therefore the program with the chosen overrides is compiled and costed,
and that cost is reported with the error of the sum. If the program does not fit, the choice is repeated with that much
less memory. The result is the best of all programs that were costed and fit, including the layout without overrides.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..cost.machine import Machine
from ..errors import LayoutError
from ..errors.units import show_bytes
from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from .eliminate import Tables
from .evaluate import Assignment, Entry, Problem, check_objective, evaluate
from .interacting import interacting_inputs
from .override_result import OverrideCounts, OverrideResult
from .parameters import Parameter, Rules, overriding, parameters, splits

__all__ = ["overrides"]

ROUNDING = 1e-9  # relative to the cost: a smaller difference counts as none
ROUNDS = 4  # maximum repeats with less memory


def overrides(
    problem: Problem,
    mesh: Mesh,
    layout: Layout,
    machine: Machine,
    *,
    objective: str = "seconds",
    limit: float | None = None,
    tensors: Collection[str] | None = None,
    choices: int | None = 3,
    assignment: Assignment | None = None,
) -> OverrideResult:
    """The best overrides of a layout for a problem; see `md.search_overrides`."""
    started = time.perf_counter()
    check_objective(objective, machine)
    if objective == "energy":
        raise LayoutError(
            "search_overrides takes no objective 'energy': it compares layouts of one mesh, whose energy is "
            "in proportion to their seconds\n  use objective='seconds'"
        )
    if choices is not None and choices < 1:
        raise LayoutError(f"each tensor needs at least 1 choice besides staying as it is; got choices={choices}")
    real = _Programs(problem, mesh, layout, machine, objective, machine.hbm if limit is None else limit, assignment)
    before = real.entry({})  # raises for an illegal layout
    listed = parameters(problem.graph, problem.results or (), tensors)
    options = [list(splits(each, layout, mesh)) for each in listed]
    kept = [[{}, *real.best(each, candidates, choices)] for each, candidates in zip(listed, options, strict=True)]
    pairs = interacting_inputs(problem.graph, {v: i for i, each in enumerate(listed) for v in each.members})
    tables = real.tables(listed, kept, pairs)
    room = real.limit - before.peak_bytes
    capped = tables.within(room)
    chosen = [real.chosen(listed, kept, capped.picks)]
    for _ in range(ROUNDS):
        last = real.known(chosen[-1])
        if last is not None and last.fits:
            break
        room = tables.amounts(capped.picks)[1] - 1 if last is None else room - (last.peak_bytes - real.limit)
        again = real.chosen(listed, kept, tables.within(room).picks)
        if again in chosen:
            break
        chosen.append(again)
    cost_of, load_of = tables.amounts(capped.picks)
    best, picked = real.answer()
    return OverrideResult(
        problem.title,
        machine,
        objective,
        real.limit,
        before,
        best,
        {path: dict(rules) for path, rules in picked},
        real.known(chosen[0]),
        getattr(before, objective) + cost_of,
        before.peak_bytes + load_of,
        getattr(before, objective) + capped.bound,
        OverrideCounts(
            tensors=len(listed),
            choices=sum(map(len, kept)) - len(kept),
            left_out=sum(map(len, options)) - sum(map(len, kept)) + len(kept) - len(real.illegal & real.single),
            illegal=len(real.illegal & real.single),
            pairs=len(tables.together),
            width=tables.width,
            programs=real.programs,
        ),
        time.perf_counter() - started,
    )


Chosen = tuple[tuple[str, tuple[tuple[str, Axes], ...]], ...]  # by pattern: its rules, sorted


class _Programs:
    """Programs of the layout with overrides, each partitioned and costed once."""

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh,
        layout: Layout,
        machine: Machine,
        objective: str,
        limit: float,
        assignment: Assignment | None,
    ):
        self.problem, self.mesh, self.layout, self.machine = problem, mesh, layout, machine
        self.objective, self.limit = objective, limit
        self.assignment = assignment
        self.entries: dict[Chosen, Entry] = {}
        self.illegal: set[Chosen] = set()
        self.single: set[Chosen] = set()

    @property
    def programs(self) -> int:
        """Number of programs costed."""
        return len(self.entries)

    def entry(self, overrides: Mapping[str, Rules]) -> Entry:
        """The cost of the layout with these overrides; raises `LayoutError` if it is illegal."""
        key = _key(overrides)
        if key not in self.entries:
            added = {p: {**self.layout.overrides.get(p, {}), **rules} for p, rules in overrides.items()}
            kept = {p: rules for p, rules in self.layout.overrides.items() if p not in added}
            layout = Layout(self.layout.rules, overrides={**kept, **added})  # later patterns override earlier ones
            self.entries[key] = evaluate(self.problem, self.mesh, layout, self.machine, self.limit, self.assignment)
        return self.entries[key]

    def look(self, overrides: Mapping[str, Rules]) -> Entry | None:
        """The same as `entry`, but None if the layout is illegal."""
        key = _key(overrides)
        if key in self.illegal:
            return None
        try:
            return self.entry(overrides)
        except LayoutError:
            self.illegal.add(key)
            return None

    def best(self, parameter: Parameter, candidates: Sequence[Rules], most: int | None) -> list[Rules]:
        """The legal choices; if more than `most`, alternately the best alone by objective and by memory."""
        legal: list[tuple[Rules, Entry]] = []
        for rules in candidates:
            one = overriding(parameter, rules)
            self.single.add(_key(one))
            entry = self.look(one)
            if entry is not None:
                legal.append((rules, entry))
        if most is None or len(legal) <= most:
            return [rules for rules, _ in legal]
        by_cost = sorted(legal, key=lambda each: (getattr(each[1], self.objective), each[1].peak_bytes))
        by_load = sorted(legal, key=lambda each: (each[1].peak_bytes, getattr(each[1], self.objective)))
        picked: list[Rules] = []
        for (one, _), (two, _) in zip(by_cost, by_load, strict=True):
            picked += [rules for rules in ([one] if one == two else [one, two]) if rules not in picked]
        return [rules for rules in candidates if rules in picked[:most]]

    def tables(
        self, listed: Sequence[Parameter], kept: Sequence[Sequence[Rules]], pairs: Collection[tuple[int, int]]
    ) -> Tables:
        """Differences to the layout without overrides; for two choices, the difference to the sum of both."""
        base = self.amounts(self.entry({}))

        def more(entry: Entry | None, expected: np.ndarray) -> np.ndarray:
            if entry is None:
                return np.full(2, math.inf)
            extra = self.amounts(entry) - expected
            return np.where(np.abs(extra) > ROUNDING * np.abs(base), extra, 0.0)

        alone: list[np.ndarray] = []
        for each, candidates in zip(listed, kept, strict=True):
            costs = [np.zeros(2), *(more(self.look(overriding(each, rules)), base) for rules in candidates[1:])]
            alone.append(np.stack(costs, axis=1))
        together: dict[tuple[int, int], np.ndarray] = {}
        for i, j in sorted(pairs):
            table = np.zeros((2, len(kept[i]), len(kept[j])))
            for a, b in itertools.product(range(1, len(kept[i])), range(1, len(kept[j]))):
                both = self.look({**overriding(listed[i], kept[i][a]), **overriding(listed[j], kept[j][b])})
                table[:, a, b] = more(both, base + alone[i][:, a] + alone[j][:, b])
            if table.any():
                together[i, j] = table
        return Tables(alone, together)

    def amounts(self, entry: Entry) -> np.ndarray:
        return np.array([getattr(entry, self.objective), entry.peak_bytes], float)

    def chosen(
        self, listed: Sequence[Parameter], kept: Sequence[Sequence[Rules]], picks: Sequence[int]
    ) -> dict[str, Rules]:
        """The overrides of a choice; also costs their program."""
        each = zip(listed, kept, picks, strict=True)
        overrides = {p: rules for one, rules_of, n in each if n for p, rules in overriding(one, rules_of[n]).items()}
        self.look(overrides)
        return overrides

    def known(self, overrides: Mapping[str, Rules]) -> Entry | None:
        """The cost of these overrides if costed before, otherwise None."""
        return self.entries.get(_key(overrides))

    def answer(self) -> tuple[Entry, Chosen]:
        """The best program that fits, with its overrides; raises `LayoutError` if none fits."""
        fit = [(getattr(e, self.objective), e.peak_bytes, len(key), key) for key, e in self.entries.items() if e.fits]
        if fit:
            key = min(fit)[-1]
            return self.entries[key], key
        least = min(self.entries.values(), key=lambda e: e.peak_bytes)
        raise LayoutError(
            f"no overrides of '{self.layout}' on '{self.mesh}' that were costed fit {show_bytes(self.limit)} "
            f"on each device\n"
            f"  the smallest of {len(self.entries)} needs {show_bytes(least.peak_bytes)}: {least.layout!r}\n"
            "  try another layout (md.search), or more choices of each tensor (choices=)\n"
            + "\n".join(least.report.problems())
        )


def _key(overrides: Mapping[str, Rules]) -> Chosen:
    return tuple(sorted((pattern, tuple(sorted(rules.items()))) for pattern, rules in overrides.items()))
