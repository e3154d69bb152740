"""Signals before a run has started: there is nothing to save, and the exit code is the same as later.

`meshdsl train --checkpoints` exits with 75 on SIGTERM and 130 on SIGINT from its first line on, so that a scheduler
sends it again. `train.Stop` takes over once there is a run, and these handlers are back after it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


def handle_signals(arguments: Sequence[str]) -> None:
    """Install the handlers if the arguments are of a run that may save. A signal that is ignored stays ignored."""
    saves = any(word.startswith(("--checkpoints", "--config", "checkpoints.directory")) for word in arguments)
    if "train" not in arguments[:1] or not saves or threading.current_thread() is not threading.main_thread():
        return
    for number in _CODES:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit)


def default_sigterm() -> None:
    """Restore what SIGTERM does by default, for a run that turns out not to save."""
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(_CODES[signal.Signals(number)])
