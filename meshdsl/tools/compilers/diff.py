"""Compare the collectives of a program with those the compiler performs, by kind and mesh axes."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors.units import show_bytes
from ...layouts import Mesh
from ...lowering import Program
from .hlo import Performed
from .stablehlo import Groups, groups_of, stated


@dataclass(frozen=True)
class CompilerDiff:
    """The collectives of one kind over some mesh axes, as the program states them and as the compiler performs them."""

    kind: str
    axes: str  # mesh axes; or the number and sizes of groups that match no axes
    stated: int  # number that one device runs, loop trips counted
    stated_bytes: int  # total
    performed: int
    performed_bytes: int
    asynchronous: int  # number of performed ones that are asynchronous
    words: str  # the difference in words; empty if there is none

    def __str__(self) -> str:
        ours = f"{self.stated} of {show_bytes(self.stated_bytes)} in all"
        theirs = f"{self.performed} of {show_bytes(self.performed_bytes)}"
        overlap = f", {self.asynchronous} asynchronous" if self.asynchronous else ""
        return f"{self.kind} over {self.axes}: {ours}; compiled {theirs}{overlap}" + (
            f": {self.words}" if self.words else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(vars(self))


@dataclass
class _Sum:
    count: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)  # bytes; arrays sent as one count under their joined names
    asynchronous: int = 0

    @property
    def bytes(self) -> int:
        return self.dtypes.total()

    def add(self, count: int, size: int, dtype: str, asynchronous: bool = False) -> None:
        self.count += count
        self.dtypes[dtype] += count * size
        self.asynchronous += count * asynchronous


def changes(program: Program, compiled: Iterable[Performed]) -> tuple[CompilerDiff, ...]:
    """Every kind and axes found on either side, with the compiler's changes in words; not what crosses slices."""
    ours: dict[tuple[str, Groups], _Sum] = defaultdict(_Sum)
    theirs: dict[tuple[str, Groups], _Sum] = defaultdict(_Sum)
    for collective, count in stated(program).items():
        ours[collective.kind, _plain(collective.kind, collective.groups)].add(count, collective.bytes, collective.dtype)
    for performed in compiled:
        if performed.bytes and performed.groups:
            theirs[performed.kind, _plain(performed.kind, performed.groups)].add(
                performed.count, performed.bytes, performed.dtype, performed.asynchronous
            )
    names = _names(program.mesh)
    diffs: list[CompilerDiff] = []
    for kind, groups in sorted({*ours, *theirs}):
        a, b = ours[kind, groups], theirs[kind, groups]
        axes = names.get(groups) or f"{len(groups)} groups of {len(groups[0])}"
        if kind == "permute":
            axes = f"{len(groups)} pairs"
        reduced = {"reduce_scatter": "all_reduce", "all_reduce": "reduce_scatter"}.get(kind, "")
        counterpart = theirs[reduced, groups].count - ours[reduced, groups].count
        words = _words(kind, a, b, counterpart)
        diffs.append(CompilerDiff(kind, axes, a.count, a.bytes, b.count, b.bytes, b.asynchronous, words))
    return tuple(diffs)


def _words(kind: str, ours: _Sum, theirs: _Sum, counterpart: int) -> str:
    notes = [_of_counts(kind, ours, theirs, counterpart)]
    if ours.count and theirs.count and set(ours.dtypes) != set(theirs.dtypes):
        notes.append(f"sent as {', '.join(sorted(theirs.dtypes))}, stated {', '.join(sorted(ours.dtypes))}")
    elif theirs.count == ours.count and theirs.bytes != ours.bytes:
        notes.append(f"sent as {_each(theirs)}, stated {_each(ours)}")
    return "; ".join(filter(None, notes))


def _of_counts(kind: str, ours: _Sum, theirs: _Sum, counterpart: int) -> str:
    """Why the compiler sends more or fewer collectives of a kind than the program states."""
    fewer = ours.count - theirs.count
    if kind == "reduce_scatter" and fewer > 0 and counterpart > 0:
        return f"{fewer} became an all_reduce and a slice, which sends twice as much"
    if kind == "all_reduce" and fewer < 0 and counterpart < 0:
        return f"{-fewer} were a reduce_scatter in the program"
    if kind == "all_reduce" and fewer > 0 and counterpart > 0:
        return f"{fewer} became a reduce_scatter"
    if fewer > 0:
        same = ours.bytes == theirs.bytes
        return "several are sent as one" if same else "fewer are sent: merged, or found not to be needed"
    if fewer < 0:
        return "the compiler added some" if ours.count else "the compiler made these"
    return ""


def _each(total: _Sum) -> str:
    return " and ".join(f"{show_bytes(n)} of {dtype}" for dtype, n in sorted(total.dtypes.items()))


def _plain(kind: str, groups: Sequence[Sequence[int]]) -> Groups:
    """Sort the members of groups, whose order matters only for a permute."""
    if kind == "permute":
        return tuple(sorted(tuple(pair) for pair in groups))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _names(mesh: Mesh) -> dict[Groups, str]:
    """Groups along every set of mesh axes -> the axes."""
    names: dict[Groups, str] = {}
    for axes in (axes for n in range(len(mesh.axes)) for axes in itertools.combinations(mesh.axes, n + 1)):
        names.setdefault(_plain("", groups_of(axes, mesh)), ",".join(axes))
    return names
