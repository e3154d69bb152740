"""Reads and writes files that the user named. Only regular files are replaced; pipes and devices are written to."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file: a regular file is replaced at once, by renaming a temporary file; a link keeps its place.

    A pipe or a device is written to. Raises `OSError`, also for a directory, a block device, and a pipe that no
    process reads.
    """
    mode = _mode(path)
    if mode is None or (stat.S_ISREG(mode) and not os.path.abspath(path).startswith(("/dev/", "/proc/"))):
        _replace(Path(os.path.realpath(path)), text)
    elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISREG(mode):
        _write_into(path, text)
    else:
        kind = "a directory" if stat.S_ISDIR(mode) else "neither a file nor a pipe"
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))


def _mode(path: Path) -> int | None:
    """The mode of what the path leads to; None if there is nothing."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _write_into(path: Path, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        reason = "no process reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise OSError(error.errno, reason, str(path)) from None
    os.set_blocking(fd, True)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp creates files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
