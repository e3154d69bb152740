"""`meshdsl analyze`: what one layout costs on one machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import command, out_file, placed, say, workload_options, write
from .costing import cost_options, exit_code, measured, overlap_option

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "analyze", run, "say what a layout costs: memory, time, what is sent and why")
    workload_options(parser)
    cost_options(parser)
    overlap_option(parser)
    parser.add_argument(
        "--trace", type=out_file, metavar="FILE", help="write the timeline for ui.perfetto.dev or chrome://tracing"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; 3 where it does not fit."""
    compiled, report = measured(options, *placed(options))
    plan = compiled.overlap if options.overlap != "none" else None
    if options.html:
        from ..report.html import page

        write(options.html, page({options.layout or "layout": report}))
    if options.trace:
        from ..report.trace_events import trace_events

        write(options.trace, json.dumps(trace_events(report.timeline)))
    if options.json:
        say({"command": "analyze", **report.to_dict(), **({"overlap": plan.to_dict()} if plan else {})})
    else:
        print(report if plan is None else f"{report}\n\n{plan}")
    return exit_code(report)
