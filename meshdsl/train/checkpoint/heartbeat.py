"""The heartbeat of a writer: it tells writers on other machines that this process lives.

A writer names itself in a file and touches it every `BEAT_SECONDS`; one that has been silent for `SILENT_SECONDS` may
be replaced. `lock` does so in a directory, `owner` at a URL.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import short

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0


class Heartbeat:
    """A thread that calls `beat` every few seconds. What it raises is ignored: the next save reports it."""

    def __init__(self, beat: Callable[[], object]):
        self._beat, self._ended = beat, threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshdsl-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(Exception):
                self._beat()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def await_silence(
    record: dict[str, Any], silent: float, beat: Callable[[], object], take_over: bool, report: Callable[[str], object]
) -> str:
    """Why another writer may live, from the seconds of its silence so far; "" if it has been silent long enough.

    With `take_over`, wait until it is; `report` receives a line before, and `beat()` changes with each heartbeat.
    """
    if silent >= SILENT_SECONDS:
        return ""
    if not take_over:
        return f"its last heartbeat was {max(silent, 0):.0f} s ago"
    left, before = SILENT_SECONDS - max(silent, 0.0), beat()
    report(f"waiting {left:.0f} s for a heartbeat of {holder(record)}")
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SILENT_SECONDS / 20))
        if beat() != before:
            return "its heartbeat is recent, so it is running"
    return ""


def holder(record: dict[str, Any]) -> str:
    """The writer that a record names."""
    if not {"pid", "host"} <= record.keys():
        return "a writer that its lock file does not name"
    return f"process {short(record['pid'])} on {short(record['host'])}"


def own_record() -> dict[str, Any]:
    """The identity of a process. `boot` is the boot id of its kernel, which containers share; "" if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": boot}
