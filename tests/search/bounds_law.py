"""The bounds law: no bound of a search exceeds the cost it bounds. `python -m tests.search.bounds_law --programs 2000`.

Drawn are programs and models, meshes of up to 4,096 devices, machines and layouts. For each layout the floor and the
time of the partitioned program are compared with the report of `Compiled.cost`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

import meshdsl as md
from meshdsl.models import gpt_moe, mlp, moe_transformer, resnet, seq2seq, transformer
from meshdsl.search.api import _compiled
from meshdsl.search.evaluate import evaluate
from meshdsl.search.floor import floor, kernels
from meshdsl.search.plan_layouts import Candidates
from meshdsl.search.request import SearchRequest
from meshdsl.search.space import space
from meshdsl.search.variants import Variants
from tests.lowering.maker import program
from tests.lowering.programs import MESHES

MACHINES = (
    "tpu-v5e", "tpu-v5p", "tpu-v4", "h100:compiled", "a100-p4de:compiled", "v100-p3dn:compiled", "mi300x:compiled",
    "h100:flash", "tpu-v5p:flash,overlap",
)  # fmt: skip
LARGE = ("x:64", "x:16 y:16", "x:256 y:8", "x:8 y:32 z:4", "x:512 y:8")
ROUNDING = 1e-9


def drawn(seed: int) -> tuple[Callable[..., Any], Sequence[Any], str, str]:
    """A function, its arguments, a mesh and a machine, from a seed."""
    rng = random.Random(seed)
    if rng.random() < 0.25:
        return modelled(rng)
    mesh = rng.choice([*MESHES, *LARGE])
    f, args = program(seed, rng.randint(1, 12), mesh)
    return f, args, mesh, machine_for(rng, mesh)


def modelled(rng: random.Random) -> tuple[Any, Sequence[Any], str, str]:
    """A training step of a model, on a large mesh or a small one."""
    lm = transformer.lm.replace(
        batch=rng.choice([16, 256]),
        length=rng.choice([32, 512]),
        remat=rng.choice([False, True, "collectives"]),
        attention=rng.choice(["", "", "auto", "ring"]),
    )
    workload = rng.choice([lm, mlp.mlp, resnet.digits, seq2seq.seq2seq, moe_transformer.moe, gpt_moe.gpt_moe])
    mesh = rng.choice([*LARGE, "x:8", "x:2 y:4"])
    return workload, (), mesh, machine_for(rng, mesh)


def machine_for(rng: random.Random, mesh: str) -> str:
    """A machine with room for the mesh."""
    fits = [name for name in MACHINES if md.machine(name).network.size >= md.Mesh(mesh).size]
    return rng.choice(fits or ["tpu-v5p"])


def candidates_of(f: Any, args: Sequence[Any], mesh: str, machine: str) -> Candidates:
    """The layouts of a function on a mesh."""
    compiled, args = _compiled(f, tuple(args))
    on, grid = md.machine(machine), md.Mesh(mesh)
    variants = Variants(compiled, args, "", SearchRequest(on))
    problem = variants.problem(variants.base)
    return Candidates(problem, space(problem.graph, grid), on)


def violations(
    f: Any, args: Sequence[Any], mesh: str, machine: str, layouts: int, seed: int, layout: Any = None
) -> Counter[str]:
    """Check random layouts of one function, or one given; raises `AssertionError` for a bound above a cost."""
    rng, candidates = random.Random(seed), candidates_of(f, args, mesh, machine)
    grid, on, graph = candidates.space.mesh, candidates.machine, candidates.problem.graph
    least, counts = floor(kernels(graph), on, grid.size), Counter[str](functions=1)
    for _ in range(4 * layouts):
        row = tuple(rng.choice([0, 0, rng.randrange(len(cuts))]) for cuts in candidates.space.options)
        row = row if layout is None else candidates.space.row(md.Layout(layout))
        if not candidates.space.allows(row) or counts["layouts"] == layouts:
            continue
        rules = candidates.space.layout(row)
        try:
            entry = evaluate(candidates.problem, grid, rules)
        except md.LayoutError:
            assert not candidates.timed or candidates.seconds(row) == math.inf, rules
            counts["illegal"] += 1
            continue
        counts["layouts"] += 1
        bounds = {"floor": (least, entry.seconds), "inputs": (candidates.stored(row), entry.peak_bytes)}
        assert not candidates.timed or candidates.seconds(row) == entry.seconds, rules
        for name, (bound, true) in bounds.items():
            assert bound * (1 - ROUNDING) <= true, f"{name}: {bound} > {true} of '{rules}' on {grid}"
        counts["bounds"] += len(bounds)
    return counts


def other_knobs(f: Any, compiled: Any, args: Sequence[Any], mesh: str, on: md.Machine, seed: int) -> int:
    """The floor under a random weight update and overlap, and of a workload's step under remat and micro-batches.

    Returns the number of bounds checked.
    """
    rng, grid, checked = random.Random(seed), md.Mesh(mesh), 0
    variants = Variants(compiled, args, "", SearchRequest(on))
    free = variants.canonical(variants.base.replace(remat="none")) if hasattr(f, "train_step") else None
    least = variants.problem(free or variants.base)
    for _ in range(6):
        if checked == 2:
            break
        updates = ["replicated", "sharded", "auto", md.WeightUpdate("sharded", regather=True)]
        updates.append(md.WeightUpdate("sharded", bucket_bytes=1 << rng.randrange(8, 24)))
        knobs: dict[str, Any] = {"weight_update": rng.choice(updates)}
        knobs["overlap"] = rng.choice(["none", "none", "none", "list", "skew", "dw", "halves"])
        if hasattr(f, "train_step"):
            knobs["microbatches"] = rng.choice([1, 2, 4])
        if hasattr(f, "config") and hasattr(f.config, "remat"):
            knobs["remat"] = rng.choice(["model", "full", "products", "collectives"])
        plan = variants.canonical(variants.base.replace(**knobs))
        if plan is None:
            continue
        problem = variants.problem(plan)
        candidates = space(problem.graph, grid)
        often = {"batch": 0.8}
        row = tuple(
            rng.randrange(len(cuts)) if rng.random() < often.get(d, 0.15) else 0
            for d, cuts in zip(candidates.dims, candidates.options, strict=True)
        )
        if not candidates.allows(row):
            continue
        try:
            entry = evaluate(problem, grid, candidates.layout(row))
        except md.LayoutError:
            continue
        for each in (problem, least):  # the step that recomputes nothing has the least work of all
            seconds = floor(kernels(each.graph), on, grid.size)
            assert seconds * (1 - ROUNDING) <= entry.seconds, f"{seconds} s > {entry.seconds} s of {plan!r}"
            checked += 1
    return checked


def main() -> int:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--layouts", type=int, default=3, help="legal layouts of each")
    parser.add_argument("--seed", type=int, default=20261122)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    total: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.programs):
        try:
            f, args, mesh, machine = drawn(seed)
            total += violations(f, args, mesh, machine, options.layouts, seed)
            total["knobs"] += other_knobs(f, *_compiled(f, tuple(args)), mesh, md.machine(machine), seed)
        except AssertionError as error:
            total["violations"] += 1
            print(f"{seed}: {error}", file=sys.stderr, flush=True)
    print(json.dumps({"figure": "bounds", **total, "violations": total["violations"]}))
    return int(bool(total["violations"]))


if __name__ == "__main__":
    sys.exit(main())
