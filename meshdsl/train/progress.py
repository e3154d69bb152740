"""Progress on stderr: a bar that is redrawn on a terminal, otherwise a plain line every few seconds.

Without a terminal, the output has no carriage returns and no escape sequences. It never has colours.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_REDRAW_SECONDS = 0.1


class Progress:
    """Shows the number of finished steps out of `total`.

    >>> import io
    >>> stream = io.StringIO()
    >>> with Progress(4, "train", stream=stream, interval=0) as progress:
    ...     progress.update(1, "loss 5.1")
    >>> stream.getvalue()
    'train 1/4  loss 5.1\\n'
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        stream: TextIO | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.label, self.clock = total, label, clock
        self.stream = sys.stderr if stream is None else stream
        self.animated = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.interval = _REDRAW_SECONDS if self.animated else interval
        self.started = clock()
        self.shown_at = self.started if interval else -1.0  # plain lines start after one interval
        self.visible = False

    def update(self, done: int, text: str = "") -> None:
        """Report that `done` steps are done; printed if enough time has passed since the last print."""
        now = self.clock()
        if now - self.shown_at < self.interval and not (self.animated and done == self.total):
            return
        self.shown_at = now
        if not self.animated:
            print(f"{self.label} {done}/{self.total}  {text}".rstrip(), file=self.stream, flush=True)
            return
        left = self._left(done, now - self.started)
        tail = f" {done}/{self.total}  {text}{left}"
        columns = shutil.get_terminal_size().columns
        room = min(30, columns - len(self.label) - len(tail) - 4)
        bar = f" {_bar(done, self.total, room)}" if room >= 5 else ""
        self._draw(f"{self.label}{bar}{tail}"[: columns - 1])

    def note(self, text: str) -> None:
        """Show what is going on before the first step: at once."""
        if self.animated:
            self._draw(f"{self.label} {text}"[: shutil.get_terminal_size().columns - 1])
        else:
            print(f"{self.label} 0/{self.total}  {text}", file=self.stream, flush=True)

    def clear(self) -> None:
        """Erase the bar, so that other lines can be printed; the next update draws it again."""
        if self.visible:
            self._draw("")
        self.visible, self.shown_at = False, self.shown_at - (_REDRAW_SECONDS if self.animated else 0)

    def _draw(self, line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=self.stream, flush=True)
        self.visible = True

    def _left(self, done: int, seconds: float) -> str:
        if not 0 < done < self.total:
            return ""
        left = round(seconds / done * (self.total - done))
        return f"  {left // 60}:{left % 60:02} left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()


def _bar(done: int, total: int, width: int) -> str:
    """
    >>> _bar(1, 4, 8)
    '━━──────'
    """
    filled = width * done // max(total, 1)
    return "━" * filled + "─" * (width - filled)
