"""On SIGTERM or SIGINT a run saves and stops after the current step; a second signal ends the process at once.

The signal handler only records the signal. The run checks for it between steps. All processes get the same answer: a
check is a maximum over all devices, which can run while the next step runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

import meshdsl as md

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # if processes received both, the larger number is used: SIGTERM
_SAVED = {signal.SIGTERM: 75, signal.SIGINT: 130}  # 75 is EX_TEMPFAIL of sysexits.h: try again


class Stopped(md.MeshdslError):
    """The run received a signal and has saved its state."""

    is_mistake = False

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name}; step {step} is saved")
        self.step, self.exit_code = step, _SAVED[signal.Signals(number)]


class Stop:
    """Records signals and tells a run when to stop. As a context manager it installs the signal handlers.

    >>> stop = Stop()
    >>> stop.now()
    0
    >>> stop.note(signal.SIGTERM)
    >>> stop.now() == signal.SIGTERM
    True

    Python handles signals only in the main thread. In another thread no handlers are installed; `note` still works.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._previous: dict[int, Any] = {}  # the handlers that were replaced
        self._largest: Callable[[md.Tensor], md.Tensor] | None = None

    def note(self, number: int) -> None:
        """Record a signal. The first is stored; the second ends the process with exit code 128 + number."""
        if self.noted:
            os._exit(128 + number)
        self.noted = int(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note(number)
        text = f"{signal.Signals(number).name}: finishing this step, then saving; send it again to exit at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode("ascii"))

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def ask(self) -> Callable[[], int]:
        """Start a check over all processes; call the result to wait for the signal number, or 0.

        Every process must call it equally often.
        """
        if jax.process_count() == 1:
            return lambda: self.noted
        devices = jax.device_count()
        largest = self._largest = self._largest or md.compile(
            lambda noted: md.max(noted, "place"), md.Mesh(f"all:{devices}"), md.Layout("place:all")
        )
        local_signals = md.tensor(
            np.full(devices, self.noted, np.int32), "place"
        )  # each process fills the entries of its own devices
        answer = largest(local_signals)
        return lambda: int(answer.numpy())

    def now(self) -> int:
        """The signal number of all processes, or 0; waits for the check."""
        return self.ask()()
