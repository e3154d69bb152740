"""`meshdsl verify`: what is costed beside what is emitted."""

from __future__ import annotations

import argparse
from typing import Any

from .common import FAILURE, OK, command, placed, say, workload_options
from .costing import step_of, step_options, step_title

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "verify", run, "compare what is costed with the StableHLO that JAX lowers")
    workload_options(parser)
    step_options(parser)


def run(options: argparse.Namespace) -> int:
    """Lower the step and compare; 1 where they differ."""
    from ..cost.verify import verify

    workload, mesh, layout = placed(options)
    compiled, arguments = step_of(options, workload, mesh, layout)
    program = compiled.program(*arguments)
    found = verify(compiled.lower(*arguments).as_text(), program)
    if options.json:
        say({"command": "verify", "title": step_title(options, workload), **found.to_dict()})
    else:
        print(f"{step_title(options, workload)} on {mesh}: {found}")
    return OK if found.equal else FAILURE
