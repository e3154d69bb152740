"""The errors of predicted step times on the packaged machines, without any fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .programs import Array, Programs, mean
from .runs import Run

__all__ = ["quality", "steps"]


def steps(runs: Sequence[Run], programs: Programs) -> Iterator[dict[str, object]]:
    """The JSON lines of this part: by source and machine, then by tp, by micro-batch and by regime."""
    times = [programs.time(run) for run in runs]
    seconds = np.array([time.seconds(run) for time, run in zip(times, runs, strict=True)])
    width = np.array([time.width for time in times])
    keys = {
        "": lambda run, time: "",
        "tp": lambda run, time: run.tp,
        "sequences on a device": lambda run, time: run.workload.config.batch * run.tp // run.devices,
        "regime": lambda run, time: time.regime,
    }
    for name, key in keys.items():
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, (run, time) in enumerate(zip(runs, times, strict=True)):
            groups[run.source, run.machine, key(run, time)].append(i)
        for (source, machine, value), at in sorted(groups.items(), key=str):
            labels: dict[str, object] = {"part": "steps", "by": name or "all", "source": source, "machine": machine}
            if name:
                labels[name] = value
            yield labels | quality([runs[i] for i in at], seconds[at], width[at], name == "")


def quality(runs: Sequence[Run], seconds: Array, width: Array, ranks: bool) -> dict[str, object]:
    """Errors, the share of rows in their interval, and how well layouts of one model are ranked."""
    from scipy.stats import kendalltau

    truth = np.array([run.seconds for run in runs])
    ratio = seconds / truth
    figures: dict[str, object] = {
        "rows": len(runs), "mean_error": mean(np.abs(ratio - 1)), "bias": mean(ratio - 1),
        "in_interval": mean(np.maximum(ratio, 1 / ratio) <= 1 + width),
    }  # fmt: skip
    if not ranks:
        return figures
    choices: dict[tuple[Any, ...], list[int]] = defaultdict(list)  # one model, number of devices and tokens a step
    for i, run in enumerate(runs):
        choices[run.size, run.devices, run.tokens].append(i)
    several = [at for at in choices.values() if len(at) > 1]
    if several:
        lost = [truth[min(at, key=lambda i: seconds[i])] / truth[at].min() - 1 for at in several]
        orders: list[Any] = [kendalltau(seconds[at], truth[at]).statistic for at in several]  # pyright: ignore
        figures |= {"choices": len(several), "tau_within_choices": mean(orders), "lost_by_best": mean(lost)}
    if len(runs) > 2:
        figures["tau"] = round(float(np.asarray(kendalltau(seconds, truth)[0])), 4)
    return figures
