"""The plan of a step on the command line: a plan file, and options that override its knobs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...overlap.values import MODES, STEPS
from .common import positive, section, workload_of

__all__ = [
    "check_forward",
    "given_knobs",
    "knob_options",
    "overlap_option",
    "plan_of",
    "update_options",
    "workload_and_plan",
]

UPDATES = ("replicated", "sharded", "auto")


def knob_options(parser: argparse.ArgumentParser, *, overlap: bool = True, several: bool = False) -> None:
    """Add the options for a plan file and for the knobs of the step; `several` allows many plans and overlaps."""
    group = section(parser, "plan")
    option = group.add_argument
    repeated: dict[str, Any] = {"action": "append", "default": []} if several else {}
    again = "; may be repeated" * several
    option(
        "--plan",
        type=Path,
        metavar="FILE",
        help=f"TOML file of a plan; other options override its knobs{again}",
        **repeated,
    )
    update_options(group)
    option(
        "--collective-steps",
        choices=STEPS,
        help="collectives over slow and fast mesh axes in steps: auto, where that is faster on the machine; flat, "
        "never (default); always",
    )
    if overlap:
        overlap_option(group, several=several)
    else:
        parser.set_defaults(overlap=None)


def overlap_option(parser: argparse._ActionsContainer, *, several: bool = False) -> None:
    """Add the option for overlapping communication with computation; `several` allows many values."""
    repeated: dict[str, Any] = {"action": "append", "default": []} if several else {}
    parser.add_argument(
        "--overlap",
        choices=MODES,
        help="overlap of communication with computation (default none)" + "; may be repeated" * several,
        **repeated,
    )


def update_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for the weight update, rematerialisation and micro-batches."""
    option = parser.add_argument
    option("--weight-update", choices=UPDATES, help="weight update of the training step (default replicated)")
    option(
        "--update-group",
        metavar="AXES",
        help="mesh axes along which devices share a weight update, such as 'rows' or 'rows:32' (default: all)",
    )
    option(
        "--regather",
        action="store_true",
        default=None,
        help="gather sharded weights again for the backward pass, one layer at a time (ZeRO stage 3)",
    )
    option(
        "--remat",
        metavar="POLICY",
        help="what the backward pass recomputes: none, full, offload (full, with the layers' inputs in the host's "
        "memory), products, collectives or names:a,b (default: as the model does)",
    )
    option(
        "--microbatches",
        type=positive,
        metavar="N",
        help="compute a step in N parts of its batch, one at a time (default 1)",
    )


def plan_of(options: argparse.Namespace, workload: Any, layout: str | None, mesh: str | None, file: Path | None) -> Any:
    """The plan of a file, or the default one, with the options' values; raises `UsageError` for a wrong file."""
    import meshdsl as md

    from ...train import UsageError, mesh_and_layout

    try:
        plan = md.Plan("all:1") if file is None else md.Plan.load(file)
    except md.LayoutError as error:
        raise UsageError(str(error)) from None
    if file is not None and options.forward:  # an evaluation step has no update and no backward pass
        plan = md.Plan(plan.mesh, plan.layout)
    if layout is not None or mesh is not None:
        given_mesh = str(plan.mesh) if mesh is None and file is not None and layout and ":" in layout else mesh
        new_mesh, new_layout = mesh_and_layout(workload, layout, given_mesh)
        plan = plan.replace(mesh=new_mesh, layout=plan.layout if layout is None and file is not None else new_layout)
    plan = overridden(plan, options)
    if plan.machine is not None and getattr(options, "machine", None) is None:
        options.machine = plan.machine
    return plan


def overridden(plan: Any, options: argparse.Namespace) -> Any:
    """The plan with the values of the options that were given."""
    import dataclasses

    changes: dict[str, Any] = {}
    update = {"mode": options.weight_update, "group": options.update_group, "regather": options.regather}
    update = {name: value for name, value in update.items() if value is not None}
    if update:
        changes["weight_update"] = dataclasses.replace(plan.weight_update, **update)
    for name in ("remat", "microbatches", "overlap"):
        if getattr(options, name, None) is not None:
            changes[name] = getattr(options, name)
    if getattr(options, "collective_steps", None) is not None:
        changes["steps"] = options.collective_steps
    return plan.replace(**changes) if changes else plan


def given_knobs(options: argparse.Namespace) -> list[str]:
    """The options that set a knob of the plan and were given."""
    knobs = ("weight_update", "update_group", "regather", "remat", "microbatches", "overlap", "collective_steps")
    return [f"--{name.replace('_', '-')}" for name in knobs if getattr(options, name) is not None]


def check_forward(options: argparse.Namespace) -> None:
    """Raises `UsageError` for knobs that an evaluation step does not have."""
    from ...train import UsageError

    options_given = {
        "--weight-update": options.weight_update not in (None, "replicated"),
        "--update-group": options.update_group is not None,
        "--regather": bool(options.regather),
        "--remat": options.remat is not None,
        "--microbatches": options.microbatches not in (None, 1),
    }
    names = [name for name, is_given in options_given.items() if is_given]
    if options.forward and names:
        raise UsageError(
            f"{', '.join(names)} has no effect with --forward: an evaluation step has no gradients and no update\n"
            "  remove one of the two"
        )


def workload_and_plan(options: argparse.Namespace) -> tuple[Any, Any]:
    """The workload and the plan given by the options."""
    workload = workload_of(options)
    check_forward(options)
    return workload, plan_of(options, workload, options.layout, options.mesh, options.plan)
