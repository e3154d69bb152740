"""`md.search` finds the best layouts of a function for a machine, on given meshes or on all of a device count."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..compile import Compiled, compile
from ..compile.plan import Plan
from ..cost.machine import Machine
from ..cost.machine import machine as machine_named
from ..cost.network import has_slow_axis
from ..errors import LayoutError, ShapeError
from ..errors.no_effect import NoEffectError
from ..layouts import Layout, Mesh, MeshLike
from ..trace import spec
from .knobs import Turn, named, turns_of
from .plans import PlanSearch
from .result import SearchProgress, SearchResult
from .space import meshes
from .variants import Variants


def search(
    f: Any,
    *args: Any,
    mesh: MeshLike | Sequence[MeshLike] | None = None,
    devices: int | None = None,
    machine: Machine | str | os.PathLike[str] = "tpu-v5e",
    limit: float | None = None,
    layout: Layout | str | Mapping[str, Any] = "",
    dims: str | Collection[str] | None = None,
    knobs: str | Collection[str] | Mapping[str, Sequence[Any] | None] | None = None,
    start: Plan | None = None,
    plans: int | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
) -> SearchResult:
    """Find the fastest plans of a function that fit: layouts, meshes and, of a training step, all other knobs.

    If there are at most `plans`, every one is costed, and `gap` is 0. Otherwise all candidates are estimated at once,
    and up to `plans` of the most promising are costed as `Compiled.cost` does. Of those within 1 % of the fastest,
    `best` is the simplest. The same question has the same answer, however busy the computer is. By default, 30 plans
    are costed, and fewer of a step with more than 1,000 equations: 30,000 equations in all, but at least 4 plans.

    >>> import meshdsl as md
    >>> def two_layers(x, w, v):
    ...     return md.dot(md.relu(md.dot(x, w, "io")), v, "hidden")
    >>> args = md.spec("batch:8192 io:1024"), md.spec("io:1024 hidden:4096"), md.spec("hidden:4096 io:1024")
    >>> result = md.search(two_layers, *args, mesh="all:8", machine="tpu-v5e")
    >>> str(result.best.layout), result.gap
    ('batch:all', 0.0)

    `f` is a function with its arguments or their specs; or the result of `md.compile` (the search keeps its options,
    not its mesh and layout); or a workload, whose training step is searched. `mesh` is one mesh or several to choose
    from; `devices` means every mesh of that many devices with up to three axes, in every order. `machine` is a name, or
    the path of a machine file. The result also has the next best plans, `runners_up`.

    `knobs` names what is searched besides mesh and layout: "weight_update remat microbatches interleave overlap
    collective_steps", "all", or a mapping from knobs to the values to try. By default, these are all knobs of a
    workload, and none of a function; "collective_steps" only where a mesh has a slow axis on the machine. The
    result's `plan` has every choice; pass it to `md.compile(step, plan=plan)`.

    A search of plans costs the plan `start` first, so that the result is at least as good.

    Plans that need more than `limit` bytes per device (default: the machine's memory) are excluded. Every candidate
    keeps the rules and overrides of `layout`; `dims` names the other dims that may be sharded (default: all). A dim
    takes one axis or several, in mesh order.

    A search can be interrupted; the result is then the best so far. `gap` is the largest part of its time by which
    another plan can be faster: the distance to the work of the step without any communication, which no plan reaches;
    on a machine with a profile, whose measured times may be below any bound, it is 1 unless every plan is costed.
    `progress` is called after each plan that is costed.

    Raises `LayoutError` if no layout is legal or none fits, with the reasons and the smallest memory found; for unknown
    dims; and for a mesh larger than the machine.
    """
    compiled, args = _compiled(f, args)
    _check_limits(limit, plans)
    on = machine if isinstance(machine, Machine) else machine_named(machine)
    tried = _meshes(mesh, devices)
    turns = _turns(f, knobs, any(has_slow_axis(on.network, grid) for grid in tried), on)
    if not turns and start is not None:
        raise LayoutError(
            "start= is a plan, and this is a search for layouts: it turns no knobs\n"
            "  name the knobs to search (knobs='all'), or leave start out"
        )
    searched = [*(_explicit(knobs) if isinstance(knobs, Mapping) else ()), "steps"]  # "auto" is a choice of the search
    first = {turn.knob: turn.candidates(Plan())[0] for turn in turns if turn.knob in searched}
    variants = Variants(compiled, args, _title(f, compiled), on, on.hbm if limit is None else limit, first)
    run = PlanSearch(
        variants,
        tried,
        turns,
        layout if isinstance(layout, Layout) else Layout(layout),
        dims.replace(",", " ").split() if isinstance(dims, str) else dims,
        plans,
        progress,
        getattr(f, "layouts", {}),
        start,
        generated=devices is not None,
    )
    run.run()
    return run.result()


def _explicit(knobs: str | Collection[str] | Mapping[str, Any] | None) -> Collection[str]:
    """The knobs that a call names; of a mapping, those with values."""
    if knobs is None or knobs == "all":
        return ()
    names = named(knobs)
    return [name for name, values in names.items() if values] if isinstance(names, dict) else names


def _title(f: Any, compiled: Compiled) -> str:
    return getattr(f, "name", "") or getattr(compiled.function, "__name__", "").replace("<lambda>", "")


def _compiled(f: Any, args: tuple[Any, ...]) -> tuple[Compiled, tuple[Any, ...]]:
    if isinstance(f, Compiled):
        return f, args
    if hasattr(f, "train_step") and hasattr(f, "specs"):
        if args:
            raise ShapeError(
                f"the workload {f.name} brings its own arguments, and the call has {len(args)} more\n"
                "  leave them out, or search for one of its functions: md.search(workload.eval_step(), ...)"
            )
        takes = inspect.signature(f.loss(f.config)).parameters.values()
        key = (spec("key_word:2", "uint32"),) if len([p for p in takes if p.kind is not p.KEYWORD_ONLY]) > 2 else ()
        return compile(f.train_step(), "", donate=(0, 1)), (*f.specs(), *key)
    return compile(f, ""), args


def _meshes(mesh: MeshLike | Sequence[MeshLike] | None, devices: int | None) -> list[Mesh]:
    if (mesh is None) == (devices is None):
        raise LayoutError(
            f"a search takes a mesh or a number of devices, one of the two; got mesh={mesh!r} and devices={devices!r}"
        )
    if devices is not None:
        return meshes(devices)
    listed = list(mesh) if isinstance(mesh, Sequence) and not isinstance(mesh, str) else [mesh or ""]
    if not listed:
        raise LayoutError("a search needs at least one mesh; got an empty list")
    grids = [Mesh(each) for each in listed]  # plans are text, which has no devices
    return [Mesh(grid.axes, device_order=grid.device_order) for grid in grids]


def _check_limits(limit: float | None, plans: int | None) -> None:
    if plans is not None and (not isinstance(plans, int) or plans < 1):
        raise LayoutError(f"plans is the number of plans to cost, at least 1, or None; got {plans!r}")
    if limit is not None and not limit > 0:
        raise LayoutError(f"limit is a number above 0, or None; got {limit!r}")


def _turns(f: Any, knobs: Any, has_slow_axes: bool, on: Machine) -> tuple[Turn, ...]:
    """The knobs to search: those asked for, else all of a workload; `steps` only if a mesh has slow axes."""
    turns = turns_of(("all" if hasattr(f, "train_step") else ()) if knobs is None else knobs)
    if has_slow_axes:
        return turns
    if "steps" in _explicit(knobs):
        raise NoEffectError(
            f"knobs names steps, and no mesh has axes of several levels of {on.name!r}, one of them slow\n"
            "  leave steps out"
        )
    return tuple(turn for turn in turns if turn.knob != "steps")
