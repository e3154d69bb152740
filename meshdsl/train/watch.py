"""A step that takes too long is named: which process is late, what it does, and where the others wait for it.

The training loop notes where it is. With a factor, a step that takes so many times the median of the steps before is
overdue. The process that is behind the others is late; each of them waits in the first collective of the program whose
groups have devices of both. Compilation, saves and evaluations are not limited, but their batches after the first are.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import meshdsl as md

LEFT = 69  # the exit code of a process that ends because another one did, or is late; EX_UNAVAILABLE of sysexits.h
POLL = 0.25  # seconds
LEAST = 2.0  # seconds that a step may always take, whatever the median
TIMED, KEPT, FRAMES = 3, 100, 6  # steps before there is a limit, steps in the median, frames of a stack
Position = dict[str, Any]


class Watch:
    """Where a run is. `factor` is how many times the median step a step may take; None: any time."""

    def __init__(self, factor: float | None = None):
        self.factor = factor
        self.program: md.Program | None = None  # of a step
        self._at: Position = {"step": 0, "part": 0, "what": "starts", "limited": False}
        self._since = self._polled = time.monotonic()
        self._started: float | None = None  # when the data of this step were asked for, until something else begins
        self._seconds: deque[float] = deque(maxlen=KEPT)

    @property
    def step(self) -> int:
        """The step that is under way."""
        return self._at["step"]

    def reads(self, step: int) -> None:
        """The data of a step are read next."""
        self._move(step, 0, f"reads the data of step {step}", limited=True)
        self._started = self._since

    def starts(self, step: int) -> None:
        """The devices are given a step next, which takes long only the first time: it is compiled."""
        self._at = {**self._at, "part": 1, "what": f"has started step {step}"}

    def saves(self) -> None:
        """The step is saved next."""
        self._move(self.step, 2, f"saves step {self.step}", limited=False)

    def evaluates(self, number: int) -> None:
        """A held-out batch is read and evaluated next; the first, 0, also compiles."""
        what = f"evaluates held-out batch {number} in step {self.step}"
        self._move(self.step, 3 + number, what, limited=number > 0)

    def _move(self, step: int, part: int, what: str, *, limited: bool) -> None:
        now = time.monotonic()
        if self._started is not None:
            self._seconds.append(now - self._started)
        self._started = None
        self._since, self._at = now, {"step": step, "part": part, "what": what, "limited": limited}

    def position(self) -> Position:
        """Where this process is, as JSON values; `overdue` is the seconds of a step that takes too long."""
        now = time.monotonic()
        if now - self._polled > 4 * POLL:  # this process itself was stopped
            self._since += now - max(self._polled, self._since)
        self._polled = now
        seconds, at = now - self._since, self._at
        limit = self.limit()
        return {**at, "overdue": seconds if at["limited"] and limit is not None and seconds > limit else None}

    def limit(self) -> float | None:
        """The seconds that a step may take; None if there is no limit yet."""
        if self.factor is None or len(self._seconds) < TIMED:
            return None
        return max(self.factor * statistics.median(self._seconds), LEAST)

    def stack(self) -> list[str]:
        """The innermost lines that the main thread runs, and their functions."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = traceback.extract_stack(frame)[-FRAMES:] if frame else []
        return [f"{line.filename}:{line.lineno} in {line.name}: {line.line}" for line in lines]

    def report(self, positions: Mapping[int, Position]) -> str | None:
        """What is overdue, and why; None if what takes so long has no limit. `positions` may have a `stack`.

        A process that did not answer has `silent` in its position.
        """
        seconds, late = max((at["overdue"] or 0.0 for at in positions.values()), default=0.0), _late(positions)
        if not seconds or not all(positions[number]["limited"] for number in late):
            return None
        step, median = max(at["step"] for at in positions.values()), statistics.median(self._seconds or [0.0])
        lines = [f"step {step} takes {seconds:.1f} s, and the median is {median:.2g} s"]
        all_as_far = 1 < len(late) == len(positions)
        for number in late:
            lines += _described(number, positions[number], "" if all_as_far else "is late: it ")
        if all_as_far:
            lines.append(f"all are as far; their devices may wait for each other in {self.first_between(0, late[-1])}")
        for number in sorted(set(positions) - set(late)):
            where = self.first_between(number, late[0])
            lines.append(f"process {number} {positions[number]['what']}; it waits for process {late[0]} in {where}")
        return "\n  ".join(lines)

    def first_between(self, one: int, other: int) -> str:
        """The first collective of the program in which devices of both processes take part."""
        if self.program is not None:
            mesh = self.program.mesh
            owners = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.bind().devices)
            for record in self.program.collectives:
                if is_between(owners, tuple(mesh.axes), record.axes, one, other):
                    return str(record)
        return "the check for signals between steps"

    def collectives(self) -> dict[str, str]:
        """The collectives of the program and the hash of its equations, which all processes must share."""
        assert self.program is not None
        text = re.sub(r"  # .*|0x[0-9a-f]+", "", str(self.program))
        found = {f"collective {i}": f"{r.op} {r.cause}" for i, r in enumerate(self.program.collectives)}
        return {**found, "equations": hashlib.sha256(text.encode()).hexdigest()[:16]}

    @contextmanager
    def alone(self, say: Callable[[str], object]) -> Iterator[None]:
        """Ends a run of one process with exit code `LEFT` when a step is overdue."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL):
                at = self.position()
                if at["overdue"] and (text := self.report({0: {**at, "stack": self.stack()}})):
                    say(text)
                    sys.stdout.flush()
                    os._exit(LEFT)

        if self.factor is not None:
            threading.Thread(target=watch, name="meshdsl-watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def _late(positions: Mapping[int, Position]) -> list[int]:
    """The processes that did not answer, or else those that are behind all others."""
    silent = [number for number, at in positions.items() if at.get("silent")]
    places = {number: (at["step"], at["part"]) for number, at in positions.items()}
    return silent or [number for number, place in places.items() if place == min(places.values())]


def _described(number: int, at: Position, is_late: str) -> list[str]:
    last = "does not answer; last, it " if at.get("silent") else ""
    return [f"process {number} {is_late}{last}{at['what']}", *(f"  {line}" for line in at.get("stack", ()))]


def is_between(owners: Any, axes: Sequence[str], over: Sequence[str], one: int, other: int) -> bool:
    """True if a group of devices along the axes `over` has devices of both processes; `owners` has each device's.

    >>> owners = np.array([[0, 0], [1, 1]])
    >>> [is_between(owners, ("rows", "cols"), over, 0, 1) for over in (["rows"], ["cols"], ["rows", "cols"])]
    [True, False, True]
    """
    last = [axes.index(axis) for axis in over]
    size = int(np.prod([owners.shape[i] for i in last], dtype=int))
    groups = np.moveaxis(owners, last, range(owners.ndim - len(last), owners.ndim)).reshape(-1, size)
    return any(one in group and other in group for group in groups)
