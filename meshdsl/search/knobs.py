"""The values that a search tries for each knob of a plan, besides its mesh and its layout.

To search another knob, add its record to `compile.knobs.KNOBS` and its candidates here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compile.knobs import ALSO, KNOBS, short_named
from ..compile.plan import Plan
from ..errors import LayoutError, nearest
from ..overlap.values import Overlap
from ..updates.weight_update import WeightUpdate

UPDATES = WeightUpdate(), WeightUpdate("sharded"), WeightUpdate("sharded", regather=True)


@dataclass(frozen=True)
class Turn:
    """The candidates of one knob, for a plan whose other knobs are set; those that need least time first.

    `late` values are not estimated: they are costed for the two best plans.
    """

    knob: str
    candidates: Callable[[Plan], Sequence[Any]]
    late: Callable[[Any], bool] = lambda value: False


def _chunks(plan: Plan) -> tuple[int, ...]:
    """One block of layers a stage, or as many as an axis of stages, whose multiple the micro-batches are, can have."""
    most = max((n for n in plan.mesh.axes.values() if n > 1 and not plan.microbatches % n), default=1)
    return tuple(v for v in (1, 2, 4) if v <= most)


def _overlaps(plan: Plan) -> tuple[Overlap, ...]:
    """The plans that keep loops: those that unroll them take minutes to make for a deep model."""
    return tuple(map(Overlap, ("none", "skew", *("ticks",) * (plan.microbatches > 1))))


TURNS = (
    Turn("weight_update", lambda plan: UPDATES),
    Turn("remat", lambda plan: ("none", "collectives", "products", "full", "offload")),
    Turn("microbatches", lambda plan: tuple(2**i for i in range(8))),
    Turn("chunks", _chunks, late=lambda chunks: chunks > 1),
    Turn("overlap", _overlaps, late=lambda overlap: overlap.mode != "none"),
    Turn("steps", lambda plan: ("flat", "auto"), late=lambda steps: steps != "flat"),
)


def named(knobs: str | Collection[str] | Mapping[str, Any]) -> list[str] | dict[str, Any]:
    """The knobs under the names of their fields, with their values if they have some; "all" for every one."""
    if isinstance(knobs, Mapping):
        return short_named(knobs)
    if isinstance(knobs, str):
        knobs = [turn.knob for turn in TURNS] if knobs == "all" else knobs.replace(",", " ").split()
    return [ALSO.get(name, name) for name in knobs]


def turns_of(knobs: str | Collection[str] | Mapping[str, Sequence[Any] | None]) -> tuple[Turn, ...]:
    """The knobs to search, by name, or with their candidates (None: the usual ones); "all" for every one.

    >>> [turn.knob for turn in turns_of("remat microbatches")]
    ['remat', 'microbatches']
    >>> [overlap.mode for overlap in turns_of({"overlap": ["none", "list"]})[0].candidates(Plan())]
    ['none', 'list']

    Raises `LayoutError` for an unknown knob, and for a value that is not available.
    """
    known, knobs = {turn.knob: turn for turn in TURNS}, named(knobs)
    for name in knobs:
        if name not in known:
            raise LayoutError(f"a search turns no knob {name!r}; {nearest(name, known)}")
    if not isinstance(knobs, Mapping):
        return tuple(known[name] for name in knobs)
    return tuple(known[name] if values is None else _given(known[name], values) for name, values in knobs.items())


def _given(turn: Turn, values: Sequence[Any]) -> Turn:
    candidates = tuple(getattr(Plan(**{turn.knob: value}), turn.knob) for value in values)
    if not candidates:
        raise LayoutError(f"knobs: no value of {turn.knob} to try; leave it out, or give None for the usual values")
    return Turn(turn.knob, lambda plan: candidates, turn.late)


def title(knob: str) -> str:
    """The printed name of a knob."""
    return next(each.title for each in KNOBS if each.name == knob)
