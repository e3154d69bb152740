"""The knobs of a plan: one record for each field, with its default, and how a value is printed, written and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import LayoutError, nearest
from ..layouts import Layout, Mesh
from ..overlap.values import NO_OVERLAP, Overlap
from ..targets import FUSED
from ..updates.groups import GroupSpec
from ..updates.weight_update import WeightUpdate

RECOMPUTATIONS = ("none", "collectives", "products", "full")  # of which a memory limit chooses
KERNELS = ("auto", "blockwise", *FUSED)  # of attention
REMATS = ("model", "none", "full", "offload", "products", "collectives")  # or "names:a,b"


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


def check_choice(name: str, value: Any, known: Collection[str]) -> str:
    if value not in known:
        raise LayoutError(f"{name}={value!r} is not available; there are: {', '.join(map(repr, known))}")
    return value


def check_unroll(unroll: Any) -> bool:
    if not isinstance(unroll, bool):
        raise LayoutError(f"unroll={unroll!r}: loops are unrolled (True) or not (False)")
    return unroll


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
    table = _table("layout", value, ("rules", "overrides"))
    overrides = _table("layout.overrides", table.get("overrides", {}))
    return Layout(_text("layout.rules", table.get("rules", "")), overrides={
        pattern: _text(f"layout.overrides.{pattern}", rules) for pattern, rules in overrides.items()
    })  # fmt: skip


def _write_mesh(mesh: Mesh) -> Any:
    if mesh.devices is not None:
        raise LayoutError("a plan with a mesh on devices cannot be written: devices exist only on this machine\n"
                          "  give the plan the mesh without devices, as text")  # fmt: skip
    return str(mesh) if mesh.device_order is None else {"axes": str(mesh), "device_order": list(mesh.device_order)}


def _read_mesh(value: Any) -> Mesh:
    if isinstance(value, str):
        return Mesh(value)
    table = _table("mesh", value, ("axes", "device_order"))
    order = table.get("device_order")
    if order is not None and not (isinstance(order, list) and all(type(i) is int for i in order)):
        raise LayoutError(f"mesh.device_order of a plan is a list of device ids; got {order!r}")
    return Mesh(_text("mesh.axes", table.get("axes", "")), device_order=order)


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


NUMBER = (int, float)
OPTIONS: dict[str, Any] = {  # the types of the fields of `WeightUpdate` and `Overlap` in a file
    "mode": str, "group": str, "bucket_bytes": NUMBER, "regather": bool,
    "dim": str, "parts": int, "memory_limit": NUMBER,
}  # fmt: skip
WORDS = {str: "a text", bool: "true or false", int: "an integer", NUMBER: "a number"}


def _read_options(name: str, kind: type[WeightUpdate] | type[Overlap]) -> Callable[[Any], Any]:
    known = tuple(f.name for f in fields(kind))

    def read(value: Any) -> Any:
        table: dict[str, Any] = {"mode": value} if isinstance(value, str) else _table(name, value, known)
        for key, each in table.items():
            if not isinstance(each, OPTIONS[key]) or (isinstance(each, bool) and OPTIONS[key] is not bool):
                raise LayoutError(f"{name}.{key} of a plan is {WORDS[OPTIONS[key]]}; got {each!r}")
        return kind(**table)

    return read


def _table(key: str, value: Any, known: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LayoutError(f"{key} of a plan is a text or a table; got {value!r}")
    for name in value:
        if known and name not in known:
            raise LayoutError(f"a plan has no key {f'{key}.{name}'!r}; {nearest(name, known)}")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise LayoutError(f"{key} of a plan is a text; got {value!r}")
    return value


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool | list) else repr(value)


KNOBS = (
    Knob("mesh", "mesh", Mesh(""), lambda x: str(x) or "one device", _write_mesh, _read_mesh),
    Knob("layout", "layout", Layout(""), _show_layout, _write_layout, _read_layout),
    Knob("weight_update", "weight update", WeightUpdate(), _show_options, _write_options,
         _read_options("weight_update", WeightUpdate)),
    Knob("remat", "remat", "model", lambda x: "as in the model" if x == "model" else x, str,
         lambda x: _text("remat", x), of_step=True),
    Knob("microbatches", "micro-batches", 1, str, int, lambda x: x, of_step=True),
    Knob("overlap", "overlap", NO_OVERLAP, _show_options, _write_options, _read_options("overlap", Overlap)),
    Knob("attention_kernel", "attention kernel", "auto", str, str, lambda x: _text("attention_kernel", x)),
    Knob("unroll", "unroll", False, lambda x: "loops" if x else "nothing", bool, lambda x: x),
    Knob("steps", "collectives in steps", "auto", str, str, lambda x: _text("steps", x)),
    Knob("machine", "machine", None, lambda x: x or "none", str, lambda x: _text("machine", x)),
    Knob("chunks", "chunks of a stage", 1, str, int, lambda x: x),
)  # fmt: skip
