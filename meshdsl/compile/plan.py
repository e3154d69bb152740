"""`Plan`: how a step runs on a mesh, as one value. A plan changes the cost of a step, never its results.

A plan has one knob per field (`knobs.KNOBS`). Knobs of the step (rematerialisation, micro-batches) are keyword
arguments that the step takes; the others are options of `md.compile`. Results under two plans are equal up to rounding,
because sums are added in another order.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

from ..cost.machine import PACKAGED, Machine, users_folders
from ..errors import LayoutError, nearest
from ..errors.files import write_text
from ..errors.markup import page_part
from ..errors.no_effect import NoEffectError, no_effect, reported, warn_dropped
from ..errors.values import load_toml, parse_toml, to_toml
from ..layouts import Layout, Mesh, MeshLike
from ..overlap.values import NO_OVERLAP, STEPS, Overlap
from ..updates.weight_update import WeightUpdate
from .knobs import KERNELS, KNOBS, ShortNames, both_named, check_choice, check_count, check_remat, short_named


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """The choices for one step: mesh, layout, weight update, rematerialisation, micro-batches and overlap.

    >>> import meshdsl as md
    >>> plan = md.Plan("rows:2 cols:4", "batch:rows d_ff:cols", weight_update="sharded", microbatches=4)
    >>> print(plan)
    mesh           rows:2 cols:4
    layout         batch:rows d_ff:cols
    weight update  sharded
    remat          as in the model
    micro-batches  4
    overlap        none
    >>> md.Plan.from_toml(plan.to_toml()) == plan
    True

    Mesh, layout, weight update and overlap are given as for `md.compile`; the order of the mesh's axes is that of the
    devices. `remat` is what a backward pass recomputes instead of storing it: "none"; "full", everything inside a
    layer; "offload", the same, with the layers' inputs in the host's memory; "products", all but the results of
    products; "collectives" or "names:a,b", as in `md.checkpoint`; "model", as the model says. `microbatches` is the
    number of parts into which a step divides the batch, computed one at a time. `interleave` is the number of blocks of
    layers of each pipeline stage. `attention_kernel` and `unroll` are those of `md.compile`, and so is
    `collective_steps`. The short names `chunks` and `steps` of these two are equal to them.
    `machine` decides what "auto" leaves open, and the order of an overlap plan.

    Raises `LayoutError` for values that are not available, and `md.NoEffectError` for a machine that decides nothing;
    with `strict=False` it is dropped with a `md.NoEffectWarning`.
    """

    mesh: Mesh
    layout: Layout
    weight_update: WeightUpdate
    remat: str
    microbatches: int
    overlap: Overlap
    attention_kernel: str
    unroll: bool
    steps: str
    machine: str | None
    chunks: int

    def __init__(
        self,
        mesh: MeshLike = "",
        layout: Layout | str | Mapping[str, Any] = "",
        weight_update: WeightUpdate | str = "replicated",
        remat: str = "model",
        microbatches: int = 1,
        overlap: Overlap | str = NO_OVERLAP,
        attention_kernel: str = "auto",
        unroll: bool = False,
        collective_steps: str = "auto",
        machine: str | None = None,
        interleave: int = 1,
        *,
        strict: bool = True,
        **short: Unpack[ShortNames],
    ):
        steps, chunks = both_named("md.Plan", short, collective_steps, interleave)
        values = {
            "mesh": Mesh(mesh),
            "layout": layout if isinstance(layout, Layout) else Layout(layout),
            "weight_update": weight_update if isinstance(weight_update, WeightUpdate) else WeightUpdate(weight_update),
            "remat": check_remat(remat),
            "microbatches": check_count("microbatches", microbatches, "a step divides its batch into 1 part or more"),
            "overlap": overlap if isinstance(overlap, Overlap) else Overlap(overlap),
            "attention_kernel": check_choice("attention_kernel", attention_kernel, KERNELS),
            "unroll": check_choice("unroll", unroll, (False, True)),
            "steps": check_choice("steps", steps, STEPS),
            "machine": machine,
            "chunks": check_count("chunks", chunks, "a pipeline stage has 1 block of layers or more"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if machine is not None and not self.may_use_machine:
            error = NoEffectError(
                f"machine={machine!r} decides nothing in this plan\n"
                "  it is for weight_update='auto', an overlap, and collectives in steps over several axes; leave it out"
            )
            no_effect(error, strict)
            object.__setattr__(self, "machine", None)

    @property
    def collective_steps(self) -> str:
        """`steps` under its longer name."""
        return self.steps

    @property
    def interleave(self) -> int:
        """`chunks` under its longer name."""
        return self.chunks

    @property
    def needs_machine(self) -> bool:
        """True if a machine decides part of the plan: the weight update "auto", an overlap, or steps "always"."""
        return self.weight_update.mode == "auto" or self.overlap.mode != "none" or self.steps == "always"

    @property
    def may_use_machine(self) -> bool:
        """True also if a machine, where one is given, decides which collectives are in steps."""
        several = sum(n > 1 for n in self.mesh.axes.values()) > 1
        return self.needs_machine or (self.steps == "auto" and several)

    def replace(self, **changes: Any) -> Plan:
        """A copy with other values of these knobs; the machine is dropped if nothing is left for it to decide."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | short_named(changes)
        machine = values.pop("machine")
        plan = Plan(**values)
        return Plan(**values, machine=machine) if "machine" in changes or plan.may_use_machine else plan

    def diff(self, other: Plan) -> PlanDiff:
        """The knobs in which another plan differs, and the dims that its layout maps to other axes.

        >>> import meshdsl as md
        >>> plan = md.Plan("rows:2 cols:4", "batch:rows d_ff:cols")
        >>> print(plan.diff(plan.replace(layout="batch:rows,cols", remat="full")))
        layout batch  rows -> rows,cols
        layout d_ff   cols -> whole
        remat         as in the model -> full
        """
        changes: list[tuple[str, str, str]] = []
        for knob in KNOBS:
            before, after = getattr(self, knob.name), getattr(other, knob.name)
            if before == after:
                continue
            if knob.name == "layout":
                changes += _moved(before, after)
            else:
                changes.append((knob.title, knob.show(before), knob.show(after)))
        return PlanDiff(tuple(changes))

    def to_dict(self) -> dict[str, Any]:
        """The knobs as plain values, for JSON and TOML; those at their default are left out, except mesh and layout."""
        required = ("mesh", "layout")
        shown = [k for k in KNOBS if k.name in required or getattr(self, k.name) != k.default]
        return {knob.name: knob.write(getattr(self, knob.name)) for knob in shown}

    def to_toml(self) -> str:
        """The plan as TOML, which `Plan.from_toml` reads."""
        return "".join(f"{name} = {to_toml(value)}\n" for name, value in self.to_dict().items())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a TOML file."""
        write_text(Path(path), self.to_toml())

    @staticmethod
    def from_toml(text: str, *, strict: bool = True) -> Plan:
        """The plan written as TOML; raises `LayoutError` for text that is not TOML, and for every unknown key.

        `strict` is that of `load`.
        """
        return Plan.from_dict(parse_toml(text, "the plan", LayoutError), strict=strict)

    @staticmethod
    def from_dict(values: Mapping[str, Any], *, strict: bool = True) -> Plan:
        """The plan of these values, as `to_dict` returns them; `strict` is that of `load`."""
        known, values = {knob.name: knob for knob in KNOBS}, short_named(values)
        unknown = [f"a plan has no key {name!r}; {nearest(name, known)}" for name in values if name not in known]
        if unknown:
            raise LayoutError("\n".join(unknown))
        if not values:
            raise LayoutError("a plan without a key chooses nothing\n  write at least mesh = 'rows:2' in it")
        with contextlib.nullcontext() if strict else reported(warn_dropped):
            return Plan(**{name: known[name].read(value) for name, value in values.items()})

    @staticmethod
    def load(path: str | os.PathLike[str], *, strict: bool = True) -> Plan:
        """Read a plan from a TOML file; raises `LayoutError`, with the file's name, if it is missing or malformed.

        With `strict=False`, what has no effect in the plan is dropped with a `md.NoEffectWarning`.
        """
        values = load_toml(Path(path), "the plan", LayoutError)
        try:
            return Plan.from_dict(values, strict=strict)
        except LayoutError as error:
            raise type(error)(f"the plan {os.fspath(path)} is wrong\n  {error.args[0]}") from None

    def __str__(self) -> str:
        rare = ("chunks", "attention_kernel", "unroll", "steps", "machine")
        shown = [k for k in KNOBS if k.name not in rare or getattr(self, k.name) != k.default]
        width = max(len(knob.title) for knob in shown)
        return "\n".join(f"{knob.title:<{width}}  {knob.show(getattr(self, knob.name))}" for knob in shown)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in list(self.to_dict().items())[2:])
        return f"Plan({str(self.mesh)!r}, {self.layout if self.layout.overrides else str(self.layout)!r}{options})"

    def _repr_html_(self) -> str:
        return page_part(f"plan for {self.mesh.size} devices", str(self), self.mesh.axes)


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans: knob, before, after. `print` shows one line for each."""

    changes: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        width = max((len(name) for name, _, _ in self.changes), default=0)
        lines = [f"{name:<{width}}  {before} -> {after}" for name, before, after in self.changes]
        return "\n".join(lines) or "the plans are equal"


def planned(f: Callable[..., Any], plan: Plan, strict: bool = True) -> Callable[..., Any]:
    """The function with the plan's knobs of the step filled in; a knob that it does not take has no effect.

    >>> import meshdsl as md
    >>> def step(x, *, microbatches=1):
    ...     return md.accumulate(md.sum, x, microbatches)
    >>> planned(step, md.Plan(microbatches=2))(md.tensor([1.0, 2.0], "batch"))
    tensor(float32[], 3.)
    """
    knobs = {k.name: value for k in KNOBS if k.of_step and (value := getattr(plan, k.name)) != k.default}
    if not knobs:
        return f
    name = getattr(f, "__name__", type(f).__name__)
    for knob in list(knobs):
        if not takes(f, knob):
            error = NoEffectError(
                f"the plan has {knob}={knobs[knob]!r}, and {name} does not take {knob}\n"
                f"  a step takes it as a keyword argument: def {name}(params, batch, *, {knob}=...)\n"
                f"  the step of a workload, workload.train_step(), takes it; or leave {knob} out of the plan"
            )
            no_effect(error, strict)
            del knobs[knob]

    @functools.wraps(f)
    def step(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs, **knobs)

    signature = inspect.signature(f)
    others = [p for p in signature.parameters.values() if p.name not in knobs]
    step.__signature__ = signature.replace(parameters=others)  # pyright: ignore[reportAttributeAccessIssue]
    return step


def machine_text(machine: Machine) -> str:
    """The name of a machine, or the path of its file if it is in no folder in which names are looked up; with modes."""
    by_name = Path(machine.file).parent in (PACKAGED, *users_folders())
    _, colon, modes = machine.name.partition(":")
    return machine.name if by_name or not machine.file else machine.file + colon + modes


def takes(f: Callable[..., Any], knob: str) -> bool:
    """True if a step takes this knob as a keyword argument."""
    try:
        parameter = inspect.signature(f).parameters.get(knob)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


def _moved(before: Layout, after: Layout) -> list[tuple[str, str, str]]:
    dims = dict.fromkeys([*before.rules, *after.rules])
    changed = [d for d in dims if before.axes(d) != after.axes(d)]
    rows = [(f"layout {d}", ",".join(before.axes(d)) or "whole", ",".join(after.axes(d)) or "whole") for d in changed]
    if before.overrides != after.overrides:
        rows.append(("overrides", str(before.overrides or "none"), str(after.overrides or "none")))
    return rows
