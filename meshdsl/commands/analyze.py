"""`meshdsl analyze`: the cost of one layout on one machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import command, out_file, print_json, workload_mesh_layout, workload_options, write
from .costing import cost_options, exit_code, overlap_option, pictures_of, report_for

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(
        commands, "analyze", run, "estimate the cost of a layout: memory, time, and every collective with its reason"
    )
    workload_options(parser)
    cost_options(parser)
    overlap_option(parser)
    parser.add_argument(
        "--trace", type=out_file, metavar="FILE", help="write the timeline for ui.perfetto.dev or chrome://tracing"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 3 if the step does not fit in memory."""
    compiled, report = report_for(options, *workload_mesh_layout(options))
    plan = compiled.overlap if options.overlap != "none" else None
    if options.html:
        from ..report.html import page

        write(options.html, page(_reports_of(options, report), pictures_of({"program": report})))
    if options.trace:
        from ..report.trace_events import trace_events

        write(options.trace, json.dumps(trace_events(report.timeline)))
    if options.json:
        print_json({"command": "analyze", **report.to_dict(), **({"overlap": plan.to_dict()} if plan else {})})
    else:
        print(report if plan is None else f"{report}\n\n{plan}")
    return exit_code(report)


def _reports_of(options: argparse.Namespace, report: Any) -> dict[str, Any]:
    """The reports of the HTML page, by name. With an overlap plan, the step without overlap comes first."""
    if options.overlap == "none":
        return {options.layout or "layout": report}
    mode, options.overlap = options.overlap, "none"
    _, before = report_for(options, *workload_mesh_layout(options))
    return {"none": before, mode: report}
