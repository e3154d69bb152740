"""Dims that are stored with padding where something is computed: what that costs, and what else could be split.

A dim of fewer elements than devices along its axes leaves some of them idle. Operations compute on padding as on
elements, so a device's FLOPs are more than its share by the factor stored / size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ..dims import Dim
from ..errors.units import number, percent
from ..ir import Eqn
from ..layouts.sharding import Axes
from ..lowering import Program
from .ledger import Ledger

SHOWN = 0.01  # of the FLOPs of a device


@dataclass(frozen=True)
class PaddedDim:
    """A dim that equal blocks over some axes do not fill, and the FLOPs of one device in one step on its padding."""

    dim: Dim
    axes: Axes
    devices: int  # along the axes
    stored: int  # elements, on all of them
    flops: float
    others: tuple[str, ...]  # whole dims of the same operations that these axes divide, by the FLOPs of those

    @property
    def idle(self) -> int:
        """Devices along the axes that store nothing but padding."""
        return self.devices - -(-self.dim.size // max(1, self.stored // self.devices))

    def text(self, flops: float) -> str:
        """One line: sizes, what it costs of a device's FLOPs, and a way out."""
        axes = ",".join(self.axes)
        idle = f", {self.idle} of {self.devices} devices idle" if self.idle else ""
        lost = f"{percent(self.flops, flops)} of the FLOPs ({number(self.flops, 'FLOP')})"
        fewer = f"at most {self.dim.size} devices" if self.idle else f"a number of devices that divides {self.dim.size}"
        more = f", or split {' or '.join(self.others[:3])}" if self.others else ""
        return f"{self.dim} is stored as {self.stored} over {axes}{idle}: {lost}; use {fewer}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sizes = {"size": self.dim.size, "stored": self.stored, "devices": self.devices, "idle": self.idle}
        return {"dim": self.dim.name, "axes": list(self.axes), **sizes, "flops": self.flops, "split": list(self.others)}


def padded_dims(ledger: Ledger) -> tuple[PaddedDim, ...]:
    """The dims that are padded where FLOPs are spent, those with most of them first.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.einsum(x, w, out="batch heads"), "cols:8", "heads:cols")
    >>> report = step.cost(md.spec("batch:64 io:32"), md.spec("io:32 heads:6"), machine="tpu-v4")
    >>> print(report.padding[0].text(report.flops).partition("; ")[0])
    heads=6 is stored as 8 over cols, 2 of 8 devices idle: 25 % of the FLOPs (1.02 kFLOP)
    """
    lost = defaultdict[tuple[Dim, Axes], float](float)
    others = defaultdict[tuple[Dim, Axes], dict[str, float]](dict)
    for line in ledger.lines:
        share = line.flops * line.trips
        split, whole = _dims(ledger.program, line.eqn) if share else ({}, [])
        for (dim, axes), ratio in split.items():
            lost[dim, axes] += share * (1 - 1 / ratio)
            n = ledger.program.mesh.count(axes)
            for d in whole:
                if d.size and d.size % n == 0 and "__" not in d.name:
                    others[dim, axes][d.name] = others[dim, axes].get(d.name, 0.0) + share
            share /= ratio
    return tuple(
        PaddedDim(
            dim,
            axes,
            n := ledger.program.mesh.count(axes),
            n * ledger.program.extents.local(dim, n),
            flops,
            tuple(sorted(others[dim, axes], key=lambda name: -others[dim, axes][name])),
        )
        for (dim, axes), flops in sorted(lost.items(), key=lambda item: -item[1])
    )


def _dims(program: Program, eqn: Eqn) -> tuple[dict[tuple[Dim, Axes], float], list[Dim]]:
    """The padded dims of an equation with stored / size, and its dims that are nowhere split."""
    values = [v for v in (*eqn.ins, *eqn.outs) if v.dims]
    cuts = {(d, v.sharding.axes(d)) for v in values for d in v.dims}
    split = {d.name for d, axes in cuts if axes}
    padded = {
        (d, axes): program.mesh.count(axes) * program.extents.local(d, program.mesh.count(axes)) / d.size
        for d, axes in sorted(cuts, key=str)
        if axes and d.size and program.extents.is_padded(d, program.mesh.count(axes))
    }
    return padded, [d for d, axes in sorted(cuts, key=str) if not axes and d.name not in split]
