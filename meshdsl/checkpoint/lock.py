"""One writer to a directory: the file `lock` says which process it is.

The file appears with its content, exclusively (a hard link to a finished file). It is stale when it names this host
and either the machine was started anew since, or no process has the number, or one that began at another time; then
it is replaced. The lock of another host is never judged: it has to be removed by hand, or taken over explicitly.
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
    """Become the writer of a directory. Raises `SaveError`, naming the other one, when there is one already."""
    lock = directory / LOCK
    draft = directory / f"{LOCK}.{owner}"
    with _alone(directory):
        holder = _holder(lock)
        if holder is not None and holder.get("owner") == owner:  # an earlier try got this far
            return
        if holder is not None and not take_over and not _stale(holder):
            who = f"process {show(holder.get('pid'))} on {show(holder.get('host'))}"
            raise SaveError(
                f"{directory} is being written by {who}; two writers would destroy each other's steps\n"
                f"  give this run another directory, or, when that one is gone for sure, remove {lock}"
            )
        try:
            lock.unlink(missing_ok=True)
            draft.write_text(json.dumps({**_me(), "owner": owner}), encoding="ascii")
            os.link(draft, lock)
        finally:
            draft.unlink(missing_ok=True)


def release(directory: Path, owner: str) -> None:
    """Give the directory free, if the lock is still ours."""
    with contextlib.suppress(OSError), _alone(directory):
        if (_holder(directory / LOCK) or {}).get("owner") == owner:
            (directory / LOCK).unlink()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """No other process of this machine judges or replaces the lock meanwhile."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _holder(lock: Path) -> dict[str, Any] | None:
    """What the lock says; an empty record when it cannot be understood, None when there is none."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return {}
    try:
        said = json.loads(os.read(fd, _LONGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return said if isinstance(said, dict) else {}


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "began": _began(os.getpid())}


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
    return holder.get("began") != _began(pid)  # another process has the number now, or nobody waited for a dead one


def _boot() -> str:
    """An id of this start of the machine; empty where there is none to read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process began, in clock ticks since the machine did; `ended`, or empty where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *more = fields.rpartition(")")[2].split()
    return "ended" if state in "ZX" else more[18]
