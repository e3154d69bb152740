"""`meshdsl list`: the machines that `--machine` knows, or the named layouts of a workload."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .common import OK, answer, command


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "list the machines that --machine knows, or the named layouts of a workload"
    parser = command(commands, "list", run, about, workload=False)
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help="file.py:name: list its layouts, not machines")


def run(options: argparse.Namespace) -> int:
    """Print the machines, or the layouts of the workload."""
    return _machines(options) if options.workload is None else _layouts(options)


def _layouts(options: argparse.Namespace) -> int:
    """Print each layout with its mesh and the number of devices."""
    from ...errors.tables import table
    from ...layouts import Mesh
    from ...train import load

    workload = load(options.workload)
    layouts = [(name, Mesh(mesh), layout) for name, (mesh, layout) in workload.layouts.items()]
    records = [
        {"name": name, "mesh": mesh.axes, "devices": mesh.size, "layout": layout} for name, mesh, layout in layouts
    ]
    rows = [[name, str(mesh), mesh.size, layout or "(nothing is sharded)"] for name, mesh, layout in layouts]
    text = table(["layout", "mesh", "devices", "rules"], rows, "<<><", indent=0)
    if not layouts:
        text = f"{workload.name} names no layouts; give --mesh 'rows:2;cols:4' --layout 'batch:rows' to a command"
    answer(options, {"command": "list", "workload": workload.name, "layouts": records}, text)
    return OK


def _machines(options: argparse.Namespace) -> int:
    """Print a table of the machines: those of the package, and the user's own."""
    from ...cost.machine import PACKAGED, machine, machines
    from ...errors.tables import table
    from ...errors.units import show_bytes

    records: list[dict[str, Any]] = [
        {
            "name": each.name,
            "title": each.title,
            "device": each.device,
            "memory": each.hbm,
            "memory_bandwidth": each.hbm_bandwidth,
            "peak": dict(each.peak),
            "network": str(each.network),
            "origin": "package" if Path(each.file).parent == PACKAGED else each.file,
            "sources": dict(each.sources),
        }
        for each in map(machine, machines())
    ]
    shown = {"memory": show_bytes, "memory_bandwidth": lambda n: f"{show_bytes(n)}/s", "peak": _peak}
    columns = ["name", "device", "memory", "memory_bandwidth", "peak", "network", "origin"]
    rows = [[shown.get(name, str)(each[name]) for name in columns] for each in records]
    header = ["name", "device", "memory", "bandwidth", "peak", "network", "origin"]
    text = table(header, rows, "<<>><<<", indent=0, width=140)
    text += "\n\n--json prints the peak of every dtype, and the source of each figure"
    answer(options, {"command": "list", "machines": records}, text)
    return OK


def _peak(peak: Mapping[str, float]) -> str:
    """The peak of the dtype that models train in, where the machine has it."""
    from ...errors.units import number

    dtype = next((name for name in ("bfloat16", "float16") if name in peak), max(peak, key=peak.__getitem__))
    return f"{number(peak[dtype], 'FLOP/s')} {dtype}"
