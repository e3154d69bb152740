"""The plans of each value of `overlap=`."""

from __future__ import annotations

from collections.abc import Callable

from ..errors.no_effect import NoEffectError
from .dw import dw
from .halves import halves
from .lancet import lancet
from .planner import Candidates, Planner
from .ring_products import ring
from .skew import skewed
from .ticks import ticks


def _list(planner: Planner) -> Candidates:
    """The whole step, without loops, in the order of a list schedule."""
    yield "list", planner.listed(planner.unrolled)


TRIED = (dw, lancet, _list, ring, skewed, halves)  # by "auto"


def _auto(planner: Planner) -> Candidates:
    """The candidates of all modes that have some; of a pipeline those that keep its ticks, unless options are about
    parts."""
    if planner.paired is not None:
        yield from ticks(planner)
        if planner.default_parts:
            return  # unrolled ticks keep what every micro-batch saves, and the program grows with their number
    for plan in TRIED:
        try:
            yield from plan(planner)
        except NoEffectError:
            if plan is halves and not planner.default_parts:
                raise


PLANS: dict[str, Callable[[Planner], Candidates]] = {
    "auto": _auto,
    "dw": dw,
    "lancet": lancet,
    "list": _list,
    "ring": ring,
    "skew": skewed,
    "halves": halves,
    "ticks": ticks,
}
