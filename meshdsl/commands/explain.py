"""`meshdsl explain`: the program of a step."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, command, placed, say, workload_options

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "explain", run, "print a training step as a program, with its collectives")
    workload_options(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--program", action="store_true", help="the program and nothing else")
    what.add_argument("--graph", action="store_true", help="the graph before any layout, and nothing else")


def run(options: argparse.Namespace) -> int:
    """Print what was asked for."""
    workload, mesh, layout = placed(options)
    from ..train import report, stages

    compiled, arguments = stages(workload, mesh, layout)
    if options.graph:
        text = str(compiled.graph(*arguments))
        if options.json:
            say({"command": "explain", "graph": text})
        else:
            print(text)
        return OK
    program = compiled.program(*arguments)
    if options.json:
        say({"command": "explain", "program": str(program), "collectives": report.collectives(program)})
        return OK
    print(program)
    if not options.program:
        print(f"\ncollectives of one step, per device, loop trips counted ({mesh})\n")
        print(report.collective_table(program))
    return OK
