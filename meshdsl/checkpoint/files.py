"""The file system as a checkpoint needs it: what is written is on the disk, what is read is a plain file.

A name inside a checkpoint directory is one that this package made up; none comes out of a file. Files are opened
relative to the open directory, never through a link, and never in a way that waits (a pipe, a device).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CheckpointError

__all__ = ["opened", "read_at", "regular_size", "remove_tree", "sync_directory", "write_durably"]

_BLOCK = 1 << 20


def sync_directory(path: Path) -> None:
    """Put a directory's entries on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, fill: Callable[[Callable[[bytes | memoryview], None]], None]) -> None:
    """Make a new file of what `fill(write)` writes, and put it on the disk. The file must not exist."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:

        def write(data: bytes | memoryview) -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]

        fill(write)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(name: str, folder: int | None = None, *, directory: bool = False) -> Iterator[int]:
    """A descriptor of a file or directory, for reading.

    Raises `CheckpointError` when it is not there, cannot be read, or is not a plain one (a link, a pipe).
    """
    kind = "directory" if directory else "file"
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_DIRECTORY if directory else 0)
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise CheckpointError(f"{name}: the {kind} is missing") from None
    except OSError as error:  # a link says ELOOP or ENOTDIR
        raise CheckpointError(f"{name}: it cannot be opened as a plain {kind}: {error.strerror}") from None
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) if directory else stat.S_ISREG(mode)):
            raise CheckpointError(f"{name}: it is not a plain {kind}")
        yield fd
    finally:
        os.close(fd)


def regular_size(name: str, folder: int) -> int:
    """The bytes of a plain file. Raises `CheckpointError` like `opened`."""
    with opened(name, folder) as fd:
        return os.fstat(fd).st_size


def read_at(fd: int, into: memoryview, offset: int, name: str) -> None:
    """Fill `into` from the file at `offset`. Raises `CheckpointError` when the file ends before."""
    done = 0
    while done < len(into):
        try:
            got = os.preadv(fd, [into[done : done + _BLOCK]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{name}: it cannot be read at byte {offset + done}: {error.strerror}") from None
        if not got:
            raise CheckpointError(f"{name}: it ends at byte {offset + done}, and {len(into) - done} more belong there")
        done += got


def remove_tree(path: Path) -> None:
    """Remove a directory of plain files. Links in it are removed, never followed."""
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                os.unlink(entry.path)
        os.rmdir(path)
