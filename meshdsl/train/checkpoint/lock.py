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
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...errors import SaveError, short
from .files import closing

LOCK = "lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
_LONGEST = 4096
_NO_KERNEL_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_open_files: weakref.WeakSet[Held] = weakref.WeakSet()


class Held:
    """A lock that this process holds; see `acquire`."""

    def __init__(self, directory: Path, owner: str, root: int, fd: int):
        self.directory, self.owner, self._root, self._fd = directory, owner, root, fd
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="meshdsl-heartbeat", daemon=True)
        self._thread.start()
        _open_files.add(self)

    def check(self) -> None:
        """Raises `SaveError` if another writer has replaced the lock."""
        if _same_file(self._fd, self._root):
            return
        other = holder(_read_path(self._root))
        raise SaveError(f"{self.directory} was taken over by {other}; this run no longer saves there")

    def release(self) -> None:
        """Stop the heartbeat and remove the lock, if it is still this process's."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if _same_file(self._fd, self._root):
                os.unlink(LOCK, dir_fd=self._root)
        self.close_files()

    def close_files(self) -> None:
        """Close the files only. A forked child calls this, so that it does not keep its parent's lock."""
        for fd in (self._fd, self._root):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fd = self._root = -1
        _open_files.discard(self)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a disk that fails is reported by the next save
                os.utime(self._fd)


def _after_fork() -> None:
    for held in list(_open_files):
        held.close_files()


os.register_at_fork(after_in_child=_after_fork)


def acquire(
    directory: Path, owner: str, *, take_over: bool = False, report: Callable[[str], object] | None = None
) -> Held:
    """Lock a directory for writing. Never waits for a process that holds the lock.

    Raises `SaveError` naming the other writer. With `take_over`, waits until the heartbeat of a writer on another
    machine has stopped for `SILENT_SECONDS`, and replaces its lock; `report` receives a line before the wait.
    """
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    draft = f"{LOCK}.{owner}"
    fd = -1
    try:
        _unlink(draft, root)  # of an earlier attempt that failed
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=root)
        _flock(fd)  # before the name `lock` exists, so that it is never seen without its kernel lock
        os.write(fd, json.dumps({**own_record(), "owner": owner}).encode("ascii"))
        for _ in range(100):
            try:
                os.link(draft, LOCK, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
            except FileExistsError:  # also if a network file system repeats a request that succeeded
                if not _same_file(fd, root) and not _replace(directory, root, draft, take_over, report):
                    continue
            except FileNotFoundError:  # the writer removes drafts of others
                _refuse(directory, _read_path(root), "it is running")
            _unlink(draft, root)
            return Held(directory, owner, root, fd)
        raise SaveError(f"{directory} is locked and unlocked by other writers all the time; try again")
    except BaseException:
        _unlink(draft, root)
        for number in (fd, root):
            if number >= 0:
                os.close(number)
        raise


def _unlink(name: str, root: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=root)


def _replace(directory: Path, root: int, draft: str, take_over: bool, report: Callable[[str], object] | None) -> bool:
    """Replace an existing lock by the draft if its writer has ended; False if it disappeared meanwhile."""
    try:
        fd = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SaveError(f"{directory / LOCK} cannot be opened: {error.strerror}\n  remove it") from None
    with closing(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SaveError(f"{directory / LOCK} is not a regular file\n  remove it")
        record = _read(fd)
        has_kernel_lock = _flock(fd)
        if has_kernel_lock is False:
            _refuse(directory, record, "it is running")
        if not _same_file(fd, root):
            return False
        if not (has_kernel_lock and record.get("boot") == _boot() != ""):
            _await_silence(directory, root, draft, fd, record, take_over, report)
        os.rename(draft, LOCK, src_dir_fd=root, dst_dir_fd=root)
        return True


def _await_silence(
    directory: Path,
    root: int,
    draft: str,
    fd: int,
    record: dict[str, Any],
    take_over: bool,
    report: Callable[[str], object] | None,
) -> None:
    """Wait until the writer on another machine is silent; raises `SaveError` if it is alive or may be."""
    same_host = record.get("host") == socket.gethostname()
    beat, silent = os.fstat(fd).st_mtime, _silence(root, draft, fd)
    if silent < SILENT_SECONDS and take_over:
        if report is not None:
            report(f"waiting {SILENT_SECONDS - max(silent, 0.0):.0f} s for a heartbeat of {holder(record)}")
        deadline = time.monotonic() + SILENT_SECONDS - max(silent, 0.0)
        while time.monotonic() < deadline:
            time.sleep(min(1.0, SILENT_SECONDS / 20))
            if _path_time(root) != beat:
                _refuse(directory, record, "its heartbeat is recent, so it is running")
    elif silent < SILENT_SECONDS or not (take_over or same_host):
        _refuse(directory, record, f"its last heartbeat was {max(silent, 0):.0f} s ago")


def _refuse(directory: Path, record: dict[str, Any], evidence: str) -> NoReturn:
    raise SaveError(
        f"{directory} is being written by {holder(record)}; {evidence}; two writers would overwrite each other's "
        f"steps\n  use another directory for this run, or, if that process has certainly ended, --take-over "
        f"(take_over=True) or remove {directory / LOCK}"
    )


def _silence(root: int, draft: str, fd: int) -> float:
    """The seconds since the last heartbeat, by the file system's own clock."""
    os.utime(draft, dir_fd=root, follow_symlinks=False)
    return os.stat(draft, dir_fd=root, follow_symlinks=False).st_mtime - os.fstat(fd).st_mtime


def _path_time(root: int) -> float:
    """The time of the last heartbeat. The file is opened again, because network file systems cache attributes."""
    try:
        with _opened(root) as fd:
            return os.fstat(fd).st_mtime
    except OSError:
        return -1.0


def _opened(root: int) -> contextlib.AbstractContextManager[int]:
    """The lock file, for reading; raises `OSError`."""
    return closing(os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root))


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


def _same_file(fd: int, root: int) -> bool:
    """True if the name `lock` is still this open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(LOCK, dir_fd=root, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _read_path(root: int) -> dict[str, Any]:
    try:
        with _opened(root) as fd:
            return _read(fd)
    except OSError:
        return {}


def _read(fd: int) -> dict[str, Any]:
    """The content of a lock file; empty if it cannot be parsed."""
    try:
        record = json.loads(os.pread(fd, _LONGEST, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def holder(record: dict[str, Any]) -> str:
    """The writer that a lock file names."""
    if not {"pid", "host"} <= record.keys():
        return "a writer that its lock file does not name"
    return f"process {short(record['pid'])} on {short(record['host'])}"


def own_record() -> dict[str, Any]:
    """What identifies this process in a lock file."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot()}


def _boot() -> str:
    """The boot id of this kernel, which its containers share; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
