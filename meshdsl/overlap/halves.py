"""The step in parts along a dim, with a delay between them, so that each hides the communication of the others."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors.units import seconds
from .planner import Candidates, Planner
from .ranges import staggered
from .reasons import no_parts
from .split import Parts, split

NEARLY = 0.9  # cuts whose communication in parts is at least this fraction of the largest are compared by their time


def halves(planner: Planner) -> Candidates:
    """The cut with the most communication in parts, with the best of a few delays between them."""
    program, n = planner.unrolled, planner.request.parts
    cuts = [(dim, split(program, dim, n)) for dim in planner.cut_dims()]
    sending = [(dim, parts) for dim, parts in cuts if parts.bytes_sent]
    if not sending:
        slots = next(planner.slot_dims(), None)
        other = "another dim" if slots is None or slots in dict(cuts) else f"dim={slots!r}"
        reasons = [no_parts(program, dim, n, parts) for dim, parts in cuts] or ["the program reads no data"]
        raise planner.no_effect(
            f"no collective runs in {n} parts\n"
            + "".join(f"  {reason}\n" for reason in reasons)
            + f"  use {other}, or overlap='list', which cuts nothing"
        )
    dim, parts = _fastest(planner, sending)
    hold, plan = planner.delayed(parts.program, parts.part)
    yield f"{n} parts of {dim}, {seconds(hold)} apart", planner.target.order(plan)


def _fastest(planner: Planner, cuts: Sequence[tuple[str, Parts]]) -> tuple[str, Parts]:
    """The cut with the most communication in parts; of several with nearly as much, the fastest with a delay."""
    most = max(parts.bytes_sent for _, parts in cuts)
    cuts = [(dim, parts) for dim, parts in cuts if parts.bytes_sent >= NEARLY * most]
    if len(cuts) == 1:
        return cuts[0]
    return min(cuts, key=lambda cut: staggered(planner.tasks(cut[1].program), cut[1].part)[1])
