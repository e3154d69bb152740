"""FLOP traps: `python -m tests.lowering.padding_law --devices 8 64`, or `make laws LAW=padding`.

Every bundled workload under its own layouts, each with its first mesh axis made longer: the FLOP of one device times
the devices, over the FLOP of one device alone. Prints a line of JSON for each program above 1.05, with the factors of
padded dims and of work that devices repeat, and the numbers at the end. The exit status is 1 if a program needs over
1.15 of what these factors account for (a scan over devices, or a halo, computes more), or if the layout `zero`, which
shards parameters only, needs over 1.05 for whatever else than repeated work. `--limit N` costs the first N programs of
each size.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import meshdsl as md
from meshdsl.cost.ledger import ledger
from meshdsl.layouts import Mesh

MODELS = Path(md.__file__).parent / "models"
DEVICES = (8, 16, 64, 256)


class Case(NamedTuple):
    """A workload under one of its layouts, on so many devices."""

    workload: md.Workload
    name: str
    mesh: str
    layout: str
    devices: int


def workloads() -> Iterator[md.Workload]:
    """Every bundled workload, once."""
    seen: set[str] = set()
    for path in sorted(MODELS.glob("*.py")):
        for value in vars(importlib.import_module(f"meshdsl.models.{path.stem}")).values():
            if isinstance(value, md.Workload) and value.name not in seen:
                seen.add(value.name)
                yield value


def cases(devices: int) -> Iterator[Case]:
    """The layouts of all workloads on so many devices, but for those without rules; the batch has a row for each."""
    for workload in workloads():
        for name, (mesh, layout) in workload.layouts.items():
            (first, _), *others = Mesh(mesh).axes.items()
            rest = math.prod(n for _, n in others)
            if not layout or devices % rest:
                continue
            longer = Mesh({first: devices // rest, **dict(others)})
            batch = devices * -(-workload.config.batch // devices)
            yield Case(workload.replace(batch=batch), name, str(longer), layout, devices)


def ratio(program: md.Program, alone: md.Program) -> float:
    """The FLOP of all devices over those of one device alone."""
    return program.mesh.size * ledger(program).flops / ledger(alone).flops


class Explained(NamedTuple):
    """The factors on the FLOP of a device: of dims that are padded, and of work that several devices repeat."""

    padded: float
    repeated: float


def explained(program: md.Program) -> Explained:
    """The factors that the shardings of operands and results account for, weighed by the FLOP of each operation."""
    mesh, total, once, share = program.mesh, 0.0, 0.0, 0.0
    for line in ledger(program).lines:
        values = (*line.eqn.ins, *line.eqn.outs)
        cuts = {(d, v.sharding.axes(d)) for v in values for d in v.dims if d.size}
        axes = {axis for _, cut in cuts for axis in cut}
        blocks = [(d, mesh.count(cut)) for d, cut in cuts if cut]
        padding = math.prod(n * program.extents.local(d, n) / d.size for d, n in blocks)
        total += line.flops * line.trips
        once += line.flops * line.trips * mesh.count(tuple(axes)) / mesh.size
        share += line.flops * line.trips * mesh.count(tuple(axes)) / mesh.size / padding
    return Explained(once / share, total / once)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--limit", type=int, help="costs this many programs of each size (default: all)")
    parser.add_argument("--only", default="", metavar="LAYOUT", help="layouts with this in their name")
    options = parser.parse_args()
    ratios, failed = dict[tuple[int, bool], list[float]](), list[Case]()
    for devices in options.devices:
        alone: dict[str, md.Program] = {}
        for case in [case for case in cases(devices) if options.only in case.name][: options.limit]:
            step, specs, key = case.workload.train_step(), case.workload.specs(), case.workload.name
            alone[key] = alone.get(key) or md.compile(step, "", "").program(*specs)
            try:
                program = md.compile(step, case.mesh, case.layout).program(*specs)
                found, why = ratio(program, alone[key]), explained(program)
            except md.LayoutError as error:
                print(json.dumps({"workload": case.workload.name, "layout": case.name, "mesh": case.mesh,
                                  "refused": str(error).partition("\n")[0]}))  # fmt: skip
                continue
            ratios.setdefault((devices, "zero" in case.name), []).append(found)
            most = 1.05 * why.repeated if case.name == "zero" else 1.15 * why.padded * why.repeated
            failed += [case] if found > most else []
            if found > 1.05:
                print(json.dumps({"workload": case.workload.name, "layout": case.name, "mesh": case.mesh,
                                  "flops": round(found, 2), "padded": round(why.padded, 2),
                                  "repeated": round(why.repeated, 2)}), flush=True)  # fmt: skip
    rows = [
        {
            "devices": devices,
            "layouts": "zero" if zero else "others",
            "programs": len(found),
            "above 1.2": sum(x > 1.2 for x in found),
            "above 1.05": sum(x > 1.05 for x in found),
            "worst": round(max(found), 2),
        }
        for (devices, zero), found in ratios.items()
    ]
    for row in rows:
        print(json.dumps(row))
    every = [x for found in ratios.values() for x in found]
    traps = sum(x > 1.2 for x in every)
    print(json.dumps({"programs": len(every), "above 1.2": traps, "above 1.05": sum(x > 1.05 for x in every)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
