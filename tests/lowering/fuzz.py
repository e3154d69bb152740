"""The layout law at length: `python -m tests.lowering.fuzz --cases 20000 --programs 1000`.

A case is one operation with its gradient, of random sizes, under a random mesh and layout; a program is several
operations with their gradients. Inputs are small whole numbers; in a third of the cases they include NaN of either
sign, infinities and -0.0. Indices have any integer dtype; sizes may be 0. Padding is filled with NaN (for integers,
with the largest numbers). Results are compared bit for bit with the undivided function; operations that round are
compared in float64 to a relative error of 1e-10. Every case follows from the seed, which is printed. The last line is
JSON; the exit status is 1 on any mismatch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl import backend
from meshdsl.layouts import Layout, Mesh
from meshdsl.lowering.partition import partition
from tests.laws import Row, rows, run
from tests.lowering.maker import Draw
from tests.lowering.programs import FINE, MESHES, draw, draw_layout, judge, shrink, tensors
from tests.lowering.test_layout_law import drawn

LAYOUTS_PER_SIZE = 10
TRIES = 200


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference relative to the largest result; infinite if shapes, dtypes or NaNs differ."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return np.inf
    if np.array_equal(got, wanted, equal_nan=got.dtype.kind in "fc"):
        return 0.0
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), wanted.astype(wide)
    fine = np.isfinite(b)
    if not np.array_equal(np.where(fine, 0, a), np.where(fine, 0, b), equal_nan=True):
        return np.inf
    scale = float(np.max(np.abs(b), initial=1, where=fine))
    return float(np.max(np.abs(a - b), initial=0, where=fine)) / scale


def cases(row: Row, wanted: int, seed: int, counts: Counter[str]) -> Iterator[tuple[str, float]]:
    """Run `wanted` cases of one operation; yields a description and the error of each."""
    rng, numbers = Draw(f"{seed} {row.name}"), np.random.default_rng([seed, *row.name.encode()])
    dtype = "float64" if row.dtypes[0] == "float32" else ""  # whole numbers stay exact for longer
    made = 0
    while made < wanted:
        case = drawn(row, rng, numbers, dtype)
        with np.errstate(all="ignore"):
            right = run(case.graph, case.arrays, backend.NumPy)
        known = tensors(case.graph)
        for _ in range(min(LAYOUTS_PER_SIZE, wanted - made)):
            for _ in range(TRIES):
                mesh = rng.choice(MESHES)
                layout = Layout(dict(draw_layout(rng, mesh, known)))
                try:
                    program = partition(case.graph, Mesh(mesh), layout)
                    break
                except md.LayoutError:
                    counts["illegal"] += 1
            else:
                raise RuntimeError(f"no legal layout found for {case}")
            made += 1
            counts["split"] += any(v.sharding.split for v in program.ins)
            counts["padded"] += any(program.is_padded(v, d) for v in program.ins for d in v.dims)
            counts["empty"] += any(d.size == 0 for v in program.ins for d in v.dims)
            counts["odd"] += case.odd
            counts["sends"] += bool(program.collectives)
            got = md.simulate(program, *case.arrays)
            worst = max((error(a, b) for a, b in zip(got, right, strict=True)), default=0.0)
            yield f"{case} on {mesh} under {layout}", worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000, help="operations x meshes x layouts")
    parser.add_argument("--programs", type=int, default=1_000, help="random programs under legal layouts")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    options = parser.parse_args()
    seed = Draw().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    start, table = time.monotonic(), rows(composed=None)
    counts: Counter[str] = Counter()
    worst = 0.0
    for k, row in enumerate(table):
        share = options.cases * (k + 1) // len(table) - options.cases * k // len(table)
        for what, off in cases(row, share, seed, counts):
            counts["cases"] += 1
            counts["bitwise"] += off == 0
            worst = max(worst, off)
            if off > (0 if row.exact else 1e-10):
                counts["mismatches"] += 1
                print(f"mismatch, error {off:.1e}: {what}", flush=True)
    verdicts: Counter[str] = Counter()
    for one in range(seed, seed + 100 * options.programs):
        if verdicts["ok"] >= options.programs:
            break
        case = draw(one)
        verdict = judge(case)
        verdicts[verdict if verdict in FINE else "wrong"] += 1
        if verdict not in FINE:
            print(f"{verdict}\n  {case!r}\n  shrunk: {shrink(case)!r}", flush=True)
    summary = {
        "seed": seed,
        "operations": len(table),
        "cases": counts["cases"],
        "cases_bitwise": counts["bitwise"],
        "cases_with_a_split_input": counts["split"],
        "cases_with_padding": counts["padded"],
        "cases_with_an_empty_dim": counts["empty"],
        "cases_with_odd_values": counts["odd"],
        "cases_that_send": counts["sends"],
        "layouts_refused": counts["illegal"],
        "largest_relative_error": worst,
        "programs": verdicts["ok"],
        "programs_refused": verdicts["illegal"],
        "programs_too_large_to_be_exact": verdicts["large"],
        "mismatches": counts["mismatches"] + verdicts["wrong"],
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(summary))
    return 1 if summary["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
