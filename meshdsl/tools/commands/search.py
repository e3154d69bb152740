"""`meshdsl search`: the best layouts of a workload on a machine."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import meshdsl as md

from ...errors import LayoutError, UsageError
from ...errors.units import seconds, show_bytes
from .common import OK, command, config_options, options_of, out_file, positive, print_json, workload_of, write
from .costing import html_option, machine_of, machine_options, step_of, step_title
from .plans import check_forward, overlap_option, overridden, update_options


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(
        commands,
        "search",
        run,
        "find the fastest plan that fits a machine: mesh, layout and knobs, and show why others are slower",
    )
    mesh_group = parser.add_mutually_exclusive_group(required=True)
    option = options_of(mesh_group)
    option("--mesh AXES", "axes such as 'rows:2;cols:4'; repeat to search several meshes", action="append")
    option("--devices N", "search every mesh of N devices", positive)
    option = options_of(parser)
    option("--layout RULES", "rules that every candidate must contain, such as 'batch:rows'", default="")
    config_options(parser)
    machine_options(parser, place=False)
    html_option(parser)
    update_options(parser)
    overlap_option(parser)
    option(
        "--knobs NAMES",
        "knobs to search besides mesh and layout: of weight_update, remat, microbatches, chunks, overlap, steps "
        "(default: all that no option sets; none: only mesh and layout)",
    )
    option("--save-plan FILE", "write the best plan as TOML", out_file)
    option("--dims NAMES", "dims that may be sharded, such as 'batch heads' (default: all)")
    option(
        "--plans N",
        "cost at most N plans exactly, of all that are estimated (default 30; fewer of a very long program)",
        positive,
    )


def _show_progress(progress: Any) -> None:
    """Overwrite one line on stderr, if it is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)


def _knobs(options: argparse.Namespace, plan: Any) -> dict[str, Any]:
    """The values to try of each knob to search; knobs set by an option have one."""
    from ...search.knobs import turns_of

    if options.forward or options.knobs == "none":
        return {}
    values = {
        "weight_update": options.weight_update or options.regather,
        "remat": options.remat,
        "microbatches": options.microbatches,
        "chunks": options.chunks,
        "overlap": options.overlap,
    }
    try:
        names = [turn.knob for turn in turns_of(options.knobs or "all")]
    except LayoutError as error:
        raise UsageError(str(error)) from None
    if twice := [name for name in names if options.knobs and values.get(name)]:
        raise UsageError(f"--knobs has {', '.join(twice)}, which another option sets; give one of the two")
    return dict.fromkeys(names) | {name: [getattr(plan, name)] for name, value in values.items() if value}


def run(options: argparse.Namespace) -> int:
    """Search and print the best layouts."""
    workload = workload_of(options)
    check_forward(options)
    plan = overridden(md.Plan("all:1"), options)
    if plan.weight_update.group is not None:
        raise UsageError("--update-group has no effect in a search, whose meshes have other axes; leave it out")
    compiled, arguments = step_of(options, workload, plan)
    knobs = _knobs(options, plan)
    result = md.search(
        *((workload,) if knobs else (compiled, *arguments)),
        knobs=knobs,
        mesh=options.mesh,
        devices=options.devices,
        machine=machine_of(options),
        limit=options.memory,
        layout=md.Layout(options.layout),
        dims=options.dims or (workload.imported and " ".join(workload.imported.dims_to_shard())),
        plans=options.plans,
        progress=_show_progress,
    )
    _show_progress("")
    result = dataclasses.replace(result, title=step_title(options, workload))
    if options.html:
        from ...cost.report.html import page

        entries = [result.best, *result.runners_up[:3]]
        names = ["best", "second", "third", "fourth"]
        reports = {name: entry.report for name, entry in zip(names, entries, strict=False)}
        write(options.html, page(reports))
    if options.save_plan:
        write(options.save_plan, result.plan.to_toml())
    if options.json:
        print_json({"command": "search", **result.to_dict()})
    else:
        print(result)
        if workload.imported is not None:
            _print_imported(options, workload, compiled, arguments, result)
    return OK


def _print_imported(options: argparse.Namespace, workload: Any, compiled: Any, arguments: Any, result: Any) -> None:
    """Of a workload that `md.from_jax` made: plain FSDP beside the plan, and names for dims without one."""
    devices = md.Mesh(result.plan.mesh).size
    layout = workload.imported.fsdp("x")
    if layout and devices > 1:
        under = compiled.under(f"x:{devices}", layout)
        report = under.cost(*arguments, machine=machine_of(options), limit=options.memory)
        change = f"{report.seconds / result.best.seconds - 1:+.1%}"
        sent = f"{show_bytes(report.wire_bytes)} sent"
        print(f"\nplain FSDP, {layout}: {seconds(report.seconds)} ({change}), {show_bytes(report.peak_bytes)}, {sent}")
    if names := workload.imported.names_to_paste():
        rows = "".join(f"    {pattern!r}: {words!r},\n" for pattern, words in names.items())
        print(f"\nnames to paste into md.from_jax, and to edit:\n  names={{\n{rows}  }}")
