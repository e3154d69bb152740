"""The picture of a program: a row for each collective, the devices that exchange, the sharding before and after.

Bands join the devices of a group, in the colour of the mesh axis; an arrow is a device that sends to one other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...cost.report.svg import element, spans, text
from ...errors.markup import axis_class, axis_number
from ...errors.tables import cut, line_of
from ...errors.units import show_bytes
from ...ir import Var
from ...lowering import Program
from ...lowering.asynchrony import Start
from .blocks import SIGNS
from .frames import Frame, hatched
from .grid import Grid, grid_of
from .picture import Picture, drawing
from .steps import Compute, Enter, Leave, SendMark, Step, folded, steps
from .ticks import tick_table

WIDTH = 920
MOST = 24  # collectives that a picture shows, unless asked for more
INDENT = 16
COLUMN = 74  # characters that fit into the column of text


def program_picture(program: Program, most: int) -> Picture:
    """The picture, with at most `most` collectives."""
    return _ProgramPicture(program, most).picture()


@dataclass(frozen=True)
class _ProgramPicture:
    program: Program
    most: int

    @cached_property
    def grid(self) -> Grid:
        return grid_of(self.program.mesh)

    @property
    def thumbs_x(self) -> float:
        return 44 + INDENT * self.deepest + self.grid.width + 14

    @cached_property
    def deepest(self) -> int:
        return max((step.depth for step in self.steps if isinstance(step, SendMark)), default=0)

    @property
    def text_x(self) -> float:
        return self.thumbs_x + 150

    @cached_property
    def steps(self) -> list[Step]:
        """The steps until the last collective that is drawn."""
        shown: list[Step] = []
        opened: list[int] = []  # depths
        count = 0
        for step in folded(list(steps(self.program))):
            count += isinstance(step, SendMark)
            if count > self.most:
                return [*shown, *map(Leave, reversed(opened))]
            opened += [step.depth] * isinstance(step, Enter)
            if isinstance(step, Leave):
                opened.pop()
            shown.append(step)
        return shown

    def picture(self) -> Picture:
        """The whole drawing."""
        records = self.program.collectives
        number = f"{len(records)} collective{'' if len(records) == 1 else 's'}"
        title = f"program on {self.program.mesh or 'one device'}: {number}"
        parts = [self._heading(number), self._mesh_label()]
        y = 86.0 + self.grid.height
        for schedule in self.program.schedules:
            drawn, height = tick_table(schedule, 44, y, WIDTH - 64)
            parts.append(drawn)
            y += height
        opened: list[float] = []
        for step in self.steps:
            drawn, height = self._step(step, y)
            parts.append(drawn)
            if isinstance(step, Enter):
                opened.append(y + 25)
            if isinstance(step, Leave):
                x = 37.0 + INDENT * step.depth
                top = opened.pop()
                d = f"M{x + 6:.1f} {top:.1f}H{x:.1f}V{y + 2:.1f}H{x + 6:.1f}"
                parts.append(element("path", d=d, fill="none", stroke_width=1.4, cls="outline"))
            y += height
        left_out = len(records) - sum(1 + len(step.alike) for step in self.steps if isinstance(step, SendMark))
        total = sum(record.count * record.wire_bytes for record in records)
        words = f"{number}; each device sends {show_bytes(total)} in one run"
        if left_out:
            words += f". {left_out} of them are not drawn"
        parts += [
            element("line", x1=20, x2=WIDTH - 20, y1=y + 8, y2=y + 8, cls="rule"),
            text(44, y + 28, words, cls="soft"),
            self._passes(y + 19),
        ]
        return drawing(title, WIDTH, y + 42, *parts)

    def _heading(self, number: str) -> str:
        axes = self.program.mesh.axes
        parts = [("program on ", ""), *((f"{axis}:{size} ", axis_class(axes, axis)) for axis, size in axes.items())]
        return spans(20, 30, parts, cls="big") + text(WIDTH - 20, 30, number, anchor="end", cls="soft")

    def _mesh_label(self) -> str:
        """The mesh once, with the names of its axes beside it, as the legend of the small ones."""
        x, y = 44 + INDENT * self.deepest, 62.0
        outer, down, right = self.grid.axes
        axes = self.program.mesh.axes
        parts = [self.grid.dots(x, y)]
        at = self.thumbs_x
        words = [(right, "→"), (down, "↓"), *((axis, "side by side") for axis in outer)]
        for axis, direction in words:
            if axis is not None:
                label = f"{axis} {direction}"
                parts.append(text(at, y + self.grid.height / 2 + 1, label, cls=f"strong {axis_class(axes, axis)}"))
                at += 7.2 * len(label) + 18
        if self.grid.count < self.program.mesh.size:
            words_ = f"{self.grid.count} of {self.program.mesh.size} devices are drawn"
            parts.append(text(at, y + self.grid.height / 2 + 1, words_, cls="soft"))
        return "".join(parts)

    def _passes(self, y: float) -> str:
        entries = [("forward", "forward, update"), ("backward", "backward")]
        return "".join(
            element("rect", x=WIDTH - 230 + 126 * i, y=y, width=5, height=12, cls=cls)
            + text(WIDTH - 220 + 126 * i, y + 10, words, cls="small soft")
            for i, (cls, words) in enumerate(entries)
        )

    # rows

    def _step(self, step: Step, y: float) -> tuple[str, float]:
        x = self.thumbs_x
        match step:
            case Compute():
                where = cut(step.words, 104)
                band = self._pass_mark(any(eqn.backward for eqn in step.eqns), y, 22)
                return band + text(x, y + 15, where, cls="small soft"), 22.0
            case Enter():
                return text(40 + INDENT * step.depth, y + 19, step.words, cls="strong"), 30.0
            case Leave():
                return "", 10.0
            case SendMark():
                height = max(62.0, self.grid.height + 20)
                return self._pass_mark(step.eqn.backward, y, height) + self._send(step, y + 5, height - 10), height

    def _pass_mark(self, backward: bool, y: float, height: float) -> str:
        return element("rect", x=20, y=y, width=5, height=height + 0.5, cls="backward" if backward else "forward")

    def _send(self, step: SendMark, y: float, height: float) -> str:
        record, before, after = step.record, step.eqn.ins[0], step.eqn.outs[0]
        middle = y + height / 2
        parts = [self.grid.bands(44 + INDENT * step.depth, middle - self.grid.height / 2, record)]
        parts.append(self._thumb(self.thumbs_x, middle, before))
        arrow = self.thumbs_x + 58
        path = f"M{arrow:.1f} {middle:.1f}h14m-5 -4l5 4l-5 4"
        parts.append(element("path", d=path, fill="none", stroke_width=1.5, cls="outline"))
        parts.append(self._thumb(self.thumbs_x + 80, middle, after))
        start = "start of " if isinstance(step.eqn.op, Start) else ""
        words = [(f"{start}{str(record.op).partition(' over ')[0]} over ", "strong")]
        for i, axis in enumerate(record.axes):
            words.append((("," if i else "") + axis, f"strong {axis_class(self.program.mesh.axes, axis)}"))
        x = self.text_x
        parts.append(spans(x, middle - 11, words))
        name = f"{before.name}  " if before.name else ""
        types = f"{name}{self.program.show(before)}"
        parts.append(text(x, middle + 5, cut(types, COLUMN - 32 if step.alike else COLUMN), cls="mono"))
        reason = str(record.cause)
        parts.append(text(x, middle + 21, cut(reason, 62), cls="small soft"))
        times = f" × {round(record.count, 4)}" if record.count != 1 else ""
        if step.alike:
            total = sum(each.bytes * each.count for each in (record, *step.alike))
            more = f"and {len(step.alike)} more like it: {show_bytes(total)} in all"
            parts.append(text(WIDTH - 20, middle + 5, more, anchor="end", cls="small strong"))
        parts.append(text(WIDTH - 20, middle - 11, f"{record.size}{times}", anchor="end", cls="strong"))
        parts.append(text(WIDTH - 20, middle + 21, line_of(step.eqn.where, 34), anchor="end", cls="small soft"))
        return "".join(parts)

    def _thumb(self, x: float, middle: float, var: Var) -> str:
        """A value in small: its cuts, and behind it the other terms of a partial sum."""
        flat = len(var.dims) < 2
        frame = Frame(self.program, var, 50.0, 16.0 if flat else 34.0)
        y = middle - frame.height / 2
        parts: list[str] = []
        if var.sharding.partial:
            number = axis_number(self.program.mesh.axes, var.sharding.partial[0])
            for shift in (6, 3):
                face = frame.face(x + shift, y - shift)
                parts.append(face.draw(f"empty band line-{number}"))
        face = frame.face(x, y)
        for sheet in reversed(range(1, frame.sheets)):
            parts.append(frame.face(x, y, sheet).draw("empty outline"))
        parts.append(face.draw("empty"))
        origin = dict.fromkeys(self.program.mesh.axes, 0)
        parts.append(frame.part(x, y, origin).draw("block-0"))
        parts += [hatched(rect, "padding") for rect in frame.padding(x, y, face)]
        parts += [*frame.cuts(x, y), face.draw("outline", self.program.show(var))]
        if var.sharding.partial:
            number = axis_number(self.program.mesh.axes, var.sharding.partial[0])
            sign = SIGNS[var.sharding.kind]
            cls = f"halo axis-{number} {'sign' if sign == '+' else 'small strong'}"
            parts.append(text(face.x + face.width / 2, face.y + face.height / 2 + 6, sign, anchor="middle", cls=cls))
        return "".join(parts)
