"""A sharded tensor as a whole: its dims with their axes, the cuts between blocks, and what is not drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from ...cost.report.svg import element, spans, text
from ...dims import Dim
from ...errors.markup import axis_class
from .frames import CUTS, SHEETS, Frame, hatched
from .grid import Grid

NOTE = 36  # characters that fit beside the devices


def dim_label(frame: Frame, dim: Dim) -> str:
    """A dim with its axes, such as `batch=64 /rows`, as text."""
    return " ".join([str(dim), *(f"/{axis}" for axis in frame.var.sharding.axes(dim))])


@dataclass(frozen=True)
class WholeTensor:
    """The left half of a picture of blocks."""

    frame: Frame

    def draw(self, x: float, y: float) -> str:
        """The drawing, its corner at x, y."""
        frame = self.frame
        parts: list[str] = []
        for sheet in reversed(range(frame.sheets)):
            parts.append(frame.face(x, y, sheet).draw("empty outline"))
        face = frame.face(x, y)
        if max(map(frame.blocks, frame.shown)) > CUTS:  # blocks of a pixel
            parts.append(face.draw("block-0"))
        else:
            parts += self._every_block(x, y)
        parts += [hatched(rect, "padding") for rect in frame.padding(x, y, face)]
        parts += [*frame.cuts(x, y), face.draw("outline")]
        rows, cols = frame.shown
        if cols is not None:
            parts.append(self._dim_label(cols, face.x, y - 9))
        if rows is not None:
            turned = self._dim_label(rows, 0, 0, anchor="middle")
            place = f"translate({x - 10:.1f} {face.y + face.height / 2:.1f}) rotate(-90)"
            parts.append(element("g", turned, transform=place))
        for i, note in enumerate(self.notes):
            parts.append(text(face.x, y + frame.height + 18 + 15 * i, note, cls="small soft"))
        return "".join(parts)

    @property
    def height(self) -> float:
        """The height of the drawing, with the notes below it."""
        return self.frame.height + 15 * len(self.notes) + 8

    @property
    def notes(self) -> list[str]:
        """Notes about the parts that are not drawn, in lines of at most `NOTE` characters."""
        frame = self.frame
        stored = zip(frame.var.dims, frame.program.stored_shape(frame.var), strict=True)
        lines = ["behind one another: " + ", ".join(map(str, frame.deep))] if frame.deep else []
        lines += [f"{dim.name} is stored as {size}, padding at its end" for dim, size in stored if size != dim.size]
        lines += [
            f"{dim.name} has {frame.blocks(dim)} blocks, not all of them drawn"
            for dim in frame.var.dims
            if frame.blocks(dim) > (SHEETS if dim in frame.deep else CUTS)
        ]
        others = [str(dim) for dim in frame.var.dims if dim not in frame.shown and dim not in frame.deep]
        lines += ["not drawn, not sharded: " + ", ".join(others)] if others else []
        return [part for line in lines for part in textwrap.wrap(line, NOTE)]

    def _every_block(self, x: float, y: float) -> Iterator[str]:
        frame, mesh = self.frame, self.frame.program.mesh
        seen: set[tuple[float, float]] = set()
        places = Grid(mesh, mesh.size, mesh.size, mesh.size).places()
        for *_, coords in sorted(places, key=lambda place: -frame.sheet(place[3])):
            part = frame.part(x, y, coords)
            if (part.x, part.y) not in seen:
                seen.add((part.x, part.y))
                yield part.draw(frame.tint(coords))

    def _dim_label(self, dim: Dim, x: float, y: float, anchor: str = "start") -> str:
        """`batch=64 /rows`, with the axes in their colours."""
        axes = self.frame.program.mesh.axes
        own = [(f" /{axis}", f"strong {axis_class(axes, axis)}") for axis in self.frame.var.sharding.axes(dim)]
        return spans(x, y, [(f"{dim.name}={dim.size}", "strong"), *own], anchor=anchor)
