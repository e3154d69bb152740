"""The picture of one sharded value: the tensor with its cuts, and the block that every device stores.

Between neighbouring devices stands how their blocks relate: `=` for copies, `+` (or max, min) for terms of a partial
sum, a cut in the colour of the axis for different blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...cost.report.svg import element, label_width, text
from ...errors.markup import axis_class, axis_number
from ...errors.units import show_bytes
from ...ir import Var
from ...lowering import Program
from ...lowering.permute import index_along
from .frames import Frame, Rect, hatched
from .grid import Grid, grid_of
from .picture import Picture, drawing

MARGIN = 18
LINE = 14  # height of a line of text below a block
SIGNS = {"sum": "+", "max": "max", "min": "min"}


def blocks(program: Program, var: Var) -> Picture:
    """The picture of one value of a program."""
    return _Blocks(program, var).picture()


@dataclass(frozen=True)
class _Blocks:
    program: Program
    var: Var

    @cached_property
    def grid(self) -> Grid:
        return grid_of(self.program.mesh)

    @property
    def title(self) -> str:
        name = f"{self.var.name}: " if self.var.name else ""
        return f"{name}{self.program.show(self.var)} on {self.program.mesh or 'one device'}"

    @cached_property
    def card(self) -> Frame:
        """The tensor as it is drawn on each device."""
        width = 76.0 if len(self.grid.drawn[2]) > 4 else 104.0
        return self._frame(width)

    @cached_property
    def whole(self) -> Frame:
        """The tensor as it is drawn on the left, large enough for the labels of its dims."""
        frame = self._frame(150.0 if len(self.grid.drawn[2]) > 4 else 190.0)
        tall, wide = (label_width([frame.label(dim)]) * 1.15 if dim else 0.0 for dim in frame.shown)
        return dataclasses.replace(frame, width=max(frame.width, wide), height=max(frame.height, tall))

    def _frame(self, width: float) -> Frame:
        rows, cols = Frame(self.program, self.var, 1, 1).shown
        if rows is None:
            return Frame(self.program, self.var, width, width * 0.28)
        ratio = rows.size / max(cols.size if cols else 1, 1)
        return Frame(self.program, self.var, width, width * min(max(ratio, 0.55), 0.95))

    @property
    def gap(self) -> float:
        """The distance between two devices."""
        return 22.0 if len(self.grid.drawn[2]) > 4 else 30.0

    @cached_property
    def pitch(self) -> float:
        """The distance of two devices in a row: room for the drawing, and for the longest text below it."""
        longest = max(label_width(self._lines(coords)) for *_, coords in self.grid.places())
        above = label_width([f"{self.grid.axes[2]} {col}" for col in self.grid.drawn[2]]) * 1.1
        return max(self.card.width + self.gap, longest + 10, above + 8)

    @cached_property
    def lines(self) -> int:
        """Lines of text below each block."""
        return max(len(self.var.sharding.split) + bool(self.var.sharding.partial), 1)

    def picture(self) -> Picture:
        """The whole drawing."""
        left = self.whole.draw(MARGIN + 24, 74.0)
        planes = [self._plane(i, plane) for i, plane in enumerate(self.grid.drawn[0])]
        width = self.plane_x(len(planes)) + MARGIN - 26 - self.gap + 8
        low = max(self.cards_y + len(self.grid.drawn[1]) * self.row_height - self.gap, 74 + self.whole.full_height)
        legend, right, height = self._legend(MARGIN, low + 18)
        heading = text(MARGIN, 30, self.title, cls="big")
        width = max(width, right + MARGIN, 2 * MARGIN + label_width([self.title]) * 1.3)
        return drawing(self.title, width, height + 12, heading, left, *planes, legend)

    # the devices

    @property
    def cards_x(self) -> float:
        return MARGIN + 24 + self.whole.width + 78

    @property
    def cards_y(self) -> float:
        return 88.0 + (18 if self.grid.axes[0] else 0)

    @property
    def row_height(self) -> float:
        return self.card.height + 16 + LINE * self.lines + self.gap

    def plane_x(self, plane: int) -> float:
        """The left edge of a plane."""
        return self.cards_x + plane * (len(self.grid.drawn[2]) * self.pitch + 26)

    def corner(self, plane: int, row: int, col: int) -> tuple[float, float]:
        """The upper left corner of a device's drawing."""
        return self.plane_x(plane) + col * self.pitch, self.cards_y + row * self.row_height

    def _plane(self, i: int, plane: int) -> str:
        _, down, right = self.grid.axes
        parts: list[str] = []
        words = "  ".join(f"{axis} {at}" for axis, at in self.grid.names(plane))
        if words:
            cls = f"strong {axis_class(self.program.mesh.axes, self.grid.axes[0][-1])}"
            parts.append(text(self.plane_x(i), 68, words, cls=cls))
        for k, col in enumerate(self.grid.drawn[2]):
            x, y = self.corner(i, 0, k)
            if right:
                cls = f"strong {axis_class(self.program.mesh.axes, right)}"
                parts.append(text(x + self.card.width / 2, y - 20, f"{right} {col}", anchor="middle", cls=cls))
        for j, row in enumerate(self.grid.drawn[1]):
            x, y = self.corner(i, j, 0)
            if down and i == 0:
                cls = f"strong {axis_class(self.program.mesh.axes, down)}"
                middle = y + self.card.height / 2
                label = text(0, 0, f"{down} {row}", anchor="middle", cls=cls)
                parts.append(element("g", label, transform=f"translate({x - 16:.1f} {middle:.1f}) rotate(-90)"))
        for at, j, k, coords in self.grid.places():
            if at == i:
                parts.append(self._device(i, j, k, coords))
        return "".join(parts)

    def _device(self, i: int, j: int, k: int, coords: dict[str, int]) -> str:
        x, y = self.corner(i, j, k)
        frame, sheet = self.card, self.card.sheet(coords)
        part = frame.part(x, y, coords)
        parts = [text(x, y - 5, f"device {self.grid.device(coords)}", cls="small soft")]
        parts += [frame.face(x, y, s).draw("empty outline") for s in reversed(range(frame.sheets)) if s != sheet]
        parts.append(frame.face(x, y, sheet).draw("empty outline"))
        tip = f"device {self.grid.device(coords)}: {', '.join(self._lines(coords))}"
        parts.append(part.draw(frame.tint(coords), tip))
        parts += [hatched(rect, "padding") for rect in frame.padding(x, y, part, sheet)]
        parts.append(part.draw("outline"))
        parts += [
            text(x, y + frame.height + LINE * (n + 1), line, cls="small mono")
            for n, line in enumerate(self._lines(coords))
        ]
        return "".join([*parts, *self._signs(x, y, j, k)])

    def _ranges(self, coords: dict[str, int]) -> Iterator[str]:
        """The range of elements of each sharded dim that the device stores."""
        for dim in self.var.dims:
            axes = self.var.sharding.axes(dim)
            if not axes:
                continue
            size = self.program.extents.local(dim, self.program.mesh.count(axes))
            start = index_along(self.program.mesh, coords, axes) * size
            end = min(start + size, dim.size)
            many = f"{start}…{end - 1}" if end - start > 1 else str(start)
            yield f"{dim.name} {many}" if end > start else f"{dim.name}: padding"

    def _lines(self, coords: dict[str, int]) -> list[str]:
        lines = list(self._ranges(coords))
        partial = self.var.sharding.partial
        if self.program.mesh.count(partial) > 1:
            term = index_along(self.program.mesh, coords, partial) + 1
            lines.append(f"term {term} of {self.program.mesh.count(partial)}")
        return lines or ["all of it"]

    def _signs(self, x: float, y: float, row: int, col: int) -> Iterator[str]:
        """The signs between this block and its neighbours to the right and below."""
        _, down, right = self.grid.axes
        width, height = self.card.width, self.card.height
        if right and col + 1 < len(self.grid.drawn[2]):
            gap = self.grid.drawn[2][col + 1] - self.grid.drawn[2][col] > 1
            yield self._sign(right, x + (width + self.pitch) / 2, y + height / 2, height, upright=True, gap=gap)
        if down and row + 1 < len(self.grid.drawn[1]):
            gap = self.grid.drawn[1][row + 1] - self.grid.drawn[1][row] > 1
            below = y + height + LINE * self.lines + 16
            yield self._sign(down, x + width / 2, below, width, upright=False, gap=gap)

    def _sign(self, axis: str, x: float, y: float, length: float, *, upright: bool, gap: bool) -> str:
        number = axis_number(self.program.mesh.axes, axis)
        sharding = self.var.sharding
        if gap or axis not in sharding.split_axes:
            word = SIGNS[sharding.kind] if axis in sharding.partial else "="
            word = "…" if gap else word
            cls = f"axis-{number} {'sign' if len(word) == 1 else 'strong small'}"
            return text(x, y + 6, word, anchor="middle", cls=cls)
        half = length / 2 if upright else length / 2.6
        ends = (
            {"x1": x, "x2": x, "y1": y - half, "y2": y + half}
            if upright
            else {"x1": x - half, "x2": x + half, "y1": y, "y2": y}
        )
        dots = {"stroke_width": 1.8, "stroke_dasharray": "1 5", "stroke_linecap": "round"}
        return element("line", **ends, **dots, cls=f"line-{number}")

    # below

    def _legend(self, x: float, y: float) -> tuple[str, float, float]:
        """The legend of the drawn signs, and the block that one device stores; returns its right and lower edge."""
        sharding, mesh = self.var.sharding, self.program.mesh
        entries: list[tuple[str, str, str]] = []  # class of the sign, sign, words
        for axis in (name for name, size in mesh.axes.items() if size > 1):
            cls = axis_class(mesh.axes, axis)
            if axis in sharding.split_axes:
                entries.append((cls, "┊", f"different blocks along {axis}"))
            elif axis in sharding.partial:
                kind = "terms of one sum" if sharding.kind == "sum" else f"parts of one {sharding.kind}"
                entries.append((cls, SIGNS[sharding.kind], f"{kind} along {axis}"))
            else:
                entries.append((cls, "=", f"copies along {axis}"))
        parts: list[str] = []
        at = x
        for cls, sign, words in entries:
            wide = label_width([sign]) * 1.2 + 8
            parts += [text(at, y, sign, cls=f"strong {cls}"), text(at + wide, y, words, cls="soft")]
            at += wide + label_width([words]) + 22
        if any(self.program.is_padded(self.var, dim) for dim in self.var.dims):
            parts += [hatched(Rect(at, y - 10, 16, 12)), text(at + 23, y, "padding", cls="soft")]
            at += 23 + label_width(["padding"])
        stored = f"{show_bytes(self.program.local_bytes(self.var))} on each device"
        if self.grid.count < mesh.size:
            stored += f"; {self.grid.count} of {mesh.size} devices are drawn"
        parts.append(text(x, y + 19, stored, cls="soft"))
        return "".join(parts), max(at, x + label_width([stored])), y + 19
