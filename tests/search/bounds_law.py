"""The bounds law: the floor of a search is below every cost. `python -m tests.search.bounds_law --programs 2000`.

Drawn are programs and models, meshes of up to 4,096 devices, machines and layouts. For each layout the floor is
compared with the report of `Compiled.cost`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import meshdsl as md
from meshdsl.models import gpt_moe, mlp, moe_transformer, resnet, seq2seq, transformer
from meshdsl.search.api import _compiled
from meshdsl.search.costed import evaluate
from meshdsl.search.floor import floor, kernels
from meshdsl.search.space import Space, space
from meshdsl.search.variants import Variants
from tests.lowering.maker import program
from tests.lowering.programs import MESHES

MACHINES = (
    "tpu-v5e", "tpu-v5p", "tpu-v4", "h100", "a100-p4de", "v100-p3dn", "mi300x",
    "h100:eager,flash", "tpu-v5p:flash,overlap",
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


def drawn_layout(candidates: Space, grid: md.Mesh, rng: random.Random, often: Mapping[str, float]) -> md.Layout | None:
    """A random layout of a space on a mesh, which splits dims this often; None if dims of an input share an axis."""
    roles: list[list[str]] = [[] for _ in grid.axes]
    for d in candidates.sizes:
        if rng.random() < often.get(d, often[""]):
            rng.choice(roles).append(d)
    return candidates.layout(grid, roles) if candidates.allows(grid, roles) else None


def violations(
    f: Any, args: Sequence[Any], mesh: str, machine: str, layouts: int, seed: int, layout: Any = None
) -> Counter[str]:
    """Check random layouts of one function, or one given; raises `AssertionError` for a bound above a cost."""
    rng, grid, on = random.Random(seed), md.Mesh(mesh), md.machine(machine)
    compiled, args = _compiled(f, tuple(args))
    variants = Variants(compiled, args, "", on)
    problem = variants.problem(variants.base)
    candidates = space(problem.graph)
    least, counts = floor(kernels(problem.graph), on, grid.size), Counter[str](functions=1)
    for _ in range(12 * layouts):
        rules = drawn_layout(candidates, grid, rng, {"": 0.2}) if layout is None else md.Layout(layout)
        if rules is None or counts["layouts"] == layouts:
            continue
        try:
            entry = evaluate(problem, grid, rules)
        except md.LayoutError:
            counts["illegal"] += 1
            continue
        counts["layouts"] += 1
        assert least * (1 - ROUNDING) <= entry.seconds, f"{least} > {entry.seconds} of '{rules}' on {grid}"
        counts["bounds"] += 1
    return counts


def other_knobs(f: Any, compiled: Any, args: Sequence[Any], mesh: str, on: md.Machine, seed: int) -> int:
    """The floor under a random weight update and overlap, and of a workload's step under remat and micro-batches.

    Returns the number of bounds checked.
    """
    rng, grid, checked = random.Random(seed), md.Mesh(mesh), 0
    variants = Variants(compiled, args, "", on)
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
        rules = drawn_layout(space(problem.graph), grid, rng, {"": 0.15, "batch": 0.8})
        if rules is None:
            continue
        try:
            entry = evaluate(problem, grid, rules)
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
