"""The lock of a checkpoint directory: one process at a time may write.

The file `lock` names the writer, which holds the kernel's advisory lock (flock) on it until it ends, however it ends.
Any process that sees the same kernel is therefore refused exactly as long as the writer lives, whatever their
containers say about hosts and process ids. File systems shared by several machines may keep these locks apart, so the
writer also updates the file's time every few seconds (its heartbeat), and checks before each publication that the file
is still its own. A lock of another machine is replaced only after its heartbeat has stopped for `SILENT_SECONDS`: by
itself if the host name is the same (the machine has rebooted), otherwise with `take_over=True`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...errors import SaveError
from .files import closing
from .heartbeat import Heartbeat, await_silence, holder, own_record

LOCK = "lock"
_LONGEST = 4096
_NO_KERNEL_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_open_files: weakref.WeakSet[Held] = weakref.WeakSet()


class Held:
    """A lock that this process holds; see `acquire`."""

    def __init__(self, path: Path, fd: int):
        self.path, self._fd = path, fd
        self._heartbeat = Heartbeat(lambda: os.utime(self._fd))
        _open_files.add(self)

    def check(self) -> None:
        """Raises `SaveError` if another writer has replaced the lock."""
        if not _same_file(self._fd, self.path):
            other = holder(_read_path(self.path))
            raise SaveError(f"{self.path.parent} was taken over by {other}; this run no longer saves there")

    def release(self) -> None:
        """Stop the heartbeat and remove the lock, if it is still this process's."""
        self._heartbeat.stop()
        with contextlib.suppress(OSError):
            if _same_file(self._fd, self.path):
                self.path.unlink()
        self.close_file()

    def close_file(self) -> None:
        """Close the file only. A forked child calls this, so that it does not keep its parent's lock."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        _open_files.discard(self)


def _after_fork() -> None:
    for held in list(_open_files):
        held.close_file()


os.register_at_fork(after_in_child=_after_fork)


def acquire(
    directory: Path, owner: str, *, take_over: bool = False, report: Callable[[str], object] = lambda line: None
) -> Held:
    """Lock a directory for writing. Never waits for a process that holds the lock.

    Raises `SaveError` naming the other writer. With `take_over`, waits until the heartbeat of a writer on another
    machine has stopped for `SILENT_SECONDS`, and replaces its lock; `report` receives a line before the wait.
    """
    path, draft = directory / LOCK, directory / f"{LOCK}.{owner}"
    draft.unlink(missing_ok=True)  # of an earlier attempt that failed
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _flock(fd)  # before the name `lock` exists, so that it is never seen without its kernel lock
        os.write(fd, json.dumps({**own_record(), "owner": owner}).encode("ascii"))
        for _ in range(100):
            try:
                os.link(draft, path, follow_symlinks=False)
            except FileExistsError:  # also if a network file system repeats a request that succeeded
                if not _same_file(fd, path) and not _replace(path, draft, take_over, report):
                    continue
            except FileNotFoundError:  # the writer removes drafts of others
                _refuse(path, _read_path(path), "it is running")
            return Held(path, fd)
        raise SaveError(f"{directory} is locked and unlocked by other writers all the time; try again")
    except BaseException:
        os.close(fd)
        raise
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _replace(path: Path, draft: Path, take_over: bool, report: Callable[[str], object]) -> bool:
    """Replace an existing lock by the draft if its writer has ended; False if it disappeared meanwhile."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SaveError(f"{path} cannot be opened: {error.strerror}\n  remove it") from None
    with closing(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SaveError(f"{path} is not a regular file\n  remove it")
        record, here = _read(fd), own_record()
        has_kernel_lock = _flock(fd)
        if has_kernel_lock is False:
            _refuse(path, record, "it is running")
        if not _same_file(fd, path):
            return False
        if not (has_kernel_lock and record.get("boot") == here["boot"] != ""):
            os.utime(draft)  # the file system's own clock
            silent = draft.stat().st_mtime - os.fstat(fd).st_mtime
            if may_live := await_silence(record, silent, lambda: _last_beat(path), take_over, report):
                _refuse(path, record, may_live)
            if not take_over and record.get("host") != here["host"]:
                _refuse(path, record, f"its last heartbeat was {silent:.0f} s ago")
        draft.rename(path)
        return True


def _refuse(path: Path, record: dict[str, Any], evidence: str) -> NoReturn:
    raise SaveError(
        f"{path.parent} is being written by {holder(record)}; {evidence}; two writers would overwrite each other's "
        f"steps\n  use another directory for this run, or, if that process has certainly ended, --take-over "
        f"(take_over=True) or remove {path}"
    )


def _opened(path: Path) -> contextlib.AbstractContextManager[int]:
    """The lock file, for reading; raises `OSError`."""
    return closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))


def _last_beat(path: Path) -> float:
    """The time of the last heartbeat. The file is opened again, because network file systems cache attributes."""
    with contextlib.suppress(OSError), _opened(path) as fd:
        return os.fstat(fd).st_mtime
    return -1.0


def _flock(fd: int) -> bool | None:
    """Take the kernel's lock: False if another process holds it, None if the file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_KERNEL_LOCKS:
            return None
        raise
    return True


def _same_file(fd: int, path: Path) -> bool:
    """True if the name `lock` is still this open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _read_path(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError), _opened(path) as fd:
        return _read(fd)
    return {}


def _read(fd: int) -> dict[str, Any]:
    """The content of a lock file; empty if it cannot be parsed."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(os.pread(fd, _LONGEST, 0))
        return record if isinstance(record, dict) else {}
    return {}
