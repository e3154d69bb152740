"""`meshdsl scale`: a plan on growing meshes, with the same batch and with the same batch per device."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import meshdsl as md

from ...errors import LayoutError, UsageError
from .common import OK, answer, command, options_of, positive, workload_options, write
from .costing import cost_options, machine_of, report_of, step_of, step_title
from .plans import knob_options, workload_and_plan


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(commands, "scale", run, "cost a plan on more and more devices: strong and weak scaling")
    workload_options(parser)
    cost_options(parser)
    knob_options(parser)
    option = options_of(parser)
    option("--axis NAME", "mesh axis that grows (default: the first)")
    option("--from N", "fewest devices (default 8)", positive, default=8, dest="fewest")
    option("--to N", "most devices (default 4096)", positive, default=4096, dest="most")


def run(options: argparse.Namespace) -> int:
    """Cost the plan with the axis doubled again and again, and print the rates."""
    from ...cost.report.scaling import Scaling
    from ...train import Progress

    workload, plan = workload_and_plan(options)
    axis = _axis(options, plan.mesh)
    others = plan.mesh.size // plan.mesh.axes[axis]
    reports: dict[str, dict[int, Any]] = {"strong": {}, "weak": {}}
    refused: dict[str, str] = {}
    meshes = list(_meshes(options, plan.mesh, axis, others))
    with Progress(2 * len(meshes), "scale") as bar:
        for i, (n, mesh) in enumerate(meshes):
            for j, kind in enumerate(reports):
                try:
                    each = workload if kind == "strong" else _with_batch(workload, n, plan.mesh.size)
                    compiled, arguments = step_of(options, each, plan.replace(mesh=mesh))
                    reports[kind][n] = report_of(options, each, compiled, arguments)
                except LayoutError as error:
                    refused[f"{n} devices, {kind}"] = str(error)
                bar.update(2 * i + j + 1)
    title = f"{step_title(options, workload)} on {machine_of(options).name}, {plan.mesh} with more {axis}"
    reasons = {where: reason.splitlines()[0] for where, reason in refused.items()}
    scaling = Scaling(title, {kind: some for kind, some in reports.items() if some}, reasons)
    if not scaling.reports:
        first = {why: where for where, why in reversed(reasons.items())}  # where each reason is met first
        texts = [f"{where}: {refused[where]}" for where in reversed(first.values())]
        raise LayoutError("\n".join(["the plan is illegal on every mesh; for each reason, the first mesh", *texts]))
    if options.html:
        write(options.html, scaling.page())
    answer(options, {"command": "scale", **scaling.to_dict()}, scaling)
    return OK


def _axis(options: argparse.Namespace, mesh: Any) -> str:
    from ...errors import nearest

    axis = options.axis or next(iter(mesh.axes))
    if axis not in mesh.axes:
        raise UsageError(f"--axis {axis!r}: the mesh '{mesh}' has no such axis; {nearest(axis, mesh.axes)}")
    return axis


def _meshes(options: argparse.Namespace, mesh: Any, axis: str, others: int) -> Iterator[tuple[int, Any]]:
    """Numbers of devices and meshes: the axis has powers of two, as far as the machine reaches."""
    most = min(options.most, machine_of(options).network.size)
    sizes = [2**i for i in range(most.bit_length()) if options.fewest <= 2**i * others <= most]
    if not sizes:
        raise UsageError(
            f"no mesh from {options.fewest} to {most} devices: '{mesh}' has {others} devices besides {axis}, and "
            f"{machine_of(options).name} has {machine_of(options).network.size}"
        )
    for size in sizes:
        yield size * others, md.Mesh({name: size if name == axis else n for name, n in mesh.axes.items()})


def _with_batch(workload: Any, devices: int, before: int) -> Any:
    """The workload with a batch that grows as the devices do; raises `LayoutError` if it cannot."""
    batch = getattr(workload.config, "batch", None)
    if not isinstance(batch, int) or batch * devices % before:
        raise LayoutError(f"a batch of {batch} on {before} devices has no equal on {devices}")
    return workload.replace(batch=batch * devices // before)
