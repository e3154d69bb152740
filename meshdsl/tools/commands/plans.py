"""The plan of a step on the command line: a plan file, and options that override its knobs."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

import meshdsl as md

from ...errors import UsageError
from ...overlap.values import MODES, STEPS
from .common import options_of, positive, section, workload_of

UPDATES = ("replicated", "sharded", "auto")
REPEATED: dict[str, Any] = {"action": "append", "default": []}
AGAIN = "; may be repeated"


def knob_options(parser: argparse.ArgumentParser, *, several: Collection[str] = ()) -> None:
    """Add the options for a plan file and for the knobs of the step; those in `several` may be repeated."""
    group = section(parser, "plan")
    option = options_of(group)
    option(
        "--plan FILE",
        f"TOML file of a plan; other options override its knobs{AGAIN * ('plan' in several)}",
        Path,
        **REPEATED if "plan" in several else {},
    )
    update_options(group)
    option(
        "--collective-steps",
        "collectives over slow and fast mesh axes in steps: auto, where that is faster on the machine; flat, "
        "never (default); always",
        STEPS,
    )
    overlap_option(group, several="overlap" in several)
    option(
        "--no-strict",
        "drop options of the plan that have no effect, with a warning, instead of failing; for sweeps",
        action="store_false",
        dest="strict",
    )


def overlap_option(parser: argparse._ActionsContainer, *, several: bool = False) -> None:
    """Add the option for overlapping communication with computation; `several` allows many values."""
    option = options_of(parser)
    option(
        "--overlap",
        f"overlap of communication with computation (default none){AGAIN * several}",
        MODES,
        **REPEATED if several else {},
    )


def update_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for the weight update, rematerialisation and micro-batches."""
    option = options_of(parser)
    option("--weight-update", "weight update of the training step (default replicated)", UPDATES)
    option(
        "--update-group AXES",
        "mesh axes along which devices share a weight update, such as 'rows' or 'rows:32' (default: all)",
    )
    option(
        "--regather",
        "gather sharded weights again for the backward pass, one layer at a time (ZeRO stage 3)",
        default=None,
    )
    option(
        "--remat POLICY",
        "what the backward pass recomputes: none, full, offload (full, with the layers' inputs in the host's "
        "memory), products, collectives or names:a,b (default: as the model does)",
    )
    option("--microbatches N", "compute a step in N parts of its batch, one at a time (default 1)", positive)
    option(
        "--interleave, --chunks N",
        "blocks of layers of each pipeline stage, interleaved with those of the others (default 1)",
        positive,
        dest="chunks",
    )


def plan_of(options: argparse.Namespace, workload: Any, layout: str | None, mesh: str | None, file: Path | None) -> Any:
    """The plan of a file, or the default one, with the options' values; raises `UsageError` for a wrong file."""
    from ...train.plans import plan_of_file, plan_on

    plan = plan_of_file(file)
    if plan is not None and options.forward:  # an evaluation step has no update and no backward pass
        plan = md.Plan(plan.mesh, plan.layout)
    plan = overridden(plan_on(workload, plan, layout, mesh), options)
    if plan.machine is not None and getattr(options, "machine", None) is None:
        options.machine = plan.machine
    return plan


def overridden(plan: Any, options: argparse.Namespace) -> Any:
    """The plan with the values of the options that were given."""
    from ...train.plans import with_knobs

    return with_knobs(plan, _given(options))


def given_knobs(options: argparse.Namespace) -> list[str]:
    """The options that set a knob of the plan and were given."""
    return [f"--{name.replace('_', '-')}" for name in _given(options)]


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The values of the knobs that were given."""
    from ...train.plans import KNOBS

    return {name: value for name in KNOBS if (value := getattr(options, name, None)) not in (None, [])}


def check_forward(options: argparse.Namespace) -> None:
    """Raises `UsageError` for knobs that an evaluation step does not have; with --no-strict they are dropped."""
    from ...errors.no_effect import no_effect

    without_effect = {"weight_update": "replicated", "microbatches": 1, "chunks": 1}
    knobs = [
        name
        for name, value in _given(options).items()
        if name not in ("overlap", "collective_steps") and value != without_effect.get(name)
    ]
    if options.forward and knobs:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in knobs)
        error = UsageError(
            f"{names} has no effect with --forward: an evaluation step has no gradients and no update\n"
            "  remove one of the two"
        )
        no_effect(error)
        for name in knobs:
            setattr(options, name, None)


def workload_and_plan(options: argparse.Namespace) -> tuple[Any, Any]:
    """The workload and the plan given by the options."""
    workload = workload_of(options)
    check_forward(options)
    return workload, plan_of(options, workload, options.layout, options.mesh, options.plan)
