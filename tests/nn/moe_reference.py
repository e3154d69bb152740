"""Every router again, token by token in plain Python, and random cases on which both must agree.

`python -m tests.nn.moe_reference --cases 1000 --seed 1` compares so many cases of each router: slots, drops, counts
and demand bit for bit, weights and losses to 1e-6. Gates lie on a coarse grid, so that ties and zeros are common.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.nn.moe import Assignment, assign
from meshdsl.nn.moe.routing import masks

TOLERANCE = 1e-6


def reference(router: str, gates: Any, capacity: int, options: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """One group: gates [S, E] as lists of floats; `extra` has uniforms, nonpadding, used, ids of its tokens."""
    gates = np.asarray(gates, np.float64)
    tokens, experts = gates.shape
    real = [bool(n) for n in extra.get("nonpadding", [1] * tokens)]
    dispatch = np.zeros((tokens, experts, capacity), bool)
    combine = np.zeros((tokens, experts, capacity))
    used = [int(n) for n in extra.get("used", [0] * experts)]
    if router == "expert_choice":
        for e in range(experts):
            best = sorted((s for s in range(tokens) if real[s]), key=lambda s: (-gates[s, e], s))
            for slot, s in enumerate(best[:capacity]):
                dispatch[s, e, slot], combine[s, e, slot] = True, gates[s, e]
        return result(dispatch, combine, 0.0, [0] * experts, dispatch.sum((0, 2)).tolist())

    if router in ("hash", "random"):
        picks, weights = [[int(e)] for e in extra["ids"]], [[1.0]] * tokens
    else:
        k = options["k"]
        picks = [sorted(range(experts), key=lambda e, s=s: (-gates[s, e], e))[:k] for s in range(tokens)]
        weights = [[float(gates[s, e]) for e in chosen] for s, chosen in enumerate(picks)]
    raw = [list(row) for row in weights]
    if options.get("normalize") == "before":
        weights = [[w / total(row) for w in row] for row in weights]

    order = list(range(tokens))
    if router == "batch_prioritised":
        score = [row[0] if options["score"] == "top1" else total(row) for row in raw]
        order = sorted(order, key=lambda s: (-score[s], s))
    seen, demand = [0] * experts, [0] * experts
    placed: list[tuple[int, int, int, int]] = []
    for j in range(len(picks[0])):
        for s in order:
            if not real[s]:
                continue
            e = picks[s][j]
            demand[e] += j == 0
            refused = j == 1 and router in ("top2", "gshard_paper") and not accepts(options, raw[s], extra, s)
            if refused and not options["hole"]:
                continue
            slot, seen[e] = seen[e], seen[e] + 1
            if slot < capacity - used[e] and not refused:
                placed.append((s, e, slot, j))
    for s, e, slot, j in placed:
        weight = weights[s][j]
        if options.get("normalize") == "after":
            weight /= total([raw[s][i] for t, _, _, i in sorted(placed, key=lambda p: p[3]) if t == s]) or 1.0
        dispatch[s, e, slot], combine[s, e, slot] = True, weight
    importance = [sum(gates[s, e] for s in range(tokens) if real[s]) / tokens for e in range(experts)]
    scale = {"E2_mean": experts, "paper": 1 / experts, "none": 0}[options.get("aux", "none")]
    aux = scale * sum(n / tokens * m for n, m in zip(demand, importance, strict=True))
    after = [min(capacity, u + n) for u, n in zip(used, seen, strict=True)]
    return result(dispatch, combine, aux, demand, after)


def total(row: list[float]) -> float:
    return float(functools.reduce(operator.add, row)) if row else 0.0  # `sum` of Python 3.12 rounds once, at the end


def accepts(options: dict[str, Any], raw: list[float], extra: dict[str, Any], s: int) -> bool:
    second = raw[1] / total(raw)
    if options["policy"] == "all":
        return True
    if options["policy"] == "threshold":
        return second > options["threshold"]
    return second / options["threshold"] > extra["uniforms"][s]


def result(dispatch: Any, combine: Any, aux: float, demand: list[int], used: list[int]) -> dict[str, Any]:
    return {
        "dispatch": dispatch,
        "combine": combine,
        "aux": aux,
        "demand": demand,
        "used": used,
        "counts": dispatch.sum((0, 2)).tolist(),
        "dropped": ~dispatch.any((1, 2)),
    }


# Each router: what the reference is told, and the same as options of meshdsl, both drawn.
def draw_options(router: str, rng: np.random.Generator, experts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    aux = one("E2_mean", "paper", "none")
    if router in ("gshard_paper", "top2"):
        hole = one(True, False)
        policy, threshold = one("all", "random", "threshold"), one(0.5, 0.25, 0.2)
        normalize = one("none", "before", "after")
        ours = {"policy": policy, "threshold": threshold, "normalize": normalize, "aux_scale": aux}
        ours["rejected_second_uses_slot"] = hole
        told = {"k": 2, "hole": hole, "aux": aux, "policy": policy, "threshold": threshold, "normalize": normalize}
        return told, ours
    if router == "switch":
        return {"k": 1, "aux": aux}, {"aux_scale": aux}
    if router in ("top_k", "batch_prioritised"):
        k, normalize = int(rng.integers(1, min(3, experts) + 1)), one("none", "before", "after")
        told = {"k": k, "normalize": normalize, "aux": aux}
        ours = {"k": k, "normalize": normalize, "aux_scale": aux}
        if router == "batch_prioritised":
            told["score"] = ours["score"] = one("top1", "sum")
        return told, ours
    return {}, {}


ROUTERS = ("gshard_paper", "top2", "switch", "top_k", "batch_prioritised", "expert_choice", "hash", "random")
SHAPES = [(1, 1), (3, 2), (8, 4), (13, 3), (6, 8), (16, 5)]  # tokens, experts


def draw_gates(rng: np.random.Generator, groups: int, tokens: int, experts: int) -> np.ndarray:
    """Probabilities: half of the groups on a grid of eighths, with ties and zeros; the others a softmax."""
    grid = rng.multinomial(8, np.full(experts, 1 / experts), (groups, tokens)) / 8
    logits = rng.standard_normal((groups, tokens, experts))
    smooth = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return np.where(rng.random((groups, 1, 1)) < 0.5, grid, smooth)


def draw(router: str, rng: np.random.Generator, groups: int) -> dict[str, Any]:
    """One call with so many groups, each a case."""
    two = router in ("gshard_paper", "top2")
    tokens, experts = SHAPES[rng.integers(two, len(SHAPES))]
    told, ours = draw_options(router, rng, experts)
    extra: dict[str, Any] = {}
    if told.get("policy") == "random":
        extra["uniforms"] = np.where(rng.random((groups, tokens)) < 0.5, 0.25, rng.random((groups, tokens)))
    if rng.random() < 0.5:
        extra["nonpadding"] = rng.integers(0, 2, (groups, tokens))
    capacity = int(rng.integers(1, tokens + 1))
    if (router in ("switch", "hash", "random") or (router == "top_k" and told["k"] == 1)) and rng.random() < 0.5:
        extra["used"] = rng.integers(0, capacity + 1, (groups, experts))
    if router in ("hash", "random"):
        extra["ids"] = rng.integers(0, experts, (groups, tokens))
    gates = draw_gates(rng, groups, tokens, experts)
    return {"router": router, "gates": gates, "capacity": capacity, "told": told, "options": ours, "extra": extra}


DIMS = {"uniforms": "group token", "nonpadding": "group token", "used": "group expert", "ids": "group token"}


def arguments(case: dict[str, Any]) -> tuple[dict[str, md.Tensor], Callable[..., Assignment]]:
    """The tensors of a case, and a function of them that routes."""
    tensors = {"gates": md.tensor(case["gates"], "group token expert")}
    tensors |= {name: md.tensor(value, DIMS[name]) for name, value in case["extra"].items()}
    options = dict(case["options"])

    def call(tensors: dict[str, md.Tensor]) -> Assignment:
        named = dict(tensors)
        gates = named.pop("gates")
        if case["router"] == "hash":  # a table that sends an id to the expert before
            n = case["gates"].shape[-1]
            table = md.tensor(np.roll(np.arange(n), -1), "id")
            named["token_ids"], named["table"] = (named.pop("ids") - 1 + n) % n, table
        slot = md.Dim("slot", case["capacity"])
        return assign(gates, tokens="token", experts="expert", capacity=slot, router=case["router"], **options, **named)

    return tensors, call


def outputs(found: Assignment) -> dict[str, md.Tensor]:
    combine, dispatch = masks(found)
    ours = {"combine": combine, "dispatch": dispatch, "aux": found.aux_loss, "counts": found.counts}
    return {**ours, "dropped": found.dropped, "used": found.used, "demand": found.demand}


def simulated(f: Callable[..., Any], *args: Any, mesh: str = "rows:1", layout: str = "") -> Any:
    """The results of a function under a layout, as arrays; every device runs in NumPy, and nothing is compiled."""
    program = md.compile(f, mesh, layout).program(*args)
    structure = jax.tree.structure(md.eval_shape(f, *args), is_leaf=lambda x: hasattr(x, "shape"))
    return jax.tree.unflatten(structure, md.simulate(program, *jax.tree.leaves(args)))


def problems(case: dict[str, Any], ours: dict[str, np.ndarray]) -> list[str]:
    """The differences from the reference, group by group."""
    found: list[str] = []
    losses = []
    for g, gates in enumerate(case["gates"]):
        extra = {name: value[g] for name, value in case["extra"].items()}
        want = reference(case["router"], gates, case["capacity"], case["told"], extra)
        losses.append(want["aux"])
        for name in ("dispatch", "counts", "dropped", "used", "demand"):
            if not np.array_equal(ours[name][g], want[name]):
                found.append(f"group {g}: {name}")
        if not np.allclose(ours["combine"][g], want["combine"], rtol=TOLERANCE, atol=TOLERANCE):
            found.append(f"group {g}: combine")
    if not np.allclose(ours["aux"], np.mean(losses), rtol=TOLERANCE, atol=TOLERANCE):
        found.append(f"aux {ours['aux']} for {np.mean(losses)}")
    return found


def check(router: str, rng: np.random.Generator, groups: int) -> list[str]:
    """One drawn call against the reference; the problems found."""
    case = draw(router, rng, groups)
    tensors, call = arguments(case)
    ours = simulated(lambda tensors: outputs(call(tensors)), tensors)
    found = problems(case, ours)
    return [f"{router} {case['told']} capacity {case['capacity']} {list(case['extra'])}: {p}" for p in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="groups of tokens for each router")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    start, groups, wrong, done = time.monotonic(), 50, 0, 0
    for router in ROUTERS:
        rng = np.random.default_rng([args.seed, ROUTERS.index(router)])
        for _ in range(-(-args.cases // groups)):
            found = check(router, rng, groups)
            done += groups
            wrong += bool(found)
            if found:
                print(*found, sep="\n", flush=True)
    summary = {"routers": len(ROUTERS), "cases": done, "calls_wrong": wrong, "seed": args.seed}
    print(json.dumps({**summary, "seconds": round(time.monotonic() - start, 1)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
