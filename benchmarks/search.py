"""Time and number of candidates of layout searches: python -m benchmarks.search

Prints a JSON line for each search space: the train step of the language model on TPU v5e, with ten dims and two or
three mesh axes, and one or several axes per dim. Seconds are wall-clock and CPU time of the search, without tracing.
`best_after` is the time until the best layout was found. `gap` is 0 if every layout was costed.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import meshdsl as md
from meshdsl.models import transformer

SPACES = (  # a mesh, and whether a dim may be sharded over several axes
    ("x:2 y:4", False),
    ("x:2 y:4", True),
    ("x:4 y:4 z:4", False),
    ("x:4 y:4 z:4", True),
)


def measure(mesh: str, several: bool) -> dict[str, object]:
    """Times one search of at most five minutes, without neighbours of the best layout; tracing is done before."""
    workload = transformer.lm.replace(batch=64, queries_per_key=4)  # `group` is the tenth dim
    step, args = md.compile(workload.train_step(), mesh, donate=(0, 1)), workload.specs()
    step.graph(*args)
    seen: list[tuple[float, float]] = []

    def progress(now: Any) -> None:
        if now.best is not None:
            seen.append((now.seconds, now.best.seconds))

    wall, processor = time.perf_counter(), time.process_time()
    result = md.search(step, *args, mesh=mesh, several=several, time_limit=300, progress=progress)
    return {
        "figure": "search",
        "mesh": mesh,
        "several_axes": several,
        **vars(result.counts),
        "gap": result.gap,
        "best_after": round(next((t for t, seconds in seen if seconds == result.best.seconds), result.seconds), 2),
        "seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "best": str(result.best.layout),
        "best_step_seconds": result.best.seconds,
    }


def main() -> None:
    """Run the spaces with the given numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    spaces = {str(number): space for number, space in enumerate(SPACES)}
    parser.add_argument("numbers", nargs="*", metavar="SPACE", help=f"0 to {len(SPACES) - 1} (default: all)")
    numbers = parser.parse_args().numbers or list(spaces)
    if unknown := [number for number in numbers if number not in spaces]:
        parser.error(f"there is no space {', '.join(unknown)}")
    for number in numbers:
        print(json.dumps(measure(*spaces[number])), flush=True)


if __name__ == "__main__":
    main()
