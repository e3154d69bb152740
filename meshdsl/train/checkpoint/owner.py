"""The owner of a URL: a file that names the run that writes there, with the time of its heartbeat.

An object store has no locks. So the file `owner` is written every few seconds, and another run is refused while its
time is recent, by clocks that agree to a few seconds. An owner on the same machine that has ended is replaced at once.
Two runs that start within the same moment may both begin; one of them fails at its next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import SaveError
from .heartbeat import SILENT_SECONDS, Heartbeat, await_silence, holder, own_record

OWNER = "owner"


class Owner:
    """Whether this run owns the URL `directory`, a path object of Orbax."""

    def __init__(self, directory: Any, take_over: bool, report: Callable[[str], object]):
        self.directory, self.take_over, self.report = directory, take_over, report
        self.path, self.token = directory / OWNER, secrets.token_hex(8)
        self._heartbeat: Heartbeat | None = None

    def claim(self) -> None:
        """Become the owner. Raises `SaveError` if another run is, or has become it; raises also what the store does."""
        record = self._read()
        if self._heartbeat is not None:
            if record.get("token") != self.token:
                raise SaveError(f"{self.directory} was taken over by {holder(record)}; this run no longer saves there")
            return
        silent = time.time() - record.get("time", 0.0)
        if (
            record
            and not _has_ended(record)
            and await_silence(record, silent, lambda: self._read() or record, self.take_over, self.report)
        ):
            raise SaveError(
                f"{self.directory} is being written by {holder(record)}, whose last heartbeat was {max(silent, 0):.0f} "
                "s ago; two writers would overwrite each other's steps\n  use another URL for this run, or, if that "
                f"process has certainly ended, --take-over (take_over=True), which waits {SILENT_SECONDS:.0f} s for a "
                "heartbeat"
            )
        self._write()
        self._heartbeat = Heartbeat(self._beat)

    def release(self) -> None:
        """Remove the file, if it is still this run's."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
            with contextlib.suppress(Exception):  # of the store's library; the file is soon old
                if self._read().get("token") == self.token:
                    self.path.unlink()

    def _beat(self) -> None:
        if self._read().get("token") == self.token:
            self._write()

    def _write(self) -> None:
        record = {**_here(), "token": self.token, "time": time.time()}
        self.path.write_text(json.dumps(record))

    def _read(self) -> dict[str, Any]:
        """The content of the file; empty if there is none, or if it stays damaged."""
        for _ in range(3):  # a file of a disk is empty while it is written
            with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
                if not self.path.exists():
                    return {}
                record = json.loads(self.path.read_text())
                if isinstance(record, dict) and isinstance(record.get("time"), int | float):
                    return record
            time.sleep(0.1)
        return {}


def _has_ended(record: dict[str, Any]) -> bool:
    """True if an owner was on this machine, among the processes that this one sees, and has ended."""
    here = _here()
    if not here["boot"] or any(record.get(name) != here[name] for name in ("boot", "namespace")):
        return False
    pid = record.get("pid")
    return isinstance(pid, int) and _process(pid)["began"] != record.get("began")


def _here() -> dict[str, Any]:
    return {**own_record(), **_process(os.getpid())}


def _process(pid: int) -> dict[str, str]:
    """The namespace of process ids, and when a process began, after the boot of its machine; empty if it has ended."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        return {"namespace": os.readlink("/proc/self/ns/pid"), "began": began}
    except OSError:
        return {"namespace": "", "began": ""}
