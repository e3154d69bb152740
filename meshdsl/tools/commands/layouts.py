"""`meshdsl layouts`: the named layouts of a workload."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, command, print_json

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    command(commands, "layouts", run, "list the named layouts of a model file's workload")


def run(options: argparse.Namespace) -> int:
    """Print each layout with its mesh and the number of devices."""
    from ...cost.report.tables import table
    from ...layouts import Mesh
    from ...train import load

    workload = load(options.workload)
    layouts = [(name, Mesh(mesh), layout) for name, (mesh, layout) in workload.layouts.items()]
    if options.json:
        records = [
            {"name": name, "mesh": mesh.axes, "devices": mesh.size, "layout": layout} for name, mesh, layout in layouts
        ]
        print_json({"command": "layouts", "workload": workload.name, "layouts": records})
        return OK
    if not layouts:
        print(f"{workload.name} names no layouts; give --mesh 'rows:2;cols:4' --layout 'batch:rows' to a command")
        return OK
    rows = [[name, str(mesh), mesh.size, layout or "(nothing is sharded)"] for name, mesh, layout in layouts]
    print(table(["layout", "mesh", "devices", "rules"], rows, "<<><", indent=0))
    return OK
