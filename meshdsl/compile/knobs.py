"""The knobs of a plan: one record for each field, with its default, and how a value is printed, written and read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from ..errors import LayoutError, UsageError
from ..errors.values import Table, read
from ..layouts import Layout, Mesh
from ..overlap.values import NO_OVERLAP, Overlap
from ..targets import FUSED
from ..updates.groups import GroupSpec
from ..updates.weight_update import WeightUpdate

RECOMPUTATIONS = ("none", "collectives", "products", "full")  # of which a memory limit chooses
KERNELS = ("auto", "blockwise", *FUSED)  # of attention
REMATS = ("model", "none", "full", "offload", "products", "collectives")  # or "names:a,b"


ALSO = {"collective_steps": "steps", "interleave": "chunks"}  # longer names of knobs, which say what they are


def short_named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the knobs under the names of their fields; raises `LayoutError` for a knob under both names."""
    for name, knob in ALSO.items():
        if name in options and knob in options:
            raise LayoutError(f"{name} and {knob} are one knob\n  give one of them")
    return {ALSO.get(name, name): value for name, value in options.items()}


class ShortNames(TypedDict, total=False):
    """The short names of two knobs, in calls that take both names."""

    steps: str
    chunks: int


def both_named(caller: str, short: ShortNames, collective_steps: str, interleave: int) -> tuple[str, int]:
    """The two knobs, given under either name; raises `LayoutError` for both names, and for other keywords."""
    given = {"collective_steps": collective_steps, "interleave": interleave}
    default = {"collective_steps": "auto", "interleave": 1}
    unknown = [name for name in short if name not in ShortNames.__annotations__]
    if unknown:
        raise LayoutError(f"{caller} has no option {unknown[0]!r}")
    found = short_named({**{name: x for name, x in given.items() if x != default[name]}, **short})
    return found.get("steps", "auto"), found.get("chunks", 1)


@dataclass(frozen=True)
class Knob:
    """One field of a plan: its default, and how a value is printed, written to TOML and read from it."""

    name: str
    title: str
    default: Any
    show: Callable[[Any], str]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    of_step: bool = False  # a keyword argument of the step; the others are options of `md.compile`


def check_remat(remat: Any) -> str:
    if remat not in REMATS and not (isinstance(remat, str) and remat.startswith("names:")):
        listing = ", ".join(map(repr, REMATS))
        raise LayoutError(f"remat={remat!r} is not available; there are: {listing}, and 'names:a,b'")
    return remat


def check_count(name: str, count: Any, why: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise LayoutError(f"{name}={count!r}: {why}")
    return count


def check_choice(name: str, value: Any, known: Collection[Any]) -> Any:
    if value not in known:
        raise LayoutError(f"{name}={value!r} is not available; there are: {', '.join(map(repr, known))}")
    return value


def _show_layout(layout: Layout) -> str:
    overrides = "".join(f"; {p}: {Layout(rules)}" for p, rules in layout.overrides.items())
    return (str(layout) or "(everything replicated)") + overrides


def _write_layout(layout: Layout) -> Any:
    if not layout.overrides:
        return str(layout)
    return {"rules": str(layout), "overrides": {p: str(Layout(rules)) for p, rules in layout.overrides.items()}}


def _read_layout(value: Any) -> Layout:
    if isinstance(value, str):
        return Layout(value)
    table = _read("layout", value, Table({"rules": str, "overrides": dict[str, str]}))
    return Layout(table.get("rules", ""), overrides=table.get("overrides", {}))


def _write_mesh(mesh: Mesh) -> Any:
    if mesh.devices is not None:
        raise LayoutError("a plan with a mesh on devices cannot be written: devices exist only on this machine\n"
                          "  give the plan the mesh without devices, as text")  # fmt: skip
    return str(mesh) if mesh.device_order is None else {"axes": str(mesh), "device_order": list(mesh.device_order)}


def _read_mesh(value: Any) -> Mesh:
    if isinstance(value, str):
        return Mesh(value)
    table = _read("mesh", value, Table({"axes": str, "device_order": list[int]}))
    return Mesh(table.get("axes", ""), device_order=table.get("device_order"))


def _group_text(group: GroupSpec) -> str:
    if isinstance(group, str):
        return group
    return " ".join(f"{axis}:{n}" for axis, n in group.items()) if isinstance(group, Mapping) else " ".join(group)


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, without `mode`."""
    return {f.name: x for f in fields(value) if f.name != "mode" and (x := getattr(value, f.name)) != f.default}


def _show_options(value: Any) -> str:
    options = _changed(value)
    if isinstance(value, WeightUpdate) and value.group is not None:
        options["group"] = _group_text(value.group)
    words = [name if x is True else f"{name.removesuffix('_bytes')} {x}" for name, x in options.items()]
    return ", ".join([value.mode, *words])


def _write_options(value: Any) -> Any:
    options = _changed(value)
    if "group" in options:
        options["group"] = _group_text(options["group"])
    return {"mode": value.mode, **options} if options else value.mode


def _read(name: str, value: Any, kind: Any) -> Any:
    try:
        return read(name, value, kind)
    except UsageError as error:
        raise LayoutError(f"{error.args[0]}") from None


def _reader(name: str, kind: Any) -> Callable[[Any], Any]:
    return lambda value: _read(name, value, kind)


def _read_options(kind: type[WeightUpdate] | type[Overlap]) -> Callable[[Any], Any]:
    kinds = {f.name: OPTIONS[f.name] for f in fields(kind)}
    name = "overlap" if kind is Overlap else "weight_update"

    def read_options(value: Any) -> Any:
        return kind(**_read(name, {"mode": value} if isinstance(value, str) else value, Table(kinds)))

    return read_options


OPTIONS: dict[str, Any] = {  # the types of the fields of `WeightUpdate` and `Overlap` in a file
    "mode": str, "group": str, "bucket_bytes": float, "regather": bool, "dim": str, "parts": int, "memory_limit": float,
}  # fmt: skip
KNOBS = (
    Knob("mesh", "mesh", Mesh(""), lambda x: str(x) or "one device", _write_mesh, _read_mesh),
    Knob("layout", "layout", Layout(""), _show_layout, _write_layout, _read_layout),
    Knob("weight_update", "weight update", WeightUpdate(), _show_options, _write_options,
         _read_options(WeightUpdate)),
    Knob("remat", "remat", "model", lambda x: "as in the model" if x == "model" else x, str,
         _reader("remat", str), of_step=True),
    Knob("microbatches", "micro-batches", 1, str, int, _reader("microbatches", int), of_step=True),
    Knob("overlap", "overlap", NO_OVERLAP, _show_options, _write_options, _read_options(Overlap)),
    Knob("attention_kernel", "attention kernel", "auto", str, str, _reader("attention_kernel", str)),
    Knob("unroll", "unroll", False, lambda x: "loops" if x else "nothing", bool, _reader("unroll", bool)),
    Knob("steps", "collectives in steps", "auto", str, str, _reader("steps", str)),
    Knob("machine", "machine", None, lambda x: x or "none", str, _reader("machine", str)),
    Knob("chunks", "chunks of a stage", 1, str, int, _reader("chunks", int)),
)  # fmt: skip
