"""`meshdsl search`: the best layouts of a workload on a machine."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

from .common import OK, command, config_options, positive, print_json, workload_of, write
from .costing import assignment_of, cost_options, machine_of, step_of, step_title

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "search", run, "find the best layouts for a machine, and say why others are worse")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--mesh", action="append", metavar="AXES", help="axes such as 'rows:2;cols:4'; give several to choose from"
    )
    where.add_argument("--devices", type=positive, metavar="N", help="every mesh of so many devices")
    parser.add_argument(
        "--layout", default="", metavar="RULES", help="rules that every layout keeps, such as 'batch:rows'"
    )
    config_options(parser)
    cost_options(parser)
    parser.add_argument(
        "--objective",
        choices=["seconds", "peak_bytes", "wire_bytes"],
        default="seconds",
        help="quantity to minimise (default: the seconds of a step)",
    )
    parser.add_argument(
        "--dims", metavar="NAMES", help="the dims that may be split, such as 'batch heads' (default: all)"
    )
    parser.add_argument("--axes", metavar="NAMES", help="the mesh axes to split over (default: all)")
    parser.add_argument("--one-axis", action="store_true", help="a dim takes one axis at most")
    parser.add_argument("--orders", action="store_true", help="try a dim's axes in every order, not only the mesh's")
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="stop after so many seconds with the best so far and its gap (default 60; 0: search to the end)",
    )
    parser.add_argument(
        "--patience",
        type=_seconds,
        default=6.0,
        metavar="SECONDS",
        help="stop after so many seconds without anything better (default 6; 0: go on, to prove the best)",
    )
    parser.add_argument("--front", action="store_true", help="also show the trade of time against memory")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="how many of the best to show (default 5)")
    parser.add_argument(
        "--overrides",
        action="store_true",
        help="then look for splits of single parameters beyond the best layout's rules (can take minutes)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"seconds from 0 are needed, got {text}")
    return seconds


def _show_progress(progress: Any) -> None:
    """One line on stderr, written over itself; nothing where that is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> int:
    """Search, and print the best layouts."""
    import meshdsl as md

    from ..train import UsageError

    if options.one_axis and options.orders:
        raise UsageError("--orders would change nothing: with --one-axis a dim has one axis at most")
    workload = workload_of(options)
    fixed = md.Layout(options.layout)
    compiled, arguments = step_of(options, workload, md.Mesh("all:1"), md.Layout(""))
    found = md.search(
        compiled,
        *arguments,
        mesh=options.mesh,
        devices=options.devices,
        machine=machine_of(options),
        limit=options.memory,
        objective=options.objective,
        layout=fixed,
        dims=options.dims,
        axes=options.axes,
        several=False if options.one_axis else None,
        orders=options.orders,
        runners_up=options.top - 1,
        front=options.front,
        time_limit=options.time_limit or None,
        patience=options.patience or None,
        progress=_show_progress,
        assignment=assignment_of(options),
    )
    _end_progress()
    found = dataclasses.replace(found, title=step_title(options, workload))
    more = None
    if options.overrides:
        more = md.search_overrides(
            compiled,
            *arguments,
            mesh=found.best.mesh,
            layout=found.best.layout,
            machine=machine_of(options),
            limit=options.memory,
            objective=options.objective,
            tensors="params/*" if options.forward else None,  # an evaluation updates nothing
            assignment=assignment_of(options),
        )
        more = dataclasses.replace(more, title=found.title)
    if options.html:
        from ..report.html import page

        entries = [found.best, *found.runners_up[:3]]
        names = ["best", "second", "third", "fourth"]
        write(options.html, page({name: entry.report for name, entry in zip(names, entries, strict=False)}))
    if options.json:
        print_json({"command": "search", **found.to_dict(), **({"with_overrides": more.to_dict()} if more else {})})
    else:
        print(found if more is None else f"{found}\n\n{more}")
    return OK
