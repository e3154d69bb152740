"""`meshdsl compare`: several layouts side by side, with the differences per collective."""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import LayoutError
from .common import ILLEGAL_LAYOUT, command, print_json, workload_of, workload_options, write
from .costing import cost_options, exit_code, overlap_option, pictures_of, report_of, step_of, step_title

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(commands, "compare", run, "compare several layouts side by side, and list their differences")
    workload_options(parser, several=True)
    cost_options(parser)
    overlap_option(parser, several=True)


def run(options: argparse.Namespace) -> int:
    """Cost every layout and print the comparison; returns 3 if a layout is illegal or does not fit in memory."""
    from ..report.compare import compare

    workload = workload_of(options)
    reports: dict[str, Any] = {}
    illegal: dict[str, str] = {}
    traced: dict[str, tuple[Any, Any]] = {}  # by overlap
    for name, mesh, layout, overlap in _candidates(options, workload):
        options.overlap = overlap
        if overlap not in traced:
            traced[overlap] = step_of(options, workload, mesh, layout)
        compiled, arguments = traced[overlap]
        try:
            reports[name] = report_of(options, compiled.under(mesh, layout), arguments, step_title(options, workload))
        except LayoutError as error:
            illegal[name] = str(error)
    comparison = compare(reports, illegal)
    if options.html and reports:
        from ..report.html import page

        write(options.html, page(reports, pictures_of(reports)))
    if options.json:
        print_json({"command": "compare", **comparison.to_dict()})
    else:
        print(comparison)
    for name in illegal:
        print(f"illegal layout: {name}", file=sys.stderr)
    return ILLEGAL_LAYOUT if illegal else exit_code(*reports.values())


def _candidates(options: argparse.Namespace, workload: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """The name, mesh, layout and overlap of each candidate; layouts without a name in the workload are called A, B, ...

    If one layout is compared under several overlaps, each candidate is named by its overlap.

    Raises `UsageError` for fewer than two layouts, for a repeated layout, and for a wrong number of meshes.
    """
    from ..train import UsageError, mesh_and_layout

    layouts, meshes, overlaps = options.layout or list(workload.layouts), options.mesh, options.overlap
    if len(overlaps) > 1 and len(layouts) == 1 and len(meshes) < 2:
        for overlap in dict.fromkeys(overlaps):
            yield overlap, *mesh_and_layout(workload, layouts[0], meshes[0] if meshes else None), overlap
        return
    if len(overlaps) > 1:
        raise UsageError("several --overlap values need exactly one --layout, under which they are compared")
    if len(layouts) < 2:
        raise UsageError(
            f"compare needs at least two layouts, got {len(layouts)}; repeat --layout\n"
            f"  layouts of {workload.name}: {', '.join(workload.layouts) or 'none'}"
        )
    if len(meshes) not in (0, 1, len(layouts)):
        raise UsageError(
            f"got {len(meshes)} meshes for {len(layouts)} layouts; give one --mesh for all layouts, or one per layout"
        )
    if len(meshes) < len(layouts):
        meshes = (meshes or [None]) * len(layouts)
    seen: set[tuple[str, str | None]] = set()
    for letter, layout, mesh in zip(_letters(), layouts, meshes, strict=False):
        if (layout, mesh) in seen:
            raise UsageError(f"the layout {layout!r} is given twice; give each layout once")
        seen.add((layout, mesh))
        is_named = layout in workload.layouts and layouts.count(layout) == 1
        overlap = overlaps[0] if overlaps else "none"
        yield layout if is_named else letter, *mesh_and_layout(workload, layout, mesh), overlap


def _letters() -> Iterator[str]:
    yield from string.ascii_uppercase
    for letter in string.ascii_uppercase:
        yield from (letter + second for second in string.ascii_uppercase)
