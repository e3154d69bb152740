"""No plan changes the width of a sum: `python -m tests.compile.widths_law --steps 2000 --seed 1`.

A case is a random model of whole numbers with random dtypes (parameters, operands of products, inputs, loss), on a
batch that repeats a few rows up to 512 times, under a random plan of `steps_law`: layout, weight update, overlap,
rematerialisation, 1 to 512 micro-batches, donation. Each row alone is computed without rounding, in 16 bits too;
models of which that is not true are not counted. So the gradients of the whole batch are exact in float32, and any sum
in 16 bits shows: they are compared with the same model in float64 on one device, bit for bit for parameters of 32 bits
or more. Gradients of 16-bit parameters, and a 16-bit loss, are rounded once on each device.

The last line is JSON; the exit status is 1 on any failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl import backend
from tests.compile.steps import DISTINCT, FLOATS, Model, arguments, leaves, step_of
from tests.compile.steps_law import Case, compiled, draw_plan, failure, refusal
from tests.laws import run

BLOCKS = ("chosen", "dense", "layers", "shifts", "tied", "convolution")
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half a unit of the last place, relative to the value
TRIES = 8


def draw_widths(seed: int) -> Model:
    """A random exact model with random dtypes."""
    rng = random.Random(f"widths {seed}")
    dtype = rng.choice([name for name in FLOATS if "/" in name])
    return Model(
        seed,
        tuple(rng.choice(BLOCKS) for _ in range(rng.choice([0, 1, 1, 2]))),
        rng.choice(["embed", "project", "project"]),
        rng.choice(["sum", "targets"]),
        "sgd",
        exact=True,
        dtype=dtype,
        extra="grads",
        batch=rng.choice([64, 256, 512, 512]),
        data=rng.choice(["", "int8", "uint8", "bfloat16", "float16", "float32", "int32"]),
        loss=rng.choice(["", "", "bfloat16", "float16", "float32"]),
    )


@lru_cache(maxsize=8)
def graph_of(model: Model) -> Any:
    params, state, batches = arguments(model)
    return md.compile(step_of(model), "", "").graph(params, state, batches[0])


@lru_cache(maxsize=4)  # of the whole batch, for the law and for each of its plans
def results(model: Model, row: int | None = None) -> list[np.ndarray]:
    """The loss, the gradients and the new parameters of one step on one device; of one row of the batch, if given."""
    inputs = leaves((*arguments(model)[:2], arguments(model)[2][0]))
    if row is not None:
        n, model = model.batch, dataclasses.replace(model, batch=1)
        inputs = [x[row : row + 1] if x.shape[:1] == (n,) else x for x in inputs]
    with np.errstate(all="ignore"):
        return [np.asarray(x) for x in run(graph_of(model), inputs, backend.NumPy)]


def in_float64(model: Model) -> Model:
    return dataclasses.replace(model, dtype="float64", data=model.data or FLOATS[model.dtype][0], loss="")


def is_exact(model: Model) -> bool:
    """True if each row alone is computed without rounding, and the sums of all rows fit float32."""
    whole = dataclasses.replace(model, loss="")
    for row in range(DISTINCT):
        narrow, wide = results(whole, row), results(in_float64(model), row)
        if any(not np.array_equal(a.astype("float64"), b) for a, b in zip(narrow, wide, strict=True)):
            return False
    return all(np.max(np.abs(x), initial=0) < 2**23 for x in results(in_float64(model)))


def apart(got: np.ndarray, wanted: np.ndarray, devices: int) -> bool:
    """True if a result is not the exact one, rounded to its dtype; sums over devices of 16 bits are rounded on each."""
    with np.errstate(over="ignore"):
        right = wanted.astype(got.dtype)
    if got.dtype.name not in ROUNDING:
        return not np.array_equal(got, right)
    fits = np.isfinite(right.astype("float64"))  # else the exact value is beyond the dtype
    x, y = got.astype("float64")[fits], right.astype("float64")[fits]
    bound = (2 + devices) * ROUNDING[got.dtype.name] * np.max(np.abs(wanted), initial=1)
    return bool(np.any(np.abs(x - y) > bound))


def judge(case: Case, counts: Counter[str]) -> str:
    """ "ok"; "refused: REASON"; otherwise the failure."""
    model, plan = case.model, case.plan
    params, state, batches = arguments(model)
    try:
        program = compiled(case).program(params, state, batches[0])
    except md.InternalError as error:
        return failure(error)
    except md.MeshdslError as error:
        return refusal(str(error))
    got, wanted = md.simulate(program, *leaves((params, state, batches[0]))), results(in_float64(model))
    wrong = [i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if apart(a, b, program.mesh.size)]
    counts[model.dtype] += 1
    counts["micro-batches"] += plan.parts > 1
    counts["512 micro-batches"] += plan.parts == 512
    counts["recomputed"] += plan.recompute != "none"
    counts["sends"] += bool(program.collectives)
    for knob, value in (("update", plan.update.get("mode")), ("overlap", plan.overlap.get("mode"))):
        counts[f"{knob} {value or 'none'}"] += 1
    if not wrong:
        return "ok"
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree_of(model))]
    return f"wrong: {', '.join(names[i] for i in wrong)}"


def tree_of(model: Model) -> Any:
    params, state, batches = arguments(model)
    return md.eval_shape(step_of(model), params, state, batches[0])


def with_parts(case: Case, most: int) -> Case:
    """Half of the plans have micro-batches, of any number up to `most` that divides the batch.

    An overlap plan, or `unroll`, has a copy of the step for each: at most four, because more take minutes.
    """
    rng = random.Random(repr(case))
    most = min(most, 4) if case.plan.overlap or case.plan.unroll else most
    parts = [n for n in range(2, most + 1) if case.model.batch % n == 0]
    parts = rng.choice(parts) if rng.random() < 0.5 else 1
    return dataclasses.replace(case, plan=dataclasses.replace(case.plan, parts=parts))


def cases(seed: int, steps: int, most: int) -> Iterator[Iterator[Case]]:
    """For each of `steps` models, plans to try until one is not refused."""
    number = seed * 1_000_003
    for _ in range(steps):
        model = draw_widths(number := number + 1)
        while not is_exact(model):
            model = draw_widths(number := number + 1)
        yield (with_parts(Case(model, draw_plan(model, k)), most) for k in range(TRIES))


def law(seed: int, steps: int, most: int = 512) -> tuple[Counter[str], Counter[str], list[str]]:
    """The counts of what ran, of verdicts, and the failures."""
    counts, verdicts, failures = Counter[str](), Counter[str](), list[str]()
    for tried in cases(seed, steps, most):
        for case in tried:
            verdict = judge(case, counts)
            refused = verdict.startswith("refused")
            verdicts[verdict if refused or verdict == "ok" else "wrong"] += 1
            if not refused and verdict != "ok":
                failures.append(f"{verdict}\n  {case!r}")
            if not refused:
                break
    return counts, verdicts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    counts, verdicts, failures = law(options.seed, options.steps)
    print(*failures, sep="\n", flush=True)
    summary = {"seed": options.seed, "wrong": len(failures), "verdicts": dict(verdicts.most_common())}
    print(json.dumps({**summary, "ran": dict(sorted(counts.items())), "seconds": round(time.monotonic() - start)}))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
