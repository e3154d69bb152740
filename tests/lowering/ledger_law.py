"""The ledger law at length: `python -m tests.lowering.ledger_law --layouts 12 --programs 500`.

Every workload of models/ under its own layouts and random legal ones, forward and training step, and random programs:
the collectives that the program states, which is what the cost tool reads, are those of its StableHLO, one by one.
Nothing runs. The last line is JSON; the exit status is 1 on any difference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices, as in the tests
from meshdsl.ir import walk
from tests.lowering.maker import Draw
from tests.lowering.programs import draw
from tests.stablehlo import cost_law

MODELS = Path(__file__).parents[2] / "models"
MESHES = ["x:8", "x:2 y:4", "x:4 y:2", "x:2 y:2 z:2", "x:16 y:8", "x:32 y:8 z:8"]
TRIES = 400


def workloads() -> Iterator[md.Workload]:
    """Every workload of every model file, once."""
    seen: set[str] = set()
    for path in sorted(MODELS.glob("*.py")):
        for value in vars(importlib.import_module(f"models.{path.stem}")).values():
            if isinstance(value, md.Workload) and value.name not in seen:
                seen.add(value.name)
                yield value


def layouts(workload: md.Workload, wanted: int) -> Iterator[tuple[str, str]]:
    """Its own, then random ones over the dims of its training step; some of these will be illegal."""
    yield from workload.layouts.values()
    graph = md.compile(workload.train_step(), "", "").graph(*workload.specs())
    dims = sorted({d.name for eqn, _ in walk(graph) for v in eqn.outs for d in v.dims if d.size > 1})
    rng = Draw(workload.name)
    for _ in range(TRIES * wanted):
        mesh = rng.choice(MESHES)
        axes = list(md.Mesh(mesh).axes)
        taken = {axis: rng.choice(dims) for axis in axes if rng.random() < 0.8}
        rules = {dim: [axis for axis in axes if taken.get(axis) == dim] for dim in dict.fromkeys(taken.values())}
        yield mesh, " ".join(f"{dim}:{','.join(cut)}" for dim, cut in rules.items())


def check(workload: md.Workload, wanted: int) -> Counter[str]:
    """The ledger of as many legal layouts as wanted, forward and training step, against the emitted text."""
    counts: Counter[str] = Counter()
    params, _, *rest = specs = workload.specs()
    for mesh, layout in layouts(workload, wanted):
        if counts["layouts"] == wanted:
            break
        try:
            steps = [
                (md.compile(workload.train_step(), mesh, layout), specs),
                (md.compile(workload.eval_step(), mesh, layout), (params, *rest)),
            ]
            programs = [(step.program(*given), step, given) for step, given in steps]
        except md.LayoutError:
            counts["illegal"] += 1
            continue
        for program, step, given in programs:
            try:
                counts["collectives"] += cost_law(program, step.lower(*given).as_text())
                counts["equal"] += 1
            except AssertionError as error:
                counts["different"] += 1
                print(f"{workload.name} on {mesh}, {layout}: {error}", file=sys.stderr)
        counts["layouts"] += 1
    return counts


def random_programs(wanted: int, seed: int) -> Counter[str]:
    """As `check`, for random programs under random layouts."""
    counts: Counter[str] = Counter()
    while counts["equal"] + counts["different"] < wanted:
        case = draw(seed)
        seed += 1
        step, given = case.compiled()
        try:
            program = step.program(*given)
        except md.LayoutError:
            counts["illegal"] += 1
            continue
        try:
            counts["collectives"] += cost_law(program, step.lower(*given).as_text())
            counts["equal"] += 1
        except AssertionError as error:
            counts["different"] += 1
            print(f"program {seed - 1}: {error}", file=sys.stderr)
    return counts


def main() -> int:
    """Print a line of JSON for each workload and one for the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=12, help="legal layouts of each workload")
    parser.add_argument("--programs", type=int, default=500, help="random programs")
    parser.add_argument("--seed", type=int, default=20261121, help="of the first program")
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    found = {w.name: w for w in workloads() if not options.workload or w.name in options.workload}
    different = 0
    for name, workload in found.items():
        counts = check(workload, options.layouts)
        different += counts["different"] + (counts["layouts"] < options.layouts)
        print(json.dumps({"workload": name, **counts}), flush=True)
    if options.programs:
        counts = random_programs(options.programs, options.seed)
        different += counts["different"]
        print(json.dumps({"workload": "random programs", **counts}), flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
