"""`md.search` looks for the best layouts of a function: over a mesh or every mesh of so many devices, on a machine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .compile import Compiled, compile
from .cost.machine import Machine
from .cost.machine import machine as machine_named
from .cost.search import Found, Problem
from .cost.search import search as hunt
from .cost.space import meshes
from .errors import LayoutError, MeshdslError, ShapeError, at, caller
from .layouts import Layout, Mesh
from .trace import spec, tree

__all__ = ["search"]


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
    several: bool = True,
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
    `axes` restrict the others. A dim takes one axis or `several`, in the order of the mesh or in all `orders`. The
    front of time and memory is of all layouts, whatever the limit; `tolerance` says how closely, as a fraction.

    Raises `LayoutError` where no layout is legal or none fits, with the reasons and the least memory found; for dims
    and axes that are not there; and for a mesh that the machine has no room for.
    """
    try:
        compiled, args = _compiled(f, args, donate)
        on = machine if isinstance(machine, Machine) else machine_named(machine)
        stages, _ = compiled._for(args)
        problem = Problem(
            stages.graph,
            lambda mesh, layout: compiled.under(mesh, layout).program(*args),
            donated=stages.donated,
            title=getattr(f, "name", "") or getattr(compiled.function, "__name__", "").replace("<lambda>", ""),
            results=_paths(stages),
            gather_limit=compiled.gather_limit,
            plain=compiled.update_mode == "replicated",
        )
        return hunt(
            problem,
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
