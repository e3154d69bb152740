"""`meshdsl compare`: several layouts side by side, and what differs, collective by collective."""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import LayoutError
from .common import ILLEGAL_LAYOUT, command, say, workload_of, workload_options, write
from .costing import cost_options, exit_code, overlap_option, report_of, step_of, step_title

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "compare", run, "put several layouts side by side, with what differs between them")
    workload_options(parser, several=True)
    cost_options(parser)
    overlap_option(parser, several=True)


def run(options: argparse.Namespace) -> int:
    """Cost every layout once, and print them together; 3 where one is illegal or does not fit."""
    from ..report.compare import compare

    workload = workload_of(options)
    reports: dict[str, Any] = {}
    illegal: dict[str, str] = {}
    traced: dict[str, tuple[Any, Any]] = {}  # by overlap
    for name, mesh, layout, overlap in _places(options, workload):
        options.overlap = overlap
        if overlap not in traced:
            traced[overlap] = step_of(options, workload, mesh, layout)
        compiled, arguments = traced[overlap]
        try:
            reports[name] = report_of(options, compiled.under(mesh, layout), arguments, step_title(options, workload))
        except LayoutError as error:
            illegal[name] = str(error)
    found = compare(reports, illegal)
    if options.html and reports:
        from ..report.html import page

        write(options.html, page(reports))
    if options.json:
        say({"command": "compare", **found.to_dict()})
    else:
        print(found)
    for name in illegal:
        print(f"illegal layout: {name}", file=sys.stderr)
    return ILLEGAL_LAYOUT if illegal else exit_code(*reports.values())


def _places(options: argparse.Namespace, workload: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, mesh, layout and overlap of each; a layout without a name in the workload is called A, B, ...

    One layout under several overlaps is called by the overlap.

    Raises `UsageError` for one layout, for the same one twice, and for a number of meshes that does not go with them.
    """
    from ..train import UsageError, place

    layouts, meshes, overlaps = options.layout or list(workload.layouts), options.mesh, options.overlap
    if len(overlaps) > 1 and len(layouts) == 1 and len(meshes) < 2:
        for overlap in dict.fromkeys(overlaps):
            yield overlap, *place(workload, layouts[0], meshes[0] if meshes else None), overlap
        return
    if len(overlaps) > 1:
        raise UsageError("several --overlap need one --layout: each is compared under it")
    if len(layouts) < 2:
        raise UsageError(
            f"compare needs at least two layouts, got {len(layouts)}; give --layout several times\n"
            f"  layouts of {workload.name}: {', '.join(workload.layouts) or 'none'}"
        )
    if len(meshes) not in (0, 1, len(layouts)):
        raise UsageError(
            f"{len(meshes)} meshes do not go with {len(layouts)} layouts: give one --mesh for all, or one for each"
        )
    if len(meshes) < len(layouts):
        meshes = (meshes or [None]) * len(layouts)
    seen: set[tuple[str, str | None]] = set()
    for letter, layout, mesh in zip(_letters(), layouts, meshes, strict=False):
        if (layout, mesh) in seen:
            raise UsageError(f"the layout {layout!r} is given twice; each is compared with the others")
        seen.add((layout, mesh))
        named = layout in workload.layouts and layouts.count(layout) == 1
        yield layout if named else letter, *place(workload, layout, mesh), overlaps[0] if overlaps else "none"


def _letters() -> Iterator[str]:
    yield from string.ascii_uppercase
    for letter in string.ascii_uppercase:
        yield from (letter + second for second in string.ascii_uppercase)
