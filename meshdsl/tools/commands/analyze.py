"""`meshdsl analyze`: the cost of one layout on one machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

import meshdsl as md

from ...errors import UsageError
from .common import command, options_of, out_file, positive, print_json, workload_of, workload_options, write
from .costing import cost_options, exit_code, machine_of, pictures_of, report_for
from .plans import given_knobs, knob_options, workload_and_plan


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(
        commands, "analyze", run, "estimate the cost of a layout: memory, time, and every collective with its reason"
    )
    workload_options(parser)
    option = options_of(parser)
    option("--devices N", "instead of a layout or a plan: the best plan of a search", positive)
    cost_options(parser)
    knob_options(parser)
    option("--trace FILE", "write the timeline for ui.perfetto.dev or chrome://tracing", out_file)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 3 if the step does not fit in memory."""
    workload, plan = workload_and_plan(options) if options.devices is None else _searched(options)
    compiled, report = report_for(options, workload, plan)
    windows = compiled.overlap if plan.overlap.mode != "none" else None
    if options.html:
        from ...cost.report.html import page

        write(options.html, page(_reports_of(options, workload, plan, report), pictures_of({"program": report})))
    if options.trace:
        from ...cost.report.trace_events import trace_events

        write(options.trace, json.dumps(trace_events(report.timeline)))
    if options.json:
        print_json({"command": "analyze", **report.to_dict(), **({"overlap": windows.to_dict()} if windows else {})})
    else:
        print(str(report) if windows is None else f"{report}\n\n{windows}")
    return exit_code(report)


def _searched(options: argparse.Namespace) -> tuple[Any, Any]:
    """The workload, and the best plan that a search finds for `--devices`."""
    given = {"--layout": options.layout, "--mesh": options.mesh, "--plan": options.plan, "--forward": options.forward}
    given |= {"--place": options.place}
    if names := [*(name for name, value in given.items() if value), *given_knobs(options)]:
        raise UsageError(
            f"{', '.join(names)} has no effect with --devices, which searches for the plan\n"
            "  leave one of the two out, or use meshdsl search, where options fix a part of the plan"
        )
    workload = workload_of(options)
    result = md.search(workload, devices=options.devices, machine=machine_of(options), limit=options.memory)
    return workload, result.plan


def _reports_of(options: argparse.Namespace, workload: Any, plan: Any, report: Any) -> dict[str, Any]:
    """The reports of the HTML page, by name. With an overlap plan, the step without overlap comes first."""
    if plan.overlap.mode == "none":
        return {options.layout or (options.plan.stem if options.plan else "layout"): report}
    _, before = report_for(options, workload, plan.replace(overlap="none"))
    return {"none": before, plan.overlap.mode: report}
