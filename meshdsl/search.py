"""`md.search` looks for the best layouts of a function: over a mesh or every mesh of so many devices, on a machine.

`md.search_overrides` starts from one layout and looks for the best splits of single parameters beyond its rules.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .compile import Compiled, compile
from .cost.found import Found
from .cost.machine import Machine
from .cost.machine import machine as machine_named
from .cost.overridden import Overridden
from .cost.overrides import overrides
from .cost.search import Problem
from .cost.search import search as hunt
from .cost.space import meshes
from .errors import LayoutError, MeshdslError, ShapeError, at, caller
from .layouts import Layout, Mesh
from .trace import tree
from .values import spec

__all__ = ["search", "search_overrides"]


def search(
    f: Callable[..., Any],
    *args: Any,
    mesh: Mesh | str | Sequence[Mesh | str] | None = None,
    devices: int | None = None,
    machine: Machine | str | os.PathLike[str] = "tpu-v5e",
    limit: float | None = None,
    objective: str = "seconds",
    layout: Layout | str | Mapping[str, Any] = "",
    dims: str | Collection[str] | None = None,
    axes: str | Collection[str] | None = None,
    several: bool | None = None,
    orders: bool = False,
    most_axes: int = 3,
    runners_up: int = 4,
    front: bool = True,
    tolerance: float = 0.01,
    assignment: Mapping[str, str | Sequence[str]] | None = None,
    donate: Sequence[int] | int = (),
) -> Found:
    """The best layouts of a function, provably: each candidate's program is costed, or excluded by a bound.

    >>> import meshdsl as md
    >>> def two_layers(x, w, v):
    ...     return md.dot(md.relu(md.dot(x, w, "io")), v, "hidden")
    >>> args = md.spec("batch:8192 io:1024"), md.spec("io:1024 hidden:4096"), md.spec("hidden:4096 io:1024")
    >>> found = md.search(two_layers, *args, mesh="all:8", machine="tpu-v5e")
    >>> str(found.best.layout)
    'batch:all'

    `f` is a function with its arguments or their specs, what `md.compile` returned (its options are kept, its mesh and
    layout are not), or a workload, whose training step is laid out. `mesh` is one mesh or several to choose from;
    `devices` stands for every mesh of so many devices with up to `most_axes` axes, in every order.

    `objective` is "seconds", "peak_bytes" or "wire_bytes"; layouts that need more than `limit` bytes on a device, by
    default what the machine has, are out. `layout` holds rules and overrides that every candidate keeps; `dims` and
    `axes` restrict the others. A dim takes one axis or `several`, in the order of the mesh or in all `orders`. Where a
    mesh has too many layouts, and neither was said, dims take one axis each, and then those of no argument none:
    `left_out` says so. The front of time and memory is of all layouts, whatever the limit; `tolerance` says how
    closely, as a fraction.

    Raises `LayoutError` where no layout is legal or none fits, with the reasons and the least memory found; for dims
    and axes that are not there; and for a mesh that the machine has no room for.
    """
    try:
        compiled, args = _compiled(f, args, donate)
        on = machine if isinstance(machine, Machine) else machine_named(machine)
        return hunt(
            _problem(f, compiled, args),
            _meshes(mesh, devices, most_axes, on),
            on,
            objective=objective,
            limit=limit,
            fixed=layout if isinstance(layout, Layout) else Layout(layout),
            dims=_names(dims),
            axes=_names(axes),
            several=several,
            orders=orders,
            runners_up=runners_up,
            front=front,
            tolerance=tolerance,
            assignment=assignment,
        )
    except MeshdslError as error:
        raise at(error, caller()) from None


def search_overrides(
    f: Callable[..., Any],
    *args: Any,
    mesh: Mesh | str,
    layout: Layout | str | Mapping[str, Any] = "",
    machine: Machine | str | os.PathLike[str] = "tpu-v5e",
    limit: float | None = None,
    objective: str = "seconds",
    tensors: str | Collection[str] | None = None,
    choices: int | None = 3,
    assignment: Mapping[str, str | Sequence[str]] | None = None,
    donate: Sequence[int] | int = (),
) -> Overridden:
    """The best splits of single parameters beyond a layout's rules, as overrides of it.

    >>> import meshdsl as md
    >>> def step(params, x):
    ...     loss = lambda params: md.mean(md.square(md.dot(x, params["w"], "io")))
    ...     return {"w": params["w"] - 0.1 * md.grad(loss)(params)["w"]}
    >>> args = {"w": md.spec("io:4096 hidden:4096")}, md.spec("batch:512 io:4096")
    >>> found = md.search_overrides(step, *args, mesh="rows:4", layout="batch:rows", objective="peak_bytes")
    >>> found.best.peak_bytes < found.before.peak_bytes, found.best.layout
    (True, Layout('batch:rows', overrides={'w': {'io': ('rows',)}}))

    `f` and its arguments are as in `md.search`. A parameter is an input that comes back among the results, unless
    `tensors` gives patterns of the paths to take; what has the same path in another argument (optimizer state) follows
    it. It stays as `layout` has it, or one or two of its dims are split over axes that its rules leave free. Of the
    legal choices of each, those best alone by `objective` and by memory are kept, `choices` in all (None: every one).

    Exact is the choice over tables of measured costs: of every choice alone, and of every two choices whose parameters
    meet. That costs add up beyond pairs is an assumption: `error` says how far off it was, and what is reported is the
    cost of the real program, never worse than that of `layout` where that fits. With a `limit` of bytes on a device,
    by default what the machine has, `gap` is how far the choice may be from the best within it, over the tables. One
    program is partitioned and costed for each choice and for each pair of them: minutes for a model with many tensors.

    Raises `LayoutError` for an illegal layout, where nothing costed fits, and where there is no parameter.
    """
    try:
        compiled, args = _compiled(f, args, donate)
        return overrides(
            _problem(f, compiled, args),
            mesh if isinstance(mesh, Mesh) else Mesh(mesh),
            layout if isinstance(layout, Layout) else Layout(layout),
            machine if isinstance(machine, Machine) else machine_named(machine),
            objective=objective,
            limit=limit,
            tensors=_names(tensors),
            choices=choices,
            assignment=assignment,
        )
    except MeshdslError as error:
        raise at(error, caller()) from None


def _problem(f: Any, compiled: Compiled, args: Sequence[Any]) -> Problem:
    stages, _ = compiled._for(args)
    return Problem(
        stages.graph,
        lambda mesh, layout: compiled.under(mesh, layout).program(*args),
        donated=stages.donated,
        title=getattr(f, "name", "") or getattr(compiled.function, "__name__", "").replace("<lambda>", ""),
        results=_paths(stages),
        gather_limit=compiled.options.gather_limit,
        plain=compiled.options.weight_update.mode == "replicated",
    )


def _compiled(f: Any, args: tuple[Any, ...], donate: Sequence[int] | int) -> tuple[Compiled, tuple[Any, ...]]:
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
    return compile(f, "", donate=donate), args


def _paths(stages: Any) -> tuple[str, ...]:
    places = tree.tree_unflatten(stages.result, range(len(stages.graph.outs)))
    return tuple(tree.keystr(path, simple=True, separator="/") for path, _ in tree.tree_flatten_with_path(places)[0])


def _meshes(
    mesh: Mesh | str | Sequence[Mesh | str] | None, devices: int | None, most_axes: int, machine: Machine
) -> list[Mesh]:
    if (mesh is None) == (devices is None):
        raise LayoutError(
            f"a search takes a mesh or a number of devices, one of the two; got mesh={mesh!r} and devices={devices!r}"
        )
    if devices is not None:
        return meshes(devices, most_axes)
    given = [mesh] if isinstance(mesh, Mesh | str) else list(mesh or ())
    if not given:
        raise LayoutError("a search needs at least one mesh; got an empty list")
    return [each if isinstance(each, Mesh) else Mesh(each) for each in given]


def _names(given: str | Collection[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return tuple(given.replace(",", " ").split()) if isinstance(given, str) else tuple(given)
