"""Training steps under random plans equal the plain steps: `python -m tests.compile.steps_law --steps 2000 --seed 1`.

A case is a random model with its optimizer (`steps.py`), a random layout with uneven sizes, and a random plan: weight
update (replicated, sharded or auto, with groups, buckets, regathering), overlap (every mode), rematerialisation,
micro-batches, unrolling, donation, dtypes. State and metrics of three steps are compared with those of the plain step
on one device: bit for bit for exact models, else by the dtype's tolerance. Every device runs in NumPy with NaN in the
padding; one case in `--emitted` also runs on CPU devices. A plan without effect, or an illegal layout, must be refused
by an error of ours with a reason; refusals are counted by their message.

A failure prints its case in a smaller form: `judge(CASE, Counter())` runs it again. The last line is JSON; the exit
status is 1 on any failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl import backend
from meshdsl.layouts.mesh import Mesh
from meshdsl.overlap.values import MODES
from tests.compile.steps import RECOMPUTED, Forward, Model, arguments, draw_model, leaves, step_of
from tests.laws import run
from tests.lowering.programs import MESHES, draw_layout, tensors

EXACT = 2.0**45  # sums of larger numbers may round: averages have a few bits of fractions
LARGE = {"float64": 1e8, "float32": 1e3, "mixed": 1e2}  # training diverges: roundings grow, or NaN comes
PLANS, TRIES = 5, 6  # of each model; of each step, until one is not refused
MACHINES = ("tpu-v5e", "tpu-v6e", "tpu-v7x", "a100-p4de", "h100")


@dataclass(frozen=True)
class Plan:
    """A random plan for a step. Its `repr` reproduces it."""

    mesh: str
    rules: dict[str, str]
    update: dict[str, Any] = field(default_factory=dict[str, Any])
    overlap: dict[str, Any] = field(default_factory=dict[str, Any])
    machine: str | None = None
    recompute: str = "none"
    parts: int = 1
    unroll: bool = False
    donate: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One step under one plan."""

    model: Model
    plan: Plan
    emitted: bool = False


def draw_plan(model: Model, number: int) -> Plan:
    """A random plan; most layouts split the batch, so that several devices store the same weights."""
    rng = random.Random(f"{model.seed} plan {number}")
    sizes = Mesh(rng.choice(MESHES)).axes
    axes = [axis for axis, n in sizes.items() if n > 1 or rng.random() < 0.3]
    rng.shuffle(axes)
    data = axes[: rng.choice([1, 1, 1, 2])] if rng.random() < 0.85 else []
    rules = {"batch": ",".join(data)} if data else {}
    rest = " ".join(f"{a}:{n}" for a, n in sizes.items() if a not in data)
    known = [[d for d in t if d != "batch" or not data] for t in _tensors(model)]
    rules |= {d: ",".join(cut) for d, cut in draw_layout(rng, rest, [t for t in known if t]) if d not in rules}
    batch = Forward(model, "none").size["batch"]
    parts = rng.choice([n for n in range(2, batch + 1) if batch % n == 0]) if rng.random() < 0.3 else 1
    loops = "layers" in model.blocks or model.form == "loop" or parts > 1
    update = _draw_update(rng, {a: sizes[a] for a in data if sizes[a] > 1})
    overlap = _draw_overlap(rng, loops, "experts" in model.blocks)
    if data and not update and rng.random() < 0.3:  # weights stored as shards
        rules["params"] = ",".join(rng.sample(data, rng.randint(1, len(data))))
    needs = update.get("mode") == "auto" or "mode" in overlap
    return Plan(
        " ".join(f"{a}:{n}" for a, n in sizes.items()),
        rules,
        update,
        overlap,
        rng.choice(MACHINES) if needs and rng.random() < 0.9 else None,
        rng.choice(RECOMPUTED) if rng.random() < 0.4 else "none",
        parts,
        rng.random() < (0.25 if loops else 0.02),
        rng.choice([(), (0,), (0, 1), (0, 1)]),
    )


def _draw_update(rng: random.Random, data: dict[str, int]) -> dict[str, Any]:
    """Options of the weight update, given the axes that split the batch."""
    mode = rng.choice(
        ["replicated", "sharded", "sharded", "sharded", "auto"] if data else ["replicated", "auto"] * 3 + ["sharded"]
    )
    options: dict[str, Any] = {} if mode == "replicated" else {"mode": mode}
    if options and data and rng.random() < 0.25:
        chosen = rng.sample(sorted(data), rng.randint(1, len(data)))
        options["group"] = {a: rng.choice([n for n in range(2, data[a] + 1) if data[a] % n == 0]) for a in chosen}
    if rng.random() < (0.3 if options and data else 0.05):
        options["bucket_bytes"] = rng.choice([0, 100, 300, 1e9])
    if options and options.keys() != {"bucket_bytes"} and rng.random() < 0.25:
        options["regather"] = True
    return options


EXCHANGED = ("dw", "lancet")  # modes for all_to_alls


def _draw_overlap(rng: random.Random, loops: bool, exchanges: bool) -> dict[str, Any]:
    """Options of the overlap; modes that need a loop or an exchange are seldom drawn for models without."""
    if rng.random() < 0.4:
        return {}
    rare = [*(() if loops else ("skew",)), *(() if exchanges else EXCHANGED)]
    apt = [m for m in ("skew", *EXCHANGED) if m not in rare]  # as often as the modes that fit every model
    modes = [m for m in MODES[1:] if m not in rare or rng.random() < 0.1]
    options: dict[str, Any] = {"mode": rng.choice(apt if apt and rng.random() < 0.6 else modes)}
    if options["mode"] in ("halves", "auto") and rng.random() < 0.3:
        options["parts"] = rng.choice([2, 3])
    if options["mode"] in ("halves", "lancet") and rng.random() < 0.4:
        options["dim"] = rng.choice(["batch", "length", "slot"])
    return options


@lru_cache(maxsize=4)
def _tensors(model: Model) -> list[tuple[str, ...]]:
    return tensors(_graph(model))


@lru_cache(maxsize=4)
def _graph(model: Model) -> Any:
    params, state, batches = arguments(model)
    return _traced(model, "none", 1).graph(params, state, batches[0])


@lru_cache(maxsize=4)
def plain(model: Model) -> list[list[np.ndarray]]:
    """The results of every step on one device, by the kernels in NumPy."""
    params, state, batches = arguments(model)
    now, n = leaves((params, state)), len(jax.tree.leaves((params, state)))
    found: list[list[np.ndarray]] = []
    for batch in batches:
        with np.errstate(all="ignore"):
            results = [np.asarray(x) for x in run(_graph(model), [*now, *leaves(batch)], backend.NumPy)]
        found.append(results)
        now = results[:n]
    return found


def is_large(model: Model) -> bool:
    """True if the model's numbers are so large that roundings of sums in another order may show."""
    largest = EXACT if model.exact else LARGE[model.dtype]
    return not all(np.max(np.abs(x), initial=0) <= largest for xs in plain(model) for x in xs)


def compiled(case: Case) -> md.Compiled:
    """The step under the plan; the plans of a model share the traces of its steps."""
    plan = case.plan
    traced = _traced(case.model, plan.recompute, plan.parts)
    step = md.compile(
        traced.function,
        plan.mesh,
        md.Layout(plan.rules),
        donate=plan.donate,
        weight_update=md.WeightUpdate(**plan.update),
        overlap=md.Overlap(**plan.overlap),
        machine=plan.machine,
        unroll=plan.unroll,
    )
    step._traced = traced._traced  # pyright: ignore[reportPrivateUsage] - as under() does, for other options too
    return step


@lru_cache(maxsize=12)
def _traced(model: Model, recompute: str, parts: int) -> md.Compiled:
    return md.compile(step_of(model, recompute, parts), "", "")


def simulated(case: Case, program: Any) -> Iterator[list[np.ndarray]]:
    params, state, batches = arguments(case.model)
    now, n = leaves((params, state)), len(jax.tree.leaves((params, state)))
    for batch in batches:
        results = md.simulate(program, *now, *leaves(batch))
        yield results
        now = results[:n]


def emitted(case: Case, step: md.Compiled) -> Iterator[list[np.ndarray]]:
    params, state, batches = jax.tree.map(lambda x: md.tensor(x.numpy(), x.dims), arguments(case.model))
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        yield leaves((params, state, metrics))


def apart(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference relative to the largest value; infinite where only one is NaN, or types differ."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        x, y = a.astype("float64"), b.astype("float64")
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return float("inf")
        fine = np.isfinite(y)
        scale = float(np.max(np.abs(y), initial=1, where=fine))
        worst = max(worst, float(np.max(np.abs(x - y), initial=0, where=fine)) / scale)
    return worst


def judge(case: Case, counts: Counter[str]) -> str:
    """ "ok"; "large" if its numbers are, so that roundings differ; "refused: REASON"; otherwise the failure."""
    wanted = plain(case.model)
    if is_large(case.model):
        return "large"
    params, state, batches = arguments(case.model)
    try:
        step = compiled(case)
        program = step.program(params, state, batches[0])
    except md.InternalError as error:
        return failure(error)
    except md.MeshdslError as error:
        return refusal(str(error))
    except Exception as error:  # any other exception is a finding
        return failure(error)
    counts["sharded weights"] += sum(d.sharded for d in step.weight_update.decisions)
    counts["params"] += "params" in case.plan.rules
    counts[f"overlap {case.plan.overlap.get('mode', 'none')}"] += 1
    counts[f"update {case.plan.update.get('mode', 'replicated')}"] += 1
    for name in ("group", "bucket_bytes", "regather"):
        counts[name] += name in case.plan.update
    counts["sends"] += bool(program.collectives)
    counts["padded"] += any(program.is_padded(v, d) for v in program.ins for d in v.dims)
    counts["bitwise"] += case.model.exact
    counts[case.model.form] += 1
    counts["recomputed"] += case.plan.recompute != "none"
    counts["micro-batches"] += case.plan.parts > 1
    counts["unrolled"] += case.plan.unroll
    ways = [("simulated", lambda: simulated(case, program))]
    ways += [("emitted", lambda: emitted(case, step))] * case.emitted
    for name, way in ways:
        try:
            for i, (got, right) in enumerate(zip(way(), wanted, strict=True)):
                worst = apart(got, right)
                if worst > case.model.tolerance:
                    return f"{name} step {i + 1} of {len(wanted)} is {worst:.1e} apart"
        except Exception as error:  # any exception of a program that was compiled is a finding
            return f"{name} {failure(error)}"
        counts[name] += 1
    return "ok"


def failure(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if "/meshdsl/" in f.filename), frames[-1])
    place = last.filename.rpartition("/meshdsl/")[2]
    return f"{type(error).__name__} in {place}:{last.lineno}: {str(error)[:300]}"


def refusal(message: str) -> str:
    """A refusal by the kind of its message; a failure if it has no reason or way out."""
    lines = message.splitlines()
    kind = re.sub(r"'[^']*'", "'*'", re.sub(r"\d[\d.]*", "#", lines[0]))
    kind = re.sub(r"(?<=of ).*(?= cannot)|(?<=: )[^:]* has shape.*", "*", kind)
    return f"refused: {kind[:110]}" if len(lines) > 1 else f"a refusal without a reason: {message}"


def fails(verdict: str) -> bool:
    return verdict not in ("ok", "large") and not verdict.startswith("refused")


def shrink(case: Case) -> Case:
    """A case that also fails, of fewer blocks and with more of the plan at its defaults."""
    while True:
        plan, model = case.plan, case.model
        smaller = [
            dataclasses.replace(case, plan=dataclasses.replace(plan, **{f.name: default}))
            for f in dataclasses.fields(Plan)
            if f.name not in ("mesh", "rules", "machine")
            and getattr(plan, f.name) != (default := Plan("", {}).__getattribute__(f.name))
        ]
        smaller += [
            dataclasses.replace(
                case, plan=dataclasses.replace(plan, rules={k: v for k, v in plan.rules.items() if k != d})
            )
            for d in plan.rules
        ]
        smaller += [
            dataclasses.replace(case, model=dataclasses.replace(model, blocks=model.blocks[:i] + model.blocks[i + 1 :]))
            for i in range(len(model.blocks))
        ]
        changes = {"optimizer": "sgd", "extra": "", "form": "step", "start": "project", "end": "sum"}
        smaller += [
            dataclasses.replace(case, model=dataclasses.replace(model, **{k: v}))
            for k, v in changes.items()
            if getattr(model, k) != v
        ]
        wrong = next((c for c in smaller if fails(judge(c, Counter()))), None)
        if wrong is None:
            return case
        case = wrong


def cases(seed: int, steps: int, every: int) -> Iterator[Iterator[Case]]:
    """For each of `steps` steps, cases to try until one is not refused. One in `every` also runs on devices (0: none).

    `PLANS` consecutive ones are of one model.
    """
    for number in range(steps):
        seeds = range(seed + number // PLANS, sys.maxsize, 1_000_003)  # the first model of moderate numbers
        model = next(m for m in map(draw_model, seeds) if not is_large(m))
        plans = map(partial(draw_plan, model), range(TRIES * (number % PLANS), TRIES * (number % PLANS + 1)))
        yield map(partial(Case, model, emitted=bool(every) and number % every == 0), plans)


def law(seed: int, steps: int, every: int, show: bool = True) -> tuple[Counter[str], Counter[str], list[str]]:
    """The counts of what ran, of verdicts, and the failures."""
    counts: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    failures: list[str] = []
    for tried in cases(seed, steps, every):
        for case in tried:
            verdict = judge(case, counts)
            verdicts["wrong" if fails(verdict) else verdict] += 1
            if fails(verdict):
                small = shrink(case) if show else case
                failures.append(f"{judge(small, Counter())}\n  {small!r}")
                if show:
                    print(failures[-1], flush=True)
            if not verdict.startswith("refused"):
                break
    return counts, verdicts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the first model; each has five plans")
    parser.add_argument("--emitted", type=int, default=20, help="one case in so many also runs on devices; 0: none")
    options = parser.parse_args()
    start = time.monotonic()
    counts, verdicts, failures = law(options.seed, options.steps, options.emitted)
    print(
        json.dumps(
            {
                "seed": options.seed,
                "steps": options.steps,
                "wrong": len(failures),
                "verdicts": dict(verdicts.most_common()),
                "ran": dict(sorted(counts.items())),
                "seconds": round(time.monotonic() - start),
                "processor_seconds": round(time.process_time()),
            }
        )
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
