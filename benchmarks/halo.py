"""A spatially sharded convolution compared with a hand-written halo exchange: python -m benchmarks.halo

Prints JSON lines: the collectives of each candidate, whether the results agree, and the CPU-time ratio.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax
import numpy as np

import meshdsl as md
from benchmarks import hlo, ratio
from benchmarks.handwritten import halo as baseline


def compiled() -> tuple[md.Compiled, md.Tensor, md.Tensor]:
    """The same convolution written with meshdsl, and its arguments."""
    arrays = baseline.arrays()
    step = md.compile(
        lambda x, w: md.conv(x, w, window={"height": "kh", "width": "kw"}, out="batch height width feature"),
        "rows:2 cols:4",
        "batch:rows; height:cols",
    )
    return step, md.tensor(arrays["x"], "batch height width io"), md.tensor(arrays["w"], "kh kw io feature")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0: no timing")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    by_hand, at = baseline.handwritten()
    step, *tensors = compiled()
    ours = step.lower(*tensors).compile()
    placed = [jax.device_put(array, at[name]) for name, array in baseline.arrays().items()]
    programs = {"handwritten": (by_hand, by_hand), "meshdsl": (ours, lambda *xs: ours(*xs)[0])}
    results = {name: np.asarray(run(*placed)) for name, (_, run) in programs.items()}
    agree = bool(np.allclose(results["handwritten"], results["meshdsl"], rtol=1e-5, atol=1e-5))
    for name, (executable, _) in programs.items():
        line = {"figure": "program", "model": "halo", "candidate": name, **hlo.summary(executable), "agrees": agree}
        line["against_handwritten"] = hlo.difference(by_hand, executable)
        print(json.dumps(line), flush=True)
    if args.rounds:
        calls = {name: (lambda run=run: jax.block_until_ready(run(*placed))) for name, (_, run) in programs.items()}
        ratio.report(calls, args.rounds, model="halo", layout="height")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
