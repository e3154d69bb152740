"""SIGTERM and SIGINT end a run between two steps, with everything saved; a second one ends the process at once.

A handler only notes the signal. The run asks at the places where it can stop, and every process of it gets the same
answer: asking takes a maximum over all devices, which the caller may leave on its way while the next step runs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

import meshdsl as md

__all__ = ["Stop", "Stopped"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # where processes got both, the larger number counts: SIGTERM
_SAVED = {signal.SIGTERM: 75, signal.SIGINT: 130}  # 75 is EX_TEMPFAIL of sysexits.h: run it again


class Stopped(md.MeshdslError):
    """The run was asked to stop and has saved its state."""

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name}; step {step} is saved")
        self.step, self.exit_code = step, _SAVED[signal.Signals(number)]


class Stop:
    """Whether the run is to stop; listens while it is entered.

    >>> stop = Stop()
    >>> stop.now()
    0
    >>> stop.note(signal.SIGTERM)
    >>> stop.now() == signal.SIGTERM
    True

    Signals come to the main thread only: entered in another one, it listens to nothing, and `note` still works.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._before: dict[int, Any] = {}  # what signal.signal gave back
        self._largest: Callable[[md.Tensor], md.Tensor] | None = None

    def note(self, number: int) -> None:
        """A signal came: the first one is kept, the second ends the process with the code of one that it killed."""
        if self.noted:
            os._exit(128 + number)
        self.noted = int(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note(number)
        name = signal.Signals(number).name
        os.write(2, f"{name}: finishing this step, then saving; once more to exit at once\n".encode("ascii"))

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def ask(self) -> Callable[[], int]:
        """Start asking all processes; the result waits for the answer: the signal's number, or 0.

        Requires that every process asks at the same places.
        """
        if jax.process_count() == 1:
            return lambda: self.noted
        devices = jax.device_count()
        largest = self._largest = self._largest or md.compile(
            lambda noted: md.max(noted, "place"), md.Mesh(f"all:{devices}"), md.Layout("place:all")
        )
        here = md.tensor(np.full(devices, self.noted, np.int32), "place")  # each process gives its devices' part
        answer = largest(here)
        return lambda: int(answer.numpy())

    def now(self) -> int:
        """The answer of all processes, waited for."""
        return self.ask()()
