"""The plan of a run: that of a file or the default one, on another mesh, with other knobs.

The commands and the settings of a run name the knobs of a plan alike (`KNOBS`), and read them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshdsl as md

from ..errors import UsageError
from .load import mesh_and_layout

# name of an option and of a setting -> field of the plan, and of the value of that field
KNOBS = {
    "weight_update": ("weight_update", "mode"),
    "update_group": ("weight_update", "group"),
    "regather": ("weight_update", "regather"),
    "remat": ("remat", ""),
    "microbatches": ("microbatches", ""),
    "chunks": ("chunks", ""),
    "overlap": ("overlap", "mode"),
    "collective_steps": ("steps", ""),
}


def plan_of_file(file: str | Path | None) -> md.Plan | None:
    """The plan of a file, if one is given; raises `UsageError` for a wrong one."""
    try:
        return None if file is None else md.Plan.load(file)
    except md.LayoutError as error:
        raise UsageError(str(error)) from None


def plan_on(workload: md.Workload, plan: md.Plan | None, layout: str | None, mesh: str | None) -> md.Plan:
    """The plan on this mesh under this layout. What is None is the plan's; without a plan, see `mesh_and_layout`."""
    if plan is not None and layout is None and mesh is None:
        return plan
    if plan is not None and mesh is None and layout and ":" in layout:
        mesh = str(plan.mesh)
    new_mesh, new_layout = mesh_and_layout(workload, layout, mesh)
    if plan is None:
        return md.Plan(new_mesh, new_layout)
    return plan.replace(mesh=new_mesh, layout=plan.layout if layout is None else new_layout)


def knobs_of(plan: md.Plan) -> dict[str, Any]:
    """The knobs of a plan by the names of `KNOBS`."""
    values = {name: getattr(plan, field) for name, (field, _) in KNOBS.items()}
    return {name: getattr(value, KNOBS[name][1]) if KNOBS[name][1] else value for name, value in values.items()}


def with_knobs(plan: md.Plan, knobs: Mapping[str, Any]) -> md.Plan:
    """The plan with these values of `KNOBS`; another overlap mode has no options of the plan's."""
    fields: dict[str, dict[str, Any]] = {}
    for name, value in knobs.items():
        field, inner = KNOBS[name]
        fields.setdefault(field, {})[inner] = value
    changes: dict[str, Any] = {}
    for field, values in fields.items():
        before = getattr(plan, field)
        if field == "overlap":
            changes[field] = before if values["mode"] == before.mode else values["mode"]
        else:
            changes[field] = values[""] if "" in values else dataclasses.replace(before, **values)
    return plan.replace(**changes) if changes else plan
