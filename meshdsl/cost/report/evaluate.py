"""Evaluate a program on a machine as a `Report`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from ...ir import Var
from ...layouts import Layout, Mesh
from ...lowering import Program
from ..ledger import ledger
from ..machine import Machine
from ..machine import machine as machine_named
from ..memory import memory
from ..network import Placement
from ..timeline import timeline
from .report import Report
from .show import analysis


def cost(
    program: Program,
    machine: Machine | str | os.PathLike[str] = "tpu-v5e",
    *,
    donated: Collection[Var] = (),
    categories: Mapping[Var, str] | None = None,
    placement: Placement | None = None,
    limit: float | None = None,
    layout: Layout | None = None,
    title: str = "",
    mesh: Mesh | None = None,
) -> Report:
    """Compute the cost of a program on a machine, without devices and without arrays.

    It is the program that the machine's compiler gets (`Target.passes`).
    `donated` are inputs whose buffers results may reuse. `limit` is the memory of one device in bytes (default: the
    machine's). `mesh` is the requested mesh, if it differs from the program's.
    Raises `LayoutError` if the mesh is larger than the machine, `MachineError` for an unknown machine.
    """
    machine = machine if isinstance(machine, Machine) else machine_named(machine)
    mesh = program.mesh if mesh is None else mesh
    program = machine.target.prepare(program)
    costs = ledger(program)
    return Report(
        title=title,
        layout=layout,
        machine=machine,
        ledger=costs,
        memory=memory(program, donated=donated, categories=categories, machine=machine),
        timeline=timeline(costs, machine, placement),
        limit=machine.hbm if limit is None else limit,
        mesh=mesh,
        text=analysis,
    )
