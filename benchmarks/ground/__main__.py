"""See the package's text: python -m benchmarks.ground --data measurements.json --leave-out size --cache FILE"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from . import __doc__ as description
from . import collectives
from .programs import Programs
from .refit import GROUPS, leave_out
from .runs import runs
from .steps import steps


def main() -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the measurements, a JSON list of rows")
    parser.add_argument("--leave-out", choices=GROUPS, action="append", help="refit without each of these; may repeat")
    parser.add_argument("--collectives", action="store_true", help="print only the times of single collectives")
    parser.add_argument(
        "--points", action="store_true", help="print every run, measured and predicted, as it is costed"
    )
    parser.add_argument("--cache", type=Path, help="file that keeps traced programs")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = json.loads(args.data.read_text(encoding="utf-8"))
    if args.collectives:
        return _print(collectives.run(rows))
    programs, training = Programs(args.cache), runs(rows)
    for number, run in enumerate(training, 1):
        time = programs.time(run)
        if args.points:
            name = f"{run.size}, {run.devices} devices, tp {run.tp}, {run.tokens:.0f} tokens"
            point = {"name": name, "measured": run.seconds, "predicted": time.seconds(run)}
            _print([{"part": "points", "source": run.source, "machine": run.machine, **point}])
        if number % 100 == 0:
            programs.save()
            print(f"{number} of {len(training)} runs", file=sys.stderr, flush=True)
    programs.save()
    if args.points:
        return 0
    lines: Iterator[dict[str, object]] = (
        line for by in args.leave_out for line in leave_out(training, programs, by)
    ) if args.leave_out else steps(training, programs)  # fmt: skip
    return _print(lines)


def _print(lines: Iterable[dict[str, object]]) -> int:
    for line in lines:
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
