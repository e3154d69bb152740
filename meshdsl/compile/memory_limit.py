"""`memory_limit=` of `md.compile`: the rematerialisation of fewest operations whose predicted memory fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cost.ledger import ledger
from ..cost.memory import memory
from ..errors import LayoutError
from ..errors.no_effect import NoEffectError, no_effect
from ..errors.units import show_bytes
from .knobs import RECOMPUTATIONS
from .plan import Plan, planned, takes
from .signature import Stages


def check_limit(limit: float | None, plan: Plan, f: Callable[..., Any], strict: bool) -> float | None:
    """The memory limit; raises `LayoutError` if it is no number of bytes, or if something else sets what it decides."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise LayoutError(f"memory_limit is a number of bytes above 0, or None for no limit; got {limit!r}")
    if plan.remat != "model":
        raise LayoutError(f"memory_limit decides what is recomputed, and the plan has remat={plan.remat!r}; drop one")
    if takes(f, "remat"):
        return limit
    name = getattr(f, "__name__", "the function")
    error = NoEffectError(
        f"memory_limit={limit:g} has no effect: {name} does not take remat\n"
        "  a step takes it as a keyword argument: def step(params, batch, *, remat=...)"
    )
    no_effect(error, strict)
    return None


def fitting(
    plan: Plan, f: Callable[..., Any], stages: Callable[[Callable[..., Any], str], Stages], limit: float
) -> tuple[Plan, Stages]:
    """The plan and the stages of a step without rematerialisation, or with the cheapest one that fits the limit.

    `stages(step, remat)` makes the stages of one choice. Raises `LayoutError` with the memory of each if none fits.
    """
    peaks: dict[str, int] = {}
    found: list[tuple[float, int, Plan, Stages]] = []
    for remat in RECOMPUTATIONS:
        step = plan.replace(remat=remat)
        made = stages(planned(f, step), remat)
        donated = [made.program.ins[i] for i in made.donated]
        peaks[remat] = memory(made.program, donated=donated, machine=made.options.machine or "tpu-v5e").peak
        if peaks[remat] <= limit:
            found.append((ledger(made.program).flops, len(found), step, made))
            if remat == "none":  # loops recompute what is faster to recompute
                break
    if not found:
        listing = ", ".join(f"{remat} {show_bytes(peak)}" for remat, peak in peaks.items())
        raise LayoutError(
            f"the step does not fit memory_limit={show_bytes(limit)} with any rematerialisation: {listing}\n"
            "  shard more dims, use weight_update='sharded', or more microbatches"
        )
    _, _, chosen, made = min(found)
    return chosen, made
