"""Cost estimates compared with published measurements: python -m benchmarks.ground_truth --data measurements.json

The file is a list of rows {group, model_config, hardware, parallelism, measured}. Prints JSON lines by part:

collectives  times of nccl-tests and similar tools, at 16 MB and more
iteration    GPT training on one node of A100 (group vtrain_single), fitted on some (d_model, layers), tested on others
training     MaxText on v5e and LLM Foundry on A100 and H100, with one efficiency per chip

`--cache FILE` stores traced programs for the next run with the same sources.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax

from benchmarks.ground import collectives, iteration, training
from benchmarks.ground.programs import Programs

PARTS = ("collectives", "iteration", "training")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the measurements, a JSON list of rows")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--cache", type=Path, help="file that stores traced programs")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = json.loads(args.data.read_text(encoding="utf-8"))
    programs = Programs(args.cache)
    for part in args.part or PARTS:
        if part == "collectives":
            lines = collectives.run(rows)
        elif part == "iteration":
            lines = iteration.run(rows, programs)
        else:
            lines = training.run(rows, programs)
        for line in lines:
            print(json.dumps(line), flush=True)
        programs.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
