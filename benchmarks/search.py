"""How long a search takes and what it looks at: python -m benchmarks.search

One JSON line for each space: the train step of the language model over ten dims and two or three mesh axes, one axis
for each dim or several, on a TPU v5e. Seconds are of the search after tracing, on the wall clock and of the processor;
`best_after` is when the best was found, and `gap` is 0 where every layout was costed or excluded by a bound.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import meshdsl as md
from models import transformer

SPACES = (  # a mesh, and whether a dim may take several axes
    ("x:2 y:4", False),
    ("x:2 y:4", True),
    ("x:4 y:4 z:4", False),
    ("x:4 y:4 z:4", True),
)


def measure(mesh: str, several: bool) -> dict[str, object]:
    """One search without single changes, to its end or for five minutes; what is traced is traced before."""
    workload = transformer.lm.replace(batch=64, queries_per_key=4)  # `group` is the tenth dim
    step, args = md.compile(workload.train_step(), mesh, donate=(0, 1)), workload.specs()
    step.graph(*args)
    seen: list[tuple[float, float]] = []

    def progress(now: Any) -> None:
        if now.best is not None:
            seen.append((now.seconds, now.best.seconds))

    wall, processor = time.perf_counter(), time.process_time()
    found = md.search(step, *args, mesh=mesh, several=several, time_limit=300, progress=progress)
    return {
        "figure": "search",
        "mesh": mesh,
        "several_axes": several,
        **vars(found.counts),
        "gap": found.gap,
        "best_after": round(next((t for t, seconds in seen if seconds == found.best.seconds), found.seconds), 2),
        "seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "best": str(found.best.layout),
        "best_step_seconds": found.best.seconds,
    }


def main() -> None:
    """The spaces whose numbers are given, from 0, or all."""
    for number in map(int, sys.argv[1:] or range(len(SPACES))):
        print(json.dumps(measure(*SPACES[number])), flush=True)


if __name__ == "__main__":
    main()
