"""The geometry of a tensor in a picture: two dims as height and width, a third as a pile of sheets.

`Frame` maps blocks of a sharded value to rectangles; padding and the cuts between blocks come from the same value.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost.report.svg import element, spans, text
from ...dims import Dim
from ...errors.markup import axis_class, axis_number
from ...ir import Var
from ...lowering import Program
from ...lowering.permute import index_along

SHEETS = 4  # sheets that are drawn of a third sharded dim
THIN = 3.0  # the least width and height of a block, in pixels
NOTE = 36  # characters that fit beside the devices
CUTS = 16  # cuts that are drawn along one dim; more would merge


@dataclass(frozen=True)
class Rect:
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float

    def extent(self, vertical: bool) -> tuple[float, float]:
        """The start and the length, downwards or to the right."""
        return (self.y, self.height) if vertical else (self.x, self.width)

    def cut(self, vertical: bool, start: float, length: float) -> Rect:
        """The part from `start`, downwards or to the right."""
        if vertical:
            return Rect(self.x, start, self.width, length)
        return Rect(start, self.y, length, self.height)

    def draw(self, cls: str, tip: str = "", rx: float = 0) -> str:
        """The rectangle as an SVG element."""
        return element("rect", tip=tip, x=self.x, y=self.y, width=self.width, height=self.height, rx=rx or "", cls=cls)


@dataclass(frozen=True)
class Frame:
    """One value of a program, drawn in a box of `width` x `height` pixels whose corner is given to each method."""

    program: Program
    var: Var
    width: float
    height: float

    @cached_property
    def shown(self) -> tuple[Dim | None, Dim | None]:
        """The dims drawn as height and width: sharded dims first, in storage order."""
        dims = sorted(self.var.dims, key=lambda dim: not self.var.sharding.axes(dim))[:2]
        dims.sort(key=self.var.dims.index)
        if not dims:
            return None, None
        return (None, dims[0]) if len(dims) == 1 else (dims[0], dims[1])

    @cached_property
    def deep(self) -> tuple[Dim, ...]:
        """The other sharded dims; their blocks are drawn as sheets, one behind the other."""
        return tuple(dim for dim in self.var.dims if self.var.sharding.axes(dim) and dim not in self.shown)

    @cached_property
    def sheets(self) -> int:
        """The number of sheets that are drawn."""
        return min(math.prod(self.blocks(dim) for dim in self.deep), SHEETS)

    def blocks(self, dim: Dim | None) -> int:
        """The number of blocks that a dim is divided into."""
        return 1 if dim is None else self.program.mesh.count(self.var.sharding.axes(dim))

    def block(self, dim: Dim | None, coords: Mapping[str, int]) -> int:
        """The index of the block of a dim that the device at these coordinates stores."""
        if dim is None:
            return 0
        return index_along(self.program.mesh, dict(coords), self.var.sharding.axes(dim))

    def sheet(self, coords: Mapping[str, int]) -> int:
        """The sheet of the device's block; the last one represents all further sheets."""
        index = 0
        for dim in self.deep:
            index = index * self.blocks(dim) + self.block(dim, coords)
        return min(index, self.sheets - 1)

    @property
    def step(self) -> float:
        """Distance between two sheets, in pixels."""
        return max(3.0, self.width / 18)

    def face(self, x: float, y: float, sheet: int = 0) -> Rect:
        """One sheet of the whole tensor."""
        depth = self.step * (self.sheets - 1)
        shift = self.step * sheet
        return Rect(x + shift, y + depth - shift, self.width - depth, self.height - depth)

    def part(self, x: float, y: float, coords: Mapping[str, int]) -> Rect:
        """The block of the device at these coordinates."""
        face = self.face(x, y, self.sheet(coords))
        rows, cols = (self.blocks(dim) for dim in self.shown)
        row, col = (self.block(dim, coords) for dim in self.shown)
        width, height = max(face.width / cols, THIN), max(face.height / rows, THIN)
        x0 = min(face.x + face.width * col / cols, face.x + face.width - width)
        y0 = min(face.y + face.height * row / rows, face.y + face.height - height)
        return Rect(x0, y0, width, height)

    def tint(self, coords: Mapping[str, int]) -> str:
        """The class of the block's colour; equal blocks have equal colours."""
        index = self.sheet(coords)
        for dim in self.shown:
            index = index * self.blocks(dim) + self.block(dim, coords)
        return f"block-{index % 8}"

    def padding(self, x: float, y: float, within: Rect, sheet: int = 0) -> Iterator[Rect]:
        """The parts of a rectangle on a sheet that store padding, at least 4 pixels wide."""
        face = self.face(x, y, sheet)
        for dim, vertical in zip(self.shown, (True, False), strict=True):
            if dim is None or not self.program.is_padded(self.var, dim):
                continue
            (low, length), (first, size) = face.extent(vertical), within.extent(vertical)
            stored = self.program.stored_shape(self.var)[self.var.dims.index(dim)]
            start = max(low + min(length * dim.size / stored, length - 4), first)
            if first + size - start > 0.01:
                yield within.cut(vertical, start, first + size - start)

    def cuts(self, x: float, y: float) -> Iterator[str]:
        """The cuts between blocks, in the colours of the axes; a major axis has the thicker line."""
        face = self.face(x, y)
        for dim, vertical in zip(self.shown, (True, False), strict=True):
            for share, axis, depth in self._shares(dim):
                x1, x2, y1, y2 = face.x, face.x + face.width, face.y, face.y + face.height
                if vertical:
                    y1 = y2 = face.y + face.height * share
                else:
                    x1 = x2 = face.x + face.width * share
                kind = f"line-{axis_number(self.program.mesh.axes, axis)}"
                yield element("line", x1=x1, x2=x2, y1=y1, y2=y2, stroke_width=1.2 if depth else 2.4, cls=kind)

    def _shares(self, dim: Dim | None) -> Iterator[tuple[float, str, int]]:
        """The cuts of a dim: position as a fraction, mesh axis, and the axis's depth (0: major); `CUTS` at most."""
        done = 1
        for depth, axis in enumerate(() if dim is None else self.var.sharding.axes(dim)):
            size = self.program.mesh.axes[axis]
            if done * size > CUTS and depth:
                return
            blocks = min(done * size, CUTS)
            yield from ((k / blocks, axis, depth) for k in range(1, blocks) if not depth or k % size)
            done *= size

    def label(self, dim: Dim) -> str:
        """A dim with its axes, such as `batch=64 /rows`, as text."""
        return " ".join([str(dim), *(f"/{axis}" for axis in self.var.sharding.axes(dim))])

    def draw(self, x: float, y: float) -> str:
        """The tensor as a whole: its dims with their axes, the cuts between blocks, and notes; its corner at x, y."""
        parts: list[str] = []
        for sheet in reversed(range(self.sheets)):
            parts.append(self.face(x, y, sheet).draw("empty outline"))
        face = self.face(x, y)
        if max(map(self.blocks, self.shown)) > CUTS:  # blocks of a pixel
            parts.append(face.draw("block-0"))
        else:
            parts += self._every_block(x, y)
        parts += [hatched(rect, "padding") for rect in self.padding(x, y, face)]
        parts += [*self.cuts(x, y), face.draw("outline")]
        rows, cols = self.shown
        if cols is not None:
            parts.append(self._dim_label(cols, face.x, y - 9))
        if rows is not None:
            turned = self._dim_label(rows, 0, 0, anchor="middle")
            place = f"translate({x - 10:.1f} {face.y + face.height / 2:.1f}) rotate(-90)"
            parts.append(element("g", turned, transform=place))
        for i, note in enumerate(self.notes):
            parts.append(text(face.x, y + self.height + 18 + 15 * i, note, cls="small soft"))
        return "".join(parts)

    @property
    def full_height(self) -> float:
        """The height of the drawing, with the notes below it."""
        return self.height + 15 * len(self.notes) + 8

    @property
    def notes(self) -> list[str]:
        """Notes about the parts that are not drawn, in lines of at most `NOTE` characters."""
        stored = zip(self.var.dims, self.program.stored_shape(self.var), strict=True)
        lines = ["behind one another: " + ", ".join(map(str, self.deep))] if self.deep else []
        lines += [f"{dim.name} is stored as {size}, padding at its end" for dim, size in stored if size != dim.size]
        lines += [
            f"{dim.name} has {self.blocks(dim)} blocks, not all of them drawn"
            for dim in self.var.dims
            if self.blocks(dim) > (SHEETS if dim in self.deep else CUTS)
        ]
        others = [str(dim) for dim in self.var.dims if dim not in self.shown and dim not in self.deep]
        lines += ["not drawn, not sharded: " + ", ".join(others)] if others else []
        return [part for line in lines for part in textwrap.wrap(line, NOTE)]

    def _every_block(self, x: float, y: float) -> Iterator[str]:
        mesh = self.program.mesh
        seen: set[tuple[float, float]] = set()
        places = [dict(zip(mesh.axes, at, strict=True)) for at in np.ndindex(*mesh.axes.values())]
        for coords in sorted(places, key=lambda coords: -self.sheet(coords)):
            part = self.part(x, y, coords)
            if (part.x, part.y) not in seen:
                seen.add((part.x, part.y))
                yield part.draw(self.tint(coords))

    def _dim_label(self, dim: Dim, x: float, y: float, anchor: str = "start") -> str:
        """`batch=64 /rows`, with the axes in their colours."""
        axes = self.program.mesh.axes
        own = [(f" /{axis}", f"strong {axis_class(axes, axis)}") for axis in self.var.sharding.axes(dim)]
        return spans(x, y, [(f"{dim.name}={dim.size}", "strong"), *own], anchor=anchor)


def hatched(rect: Rect, tip: str = "") -> str:
    """A rectangle filled with diagonal lines, as explicit lines: patterns would need ids, unique on a page."""
    lines: list[str] = []
    offset = 5.0
    while offset < rect.width + rect.height:
        right, low = min(offset, rect.width), min(offset, rect.height)
        start = f"M{rect.x + right:.1f} {rect.y + offset - right:.1f}"
        lines.append(f"{start}L{rect.x + offset - low:.1f} {rect.y + low:.1f}")
        offset += 5.0
    return rect.draw("empty", tip) + element("path", d="".join(lines), fill="none", cls="hatch")
