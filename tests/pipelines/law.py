"""A step in pipeline stages gives the results of the step on one device, for random models, stages and layouts.

Models have whole numbers, for which sums are exact, so results are equal bit for bit; models of smooth functions agree
to 1e-12 in float64. Before its first micro-batch a stage computes with NaN, in place of the zeros of a real run. The
programs run on the simulator, which fills padding with NaN; every eighth one runs on devices too, and its StableHLO has
the collectives that the program states, ticks counted.

    python -m tests.pipelines.law --cases 1000 --seed 1    # the last line is JSON
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl import backend
from meshdsl.lowering.simulate import simulate
from meshdsl.overlap.modes import PLANS
from meshdsl.overlap.planner import Candidates, Planner
from meshdsl.passes.pipelines import one_tick
from tests.laws import run
from tests.stablehlo import cost_law

OPTIONS = (
    "closed",
    "mask",
    "keys",
    "aux",
    "collect",
    "skip",
    "tied",
    "bias",
    "head",
    "reads_rows",
    "narrow",
    "stem",
    "encoder",
    "decay",
    "cast",
    "last",
    "merged",
)
MESHES = ("", "data:2", "cols:2", "data:2 cols:2")


@dataclass(frozen=True)
class Case:
    """A model, its number of micro-batches, and where it runs."""

    stages: int
    layers: int
    microbatches: int
    axes: str
    options: frozenset[str]
    exact: bool
    remat: bool | str
    update: str
    overlap: str
    unroll: bool
    vocab_over_stages: bool
    seed: int
    chunks: int = 1

    @property
    def mesh(self) -> str:
        stages = f"stages:{self.stages // 2} more:2" if self.two_axes else f"stages:{self.stages}"
        return f"{stages} {self.axes}".strip()

    @property
    def two_axes(self) -> bool:
        return self.stages in (4, 8) and self.seed % 3 == 0

    @property
    def layout(self) -> str:
        stages = "stages,more" if self.two_axes else "stages"
        rules = [f"layer:{stages}"]
        rules += ["batch:data"] if "data" in self.axes else []
        rules += ["hidden:cols"] if "cols" in self.axes else []
        rules += [f"vocab:{stages}"] if self.vocab_over_stages else []
        return "; ".join(rules)


OVERLAP = [0.5, 0.1, 0.1, 0.05, 0.05, 0.1, 0.1]  # probabilities


def draw(seed: int, largest: int = 4) -> Case:
    """A random case with at most `largest` stages; of more than 4, with loops unrolled or overlapped at times."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(2, largest + 1))
    axes = [a for a in MESHES if stages * md.Mesh(a).size <= 8]
    options = frozenset(o for o in OPTIONS if rng.random() < 0.3)
    chunks = int(rng.integers(2, min(stages, 3) + 1)) if rng.random() < 0.25 else 1
    parts = int(rng.choice([2, 3, 4, 6, 9, 16], p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1]))
    return Case(
        stages,
        int(rng.integers(stages * (chunks - 1) + 1 if chunks > 1 else stages, 2 * stages * chunks + 2)),
        parts if chunks == 1 else stages * (1 + parts % 3),
        str(rng.choice(axes)),
        options,
        bool(rng.random() < 0.6),
        [False, True, "products"][int(rng.integers(3))],
        str(rng.choice(["replicated", "sharded"], p=[0.7, 0.3])) if "data" in axes else "replicated",
        str(rng.choice(["none", "list", "halves", "auto", "ticks", "paired", "parts"], p=OVERLAP))
        if largest > 4
        else "none",
        largest > 4 and bool(rng.random() < 0.1),
        bool(rng.random() < 0.3),
        seed,
        chunks,
    )


def step_of(case: Case) -> tuple[Any, list[Any]]:
    """The step `(params, batch) -> (loss, params)` of a case, and its arguments."""
    rng, on = np.random.default_rng(case.seed + 7), case.options
    batch, wide, hidden = md.Dim("batch", 2 * case.microbatches), md.Dim("io", 3), md.Dim("hidden", 4)
    vocab, layer, act = md.Dim("vocab", 5), md.Dim("layer", case.layers), md.relu if case.exact else md.tanh

    def tensor(*dims: md.Dim) -> md.Tensor:
        sizes = [d.size for d in dims]
        values = rng.integers(-1, 2, sizes) * (rng.random(sizes) < 0.6) if case.exact else rng.normal(size=sizes) / 2
        return md.tensor(values.astype("float64"), dims)

    first = tensor(wide, hidden, layer) if "last" in on else tensor(layer, wide, hidden)
    params = {"w": first, "u": tensor(layer, hidden, wide), "e": tensor(vocab, wide)}
    rank = md.Dim("rank", 2)
    params |= {"f": tensor(layer, hidden, rank), "g": tensor(layer, rank, wide)}
    params |= {"s": tensor(wide, hidden), "r": tensor(hidden, wide)}
    params |= {"c": tensor(wide), "b": tensor(wide), "o": tensor(wide, vocab)}
    tokens = md.tensor(rng.integers(0, 5, [batch.size]), [batch])
    data = {"tokens": tokens, "y": tensor(batch, wide), "t": tensor(batch, vocab)}

    def loss(params: Any, part: Any) -> md.Tensor:
        x = first = md.take(params["e"], part["tokens"], "vocab") + (part["y"] if "reads_rows" in on else 0)
        if "stem" in on:
            h = act(md.einsum(x, params["s"], out=[*x.dims[:1], hidden]))
            x = x + md.einsum(h, params["r"], out=x.dims)
        read = md.einsum(act(md.einsum(part["y"], params["s"], out=[x.dims[0], hidden])), params["r"], out=x.dims)
        bias = params["b"] * 2 if "bias" in on else None  # computed from a parameter, read by every layer
        mask = md.cast(part["tokens"] != 0, "float64")
        numbers = md.cast(md.iota(layer), "float64")
        rows = md.einsum(part["y"], numbers, out=[layer, *part["y"].dims]) if "keys" in on else numbers

        def block(carry: Any, row: Any) -> Any:
            (x, total), (w, u, extra) = carry, row
            w = md.cast(md.cast(w, "bfloat16"), "float64") if "narrow" in on else w
            h = act(md.einsum(x, w, out=[*x.dims[:1], hidden]))
            x = x + md.einsum(h, u, out=x.dims) * (mask if "mask" in on else 1)
            x = x + params["c"] * 2 if "closed" in on else x
            x = x + bias if bias is not None else x
            x = x + read if "encoder" in on else x
            x = x + md.stop_gradient(extra) if "keys" in on else x
            total = total + md.sum(h * 2) if "aux" in on else total
            return (x, total), md.sum(h) if "collect" in on else None

        u = params["u"]
        u = u + md.einsum(params["f"], params["g"], out=u.dims) if "merged" in on else u
        u = md.cast(u, "float32") if "cast" in on and case.exact else u
        one = md.checkpoint(block, case.remat if isinstance(case.remat, str) else "nothing") if case.remat else block
        start = x, md.cast(0, "float64")
        (x, total), each = md.scan(one, start, (params["w"], u, rows), over=layer)
        x = x + first * 3 if "skip" in on else x
        logits = md.einsum(x, params["e"] if "tied" in on else params["o"], out=[x.dims[0], vocab])
        logits = act(logits) if "head" in on else logits
        value = md.sum(logits * part["t"]) + total
        value = value + sum(md.sum(md.square(params[name])) for name in "ue") if "decay" in on else value
        return value + md.sum(each * (numbers + 1)) if each is not None else value

    def step(params: Any, data: Any) -> Any:
        value, grads = md.accumulate(lambda part: md.value_and_grad(loss)(params, part), data, case.microbatches)
        return value, jax.tree.map(lambda p, g: p - g, params, grads)

    return step, [params, data]


def differ(got: list[np.ndarray], wanted: list[np.ndarray], exact: bool) -> float:
    """The largest difference, relative to the largest result; 0 if equal."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if exact and np.array_equal(a, b):
            continue
        size = max(float(np.abs(b).max(initial=0)), 1.0)
        worst = max(worst, float(np.abs(a - b).max()) / size) if np.isfinite(a).all() else np.inf
    return worst


TICKS = PLANS["ticks"]


def paired_ticks(planner: Planner, end: str = "passes") -> Candidates:
    """Of the plans "ticks", the one with one loop for both passes, whatever its time."""
    return (one for one in TICKS(planner) if one[0].startswith("one loop") and one[0].endswith(end))


def in_parts(planner: Planner) -> Candidates:
    """The one with the other loops in parts of the batch; without such loops, as `paired_ticks`."""
    plans = [*paired_ticks(planner, "batch"), *paired_ticks(planner)]
    return iter(plans[:1])


def compiled(case: Case, step: Any, args: list[Any]) -> Any:
    """The step in stages, without the options that are refused because they change nothing."""
    machine = "tpu-v5e" if case.overlap != "none" else None
    ticks = {"paired": paired_ticks, "parts": in_parts}.get(case.overlap, TICKS)
    overlap = case.overlap if ticks is TICKS else "ticks"
    options = {"weight_update": case.update, "overlap": overlap, "unroll": case.unroll, "machine": machine}
    options |= {"chunks": case.chunks} if case.chunks > 1 else {}
    for left_out in ((), ("unroll",), ("overlap", "machine"), ("overlap", "machine", "weight_update")):
        kept = {name: x for name, x in options.items() if name not in left_out}
        try:
            pipe = md.compile(step, case.mesh, case.layout, **kept)
            with mock.patch.dict(PLANS, ticks=ticks):
                pipe.program(*args)
            return pipe
        except md.LayoutError as error:
            if "no effect" not in str(error) and "nothing to shard" not in str(error):
                raise
    return md.compile(step, case.mesh, case.layout)


def judge(case: Case, devices: bool = False) -> str:
    """What is wrong with the program of a case; "" if nothing is."""
    step, args = step_of(case)
    arrays = [x.numpy() for x in jax.tree.leaves(args)]
    with mock.patch.object(one_tick, "FILL", np.nan):
        pipe = compiled(case, step, args)
        program = pipe.program(*args)
        results = {"simulator": simulate(program, *arrays)}
        if devices:  # which run what the text says, and the program states its collectives
            cost_law(program, pipe.lower(*args).as_text())
            results["devices"] = [np.asarray(x.array) for x in jax.tree.leaves(pipe(*args))]
    wanted = run(pipe.graph(*args), arrays, backend.NumPy)  # the step itself, by the kernels alone
    for where, got in results.items():
        error = differ(got, wanted, case.exact)
        if error > (0 if case.exact else 1e-12):
            return f"{where} differs by {error:.1e}"
    return "" if any(record.kind == "permute" for record in program.collectives) else "no pipeline"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started, counts = time.time(), Counter[str]()
    for seed in range(options.seed * 10**6, options.seed * 10**6 + options.cases):
        case = draw(seed, largest=8)
        try:
            wrong = judge(case, devices=seed % 8 == 0)
        except Exception as error:  # the law finds what nobody thought of
            wrong = f"{type(error).__name__}: {error}"
        counts["right" if not wrong else "wrong"] += 1
        if wrong:
            print(case, wrong, flush=True)
    print(json.dumps({"cases": options.cases, **counts, "seconds": round(time.time() - started)}))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
