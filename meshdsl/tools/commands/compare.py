"""`meshdsl compare`: several layouts side by side, with the differences per collective."""

from __future__ import annotations

import argparse
import itertools
import string
import sys
from collections.abc import Iterator
from typing import Any

from ...errors import LayoutError, UsageError
from .common import ILLEGAL_LAYOUT, command, print_json, workload_of, workload_options, write
from .costing import cost_options, exit_code, pictures_of, report_of, step_of
from .plans import check_forward, knob_options, plan_of


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(commands, "compare", run, "compare several layouts side by side, and list their differences")
    workload_options(parser, several=True)
    cost_options(parser)
    knob_options(parser, several=("plan", "overlap"))


def run(options: argparse.Namespace) -> int:
    """Cost every layout and print the comparison; returns 3 if a layout is illegal or does not fit in memory."""
    from ...cost.report.compare import compare

    workload = workload_of(options)
    check_forward(options)
    reports: dict[str, Any] = {}
    illegal: dict[str, str] = {}
    traced: dict[Any, tuple[Any, Any]] = {}  # by the knobs other than mesh and layout
    for name, plan in _candidates(options, workload):
        others = repr(plan.replace(mesh="", layout=""))
        if others not in traced:
            traced[others] = step_of(options, workload, plan)
        compiled, arguments = traced[others]
        try:
            under = compiled.under(plan.mesh, plan.layout)
            reports[name] = report_of(options, workload, under, arguments)
        except LayoutError as error:
            illegal[name] = str(error)
    comparison = compare(reports, illegal)
    if options.html and reports:
        from ...cost.report.html import page

        write(options.html, page(reports, pictures_of(reports)))
    if options.json:
        print_json({"command": "compare", **comparison.to_dict()})
    else:
        print(comparison)
    for name in illegal:
        print(f"illegal layout: {name}", file=sys.stderr)
    return ILLEGAL_LAYOUT if illegal else exit_code(*reports.values())


def _candidates(options: argparse.Namespace, workload: Any) -> Iterator[tuple[str, Any]]:
    """The name and the plan of each candidate: plan files, then layouts; or one of them under several overlaps.

    Plans are named by their files. Layouts without a name in the workload are called A, B, ... One candidate that is
    compared under several overlaps is named by its overlap. Raises `UsageError` for fewer than two candidates.
    """
    overlaps, options.overlap = list(dict.fromkeys(options.overlap)), None
    layouts = options.layout or ([] if options.plan else list(workload.layouts))
    named = [*_plans(options, workload), *_layouts(options, workload, layouts)]
    if len(overlaps) > 1:
        if len(named) != 1:
            raise UsageError(
                "several --overlap values need exactly one --layout or --plan, under which they are compared"
            )
        named = [(overlap, named[0][1].replace(overlap=overlap)) for overlap in overlaps]
    elif overlaps:
        named = [(name, plan.replace(overlap=overlaps[0])) for name, plan in named]
    if len(named) < 2:
        raise UsageError(
            f"compare needs at least two layouts or plans, got {len(named)}; repeat --layout or --plan\n"
            f"  layouts of {workload.name}: {', '.join(workload.layouts) or 'none'}"
        )
    yield from named


def _plans(options: argparse.Namespace, workload: Any) -> Iterator[tuple[str, Any]]:
    """The plans of files, by the name of the file, or by its path if two files have one name."""
    stems = [file.stem for file in options.plan]
    for file in options.plan:
        if options.plan.count(file) > 1:
            raise UsageError(f"the plan {file} is given twice; give each plan once")
        name = file.stem if stems.count(file.stem) == 1 else str(file)
        yield name, plan_of(options, workload, None, None, file)


def _layouts(options: argparse.Namespace, workload: Any, layouts: list[str]) -> Iterator[tuple[str, Any]]:
    """The plans of layouts; raises `UsageError` for a repeated layout, and for a wrong number of meshes."""
    meshes = options.mesh
    if len(meshes) not in (0, 1, len(layouts)):
        raise UsageError(
            f"got {len(meshes)} meshes for {len(layouts)} layouts; give one --mesh for all layouts, or one per layout"
        )
    if len(meshes) < len(layouts):
        meshes = (meshes or [None]) * len(layouts)
    seen: set[tuple[str, str | None]] = set()
    letters = (*string.ascii_uppercase, *map("".join, itertools.product(string.ascii_uppercase, repeat=2)))
    for letter, layout, mesh in zip(letters, layouts, meshes, strict=False):
        if (layout, mesh) in seen:
            raise UsageError(f"the layout {layout!r} is given twice; give each layout once")
        seen.add((layout, mesh))
        is_named = layout in workload.layouts and layouts.count(layout) == 1
        yield layout if is_named else letter, plan_of(options, workload, layout, mesh, None)
