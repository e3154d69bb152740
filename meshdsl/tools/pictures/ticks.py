"""The ticks of a pipeline, drawn: a row for each stage, a column for each tick, F above B; bubbles are empty."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost.report.svg import element, text
from ...errors.units import percent
from ...passes.pipelines import Schedule

COLUMNS, ROWS = 36, 16  # that are drawn; of more, the middle ones are left out
LABEL, ROW, GAP = 66.0, 30.0, 3.0


def tick_table(schedule: Schedule, x: float, y: float, width: float) -> tuple[str, float]:
    """The drawing, `width` wide, and its height.

    >>> from meshdsl.passes.pipelines import Schedule
    >>> drawn, height = tick_table(Schedule(stages=2, microbatches=3), 20, 0, 900)
    >>> drawn.count('class="forward"'), drawn.count('class="backward"'), height
    (6, 6, 118.0)
    """
    ticks, stages = _drawn(schedule.ticks, COLUMNS), _drawn(schedule.stages, ROWS)
    cell = min((width - LABEL) / len(ticks), 46.0)
    parts = [text(x, y + 12, "tick", cls="small soft")]
    for column, tick in enumerate(ticks):
        label = "…" if tick is None else str(tick)
        parts.append(text(x + LABEL + (column + 0.5) * cell, y + 12, label, anchor="middle", cls="small soft"))
    top = y + 18
    for row, stage in enumerate(stages):
        at = top + row * (ROW + GAP)
        parts.append(text(x, at + 19, "…" if stage is None else f"stage {stage}", cls="small strong"))
        for column, tick in enumerate(ticks):
            if stage is not None and tick is not None:
                parts.append(_cell(schedule, stage, tick, x + LABEL + column * cell, at, cell - GAP))
    end = top + len(stages) * (ROW + GAP)
    idle, whole = schedule.stages - 1, schedule.microbatches * schedule.chunks + schedule.stages - 1
    words = f"F forward, B backward of a micro-batch; bubble {idle} of {whole} ticks, {percent(schedule.bubble, 1)}"
    return "".join([*parts, text(x + LABEL, end + 14, words, cls="small soft")]), end + 34 - y


def _drawn(count: int, most: int) -> Sequence[int | None]:
    """The numbers that are drawn; None where some are left out."""
    half = most // 2
    return range(count) if count <= most else [*range(half), None, *range(count - half + 1, count)]


def _cell(schedule: Schedule, stage: int, tick: int, x: float, y: float, width: float) -> str:
    parts: list[str] = []
    units = (("F", "forward", schedule.forward(stage, tick)), ("B", "backward", schedule.backward(stage, tick)))
    for i, (letter, cls, unit) in enumerate(units):
        top, height = y + i * ROW / 2, ROW / 2
        if unit is None:
            parts.append(element("rect", x=x, y=top, width=width, height=height, cls="empty"))
            continue
        tip = f"stage {stage}, tick {tick}: {cls} pass of {schedule.name('micro-batch ', unit)}"
        parts.append(element("rect", tip=tip, x=x, y=top, width=width, height=height, cls=cls))
        words = schedule.name(letter if width > 20 else "", unit)
        parts.append(text(x + width / 2, top + 11.5, words, anchor="middle", cls="small"))
    return "".join(parts)
