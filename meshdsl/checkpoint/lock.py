"""The lock of a checkpoint directory: the file `lock` identifies the only process that may write.

The lock is created atomically, as a hard link to a complete file. A lock of this host is stale, and is replaced, if the
machine has rebooted since, if its process no longer exists, or if the process id belongs to a process with another
start time. A lock of another host is never treated as stale: remove it by hand, or pass `take_over=True`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SaveError
from .strict import show

__all__ = ["LOCK", "acquire", "release"]

LOCK = "lock"
_LONGEST = 4096


def acquire(directory: Path, owner: str, *, take_over: bool = False) -> None:
    """Lock a directory for writing. Raises `SaveError` naming the other writer if it is locked."""
    lock = directory / LOCK
    draft = directory / f"{LOCK}.{owner}"
    with _flock(directory):
        holder = _read_lock(lock)
        if holder is not None and holder.get("owner") == owner:  # an earlier attempt created the lock
            return
        if holder is not None and not take_over and not _stale(holder):
            other = f"process {show(holder.get('pid'))} on {show(holder.get('host'))}"
            raise SaveError(
                f"{directory} is being written by {other}; two writers would overwrite each other's steps\n"
                f"  use another directory for this run, or, if that process has certainly ended, remove {lock}"
            )
        try:
            lock.unlink(missing_ok=True)
            draft.write_text(json.dumps({**_own_record(), "owner": owner}), encoding="ascii")
            os.link(draft, lock)
        finally:
            draft.unlink(missing_ok=True)


def release(directory: Path, owner: str) -> None:
    """Remove the lock if `owner` still holds it."""
    with contextlib.suppress(OSError), _flock(directory):
        if (_read_lock(directory / LOCK) or {}).get("owner") == owner:
            (directory / LOCK).unlink()


@contextlib.contextmanager
def _flock(directory: Path) -> Iterator[None]:
    """Prevents other processes of this machine from checking or replacing the lock meanwhile."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read_lock(lock: Path) -> dict[str, Any] | None:
    """The content of the lock file; empty if it cannot be parsed, None if there is no lock."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return {}
    try:
        record = json.loads(os.read(fd, _LONGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return record if isinstance(record, dict) else {}


def _own_record() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "began": _start_time(os.getpid())}


def _stale(holder: dict[str, Any]) -> bool:
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int) or isinstance(pid, bool) or pid < 1:
        return False
    if holder.get("boot") != _boot():
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return holder.get("began") != _start_time(pid)  # the process id was reused, or the process is a zombie


def _boot() -> str:
    """The boot id of this machine; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """A process's start time in clock ticks since boot; `ended` for a zombie, empty if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "ended" if state in "ZX" else fields[18]
