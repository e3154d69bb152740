"""The problems of one function under every combination of knobs. Each step is traced once."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compile import Compiled
from ..compile.pipeline import options_of
from ..compile.plan import Plan, machine_text, planned
from ..compile.signature import Stages
from ..cost.machine import Machine
from ..cost.network import has_slow_axis
from ..cost.report.report import Report
from ..errors import MeshdslError
from ..ir import Graph, walk
from ..layouts import Layout, Mesh
from ..trace import tree


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """A graph to search a layout for, and the function that compiles and costs it."""

    graph: Graph
    cost: Callable[[Mesh, Layout], Report]  # raises `LayoutError` for an illegal layout
    results: tuple[str, ...]  # paths of the results
    plan: Plan  # the knobs other than mesh, layout and machine
    machine: str | None  # if it decides part of them


class Variants:
    """The problem of each plan; a plan's mesh and layout do not matter, and the machine is that of the search.

    Steps that are traced to equal graphs, such as remat "model" and "none" of a model without rematerialisation, are
    one step: `canonical` returns the plan of the first.
    """

    def __init__(
        self,
        compiled: Compiled,
        args: Sequence[Any],
        title: str,
        machine: Machine,
        limit: float = math.inf,
        first: Mapping[str, Any] | None = None,
    ):
        self.compiled, self.args, self.title = compiled, args, title
        self.machine, self.limit = machine, limit  # bytes per device
        own = compiled.plan.replace(mesh="", layout="")
        self.base = own.replace(**(first or {}))  # where the search starts
        self.priced = "steps" in (first or {})  # the search's machine decides on steps in plans with "auto"
        self.refused: dict[tuple[str, int], str] = {}  # steps that cannot be made
        self._steps: dict[tuple[str, int], Compiled] = {(own.remat, own.microbatches): compiled}
        self._alike: dict[Any, list[tuple[Graph, tuple[str, int]]]] = {}  # graphs with the same operations
        self._canonical: dict[tuple[str, int], tuple[str, int]] = {}
        self._problems: dict[Plan, SearchProblem] = {}

    def canonical(self, plan: Plan) -> Plan | None:
        """The plan with the first step of an equal graph; None if the step cannot be made."""
        step = plan.remat, plan.microbatches
        if step in self.refused:
            return None
        if plan.remat == "offload" and not self.machine.host_bandwidth:
            self.refused[step] = f"machine {self.machine.name!r} gives no host_bandwidth"
            return None
        if step not in self._canonical:
            try:
                stages, _ = self._step(*step)._for(self.args)
            except MeshdslError as error:
                self.refused[step] = str(error)
                return None
            self._canonical[step] = self._first_equal(stages.graph, step)
        remat, microbatches = self._canonical[step]
        flat = self.priced and plan.steps == "auto" and not has_slow_axis(self.machine.network, plan.mesh)
        steps = "flat" if flat else plan.steps
        return plan.replace(remat=remat, microbatches=microbatches, steps=steps, machine=None)

    def _first_equal(self, graph: Graph, step: tuple[str, int]) -> tuple[str, int]:
        """The first step with a graph that prints the same; graphs with other operations are not printed."""
        alike = self._alike.setdefault(tuple(eqn.op for eqn, _ in walk(graph)), [])
        text = str(graph) if alike else ""
        first = next((known for other, known in alike if str(other) == text), None)
        if first is None:
            alike.append((graph, step))
        return first or step

    def problem(self, plan: Plan) -> SearchProblem:
        """The problem of a canonical plan."""
        knobs = plan.replace(mesh="", layout="")
        if knobs not in self._problems:
            self._problems[knobs] = self._problem(knobs)
        return self._problems[knobs]

    def _step(self, remat: str, microbatches: int) -> Compiled:
        if (remat, microbatches) not in self._steps:
            base = self.compiled
            plan = Plan(remat=remat, microbatches=microbatches)
            f = planned(base.unplanned, plan)
            self._steps[remat, microbatches] = Compiled(
                f, Mesh(""), Layout(""), base.donate, base.options, base.static, plan, base.unplanned
            )
        return self._steps[remat, microbatches]

    def _problem(self, knobs: Plan) -> SearchProblem:
        compiled = copy.copy(self._step(knobs.remat, knobs.microbatches))
        options = compiled.options
        priced = self.priced and knobs.steps == "auto"
        machine = self.machine if knobs.needs_machine else options.machine
        compiled.options = options_of(knobs, machine, options.strict, options.memory_limit)
        stages, _ = compiled.under(compiled.mesh, compiled.layout)._for(self.args)
        if priced:  # on a mesh; on one device, no axis is slow
            compiled.options = dataclasses.replace(compiled.options, machine=self.machine)

        def cost(mesh: Mesh, layout: Layout) -> Report:
            report = compiled.under(mesh, layout).cost(*self.args, machine=self.machine, limit=self.limit)
            return dataclasses.replace(report, title=self.title)

        name = machine_text(self.machine) if knobs.needs_machine or priced else None
        return SearchProblem(stages.graph, cost, _paths(stages), knobs, name)


def _paths(stages: Stages) -> tuple[str, ...]:
    places = tree.tree_unflatten(stages.result, range(len(stages.graph.outs)))
    return tuple(tree.keystr(path, simple=True, separator="/") for path, _ in tree.tree_flatten_with_path(places)[0])
