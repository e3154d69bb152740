"""Checks that losses and metrics of parts of the data are joined as their workload says.

A workload claims: its `md.train.Metric`s depend on the data through sums alone, and `mean_over` says so of scalars. A
false claim changes results without an error, so a run compares one batch with its parts before it trains. So does an
evaluation on several batches whose loss or metrics are plain scalars: their mean is right only for means of equally
many terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import meshdsl as md

from ..metric import MetricTerms, on_host

Arrays = Mapping[str, np.ndarray]
Evaluate = Callable[[Arrays], Mapping[str, MetricTerms]]  # the metrics of a batch, to be joined


def joined(metrics: Sequence[Mapping[str, MetricTerms]]) -> dict[str, MetricTerms]:
    """The metrics of several parts of the data as those of all of it."""
    first, *others = metrics
    total = dict(first)
    for more in others:
        total = {name: sums.joined(more[name]) for name, sums in total.items()}
    return total


def check_microbatches(
    workload: md.Workload, n: int, batch: Arrays, evaluate: Evaluate, tolerance: float = 1e-3
) -> None:
    """Raises `MeshdslError` if a batch and its parts give different losses or metrics.

    It compares two micro-batches together with each of them, so that a forward pass needs little more memory than
    training.
    """
    over, group = workload.parts_along()
    along = {name: _names(workload, name).index(over) for name in batch if over in _names(workload, name)}
    size = min(batch[name].shape[axis] for name, axis in along.items()) // group // n

    def evaluated(groups: np.ndarray) -> Mapping[str, MetricTerms]:
        rows = (groups[:, None] * group + np.arange(group)).reshape(-1)
        return evaluate({**batch, **{name: batch[name].take(rows, axis) for name, axis in along.items()}})

    both = np.arange(2 * size)
    whole, parts = evaluated(both), [evaluated(both[i::2]) for i in range(2)]
    for name, (one, other) in _different(whole, joined(parts), parts, tolerance).items():
        raise md.MeshdslError(
            f"{name!r} of {workload.name} is {one:.6g} for {2 * size * group} elements of {over!r}, and {other:.6g} "
            "for both halves, joined as the workload says: micro-batches would change what is trained\n"
            f"  {_way_out(whole[name].plain)}"
        )


def check_average(workload: md.Workload, batches: Sequence[Arrays], evaluate: Evaluate) -> list[str]:
    """The metrics that are plain scalars and could not be checked; their evaluation is a mean over batches.

    Raises `MeshdslError` for one whose mean over two batches is not that of all their rows: it changes when the
    batches swap half of their rows. A mean over the rows does not.
    """
    before = [evaluate(batches[0])]
    plain = [name for name, sums in before[0].items() if sums.plain]
    try:
        over, group = workload.parts_along() if plain else ("", 1)
    except md.ShapeError:
        return plain
    if not plain:
        return []
    before.append(evaluate(batches[1]))
    after = [evaluate(batch) for batch in _half_swapped(workload, batches, over, group)]
    a, b = joined(before), joined(after)
    mean = {name: a[name] for name in plain}
    tolerance = 1e-4 if all(before[0][name].terms[0].value.dtype.itemsize > 2 for name in plain) else 0.03
    for name, (one, other) in _different(mean, b, [*before, *after], tolerance).items():
        raise md.MeshdslError(
            f"{name!r} of {workload.name} is a plain scalar, and its mean over evaluation batches is not that of their "
            f"rows: two batches have the mean {one:.6g}, and {other:.6g} after they swap half of their rows\n"
            f"  {_way_out(plain=True)}\n"
            "  if a mean over batches is what you want, say so: md.train.mean(value, count=1)"
        )
    return [name for name in plain if not math.isfinite(on_host(a[name]) + on_host(b[name]))]


def _half_swapped(
    workload: md.Workload, batches: Sequence[Arrays], over: str, group: int
) -> list[dict[str, np.ndarray]]:
    """Two batches that have swapped every other group of their rows."""
    swapped: list[dict[str, np.ndarray]] = [dict(batch) for batch in batches]
    for name in batches[0]:
        if over in (names := _names(workload, name)):
            axis = names.index(over)
            odd = np.arange(batches[0][name].shape[axis]) // group % 2 == 1
            odd = odd.reshape([-1 if i == axis else 1 for i in range(len(names))])
            for i in range(2):
                swapped[i][name] = np.where(odd, batches[1 - i][name], batches[i][name])
    return swapped


def _way_out(plain: bool) -> str:
    if plain:
        return "return its sum and its count: md.train.mean(total, count); see also md.train.total and maximum"
    return "its terms depend on other elements of the batch; train on smaller batches, or without micro-batches"


def _names(workload: md.Workload, name: str) -> list[str]:
    spec = workload.inputs(workload.config).get(name)
    return [d.name for d in spec.dims] if spec is not None else []


def _different(
    a: Mapping[str, MetricTerms],
    b: Mapping[str, MetricTerms],
    parts: Sequence[Mapping[str, MetricTerms]],
    tolerance: float,
) -> dict[str, tuple[float, float]]:
    """The metrics with different values, beyond the rounding of numbers of their size."""
    found: dict[str, tuple[float, float]] = {}
    for name in a:
        one, other = on_host(a[name]), on_host(b[name])
        sizes = [abs(on_host(part[name])) for part in parts]
        if math.isfinite(one) and not abs(one - other) <= tolerance * max(abs(one), abs(other), *sizes):
            found[name] = one, other
    return found
