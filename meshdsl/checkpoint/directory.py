"""What lies in a run's directory, by name.

`step-00000012` is a step: it gets that name when all of it is on the disk. The same name with an ending is work:
`.unfinished` (a save that was cut off), `.removed` (a step on its way out), `.bad` (a corrupt step whose place was
needed). `newest` notes the step published last, so that its loss is noticed; `lock` names the writer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from ..errors import CheckpointError
from .files import opened, read_at, remove_tree, sync_directory, write_durably
from .lock import LOCK
from .read import open_step, step_name

__all__ = ["clean", "is_good", "lost", "note_newest", "remove_step", "set_aside", "step_numbers", "unfinished"]

_STEP = re.compile(r"step-(\d{8,16})")
_WORK = re.compile(r"step-\d{8,16}\.[0-9a-f-]+\.(unfinished|removed)")
_NEWEST = "newest"
_DRAFT = re.compile(rf"{_NEWEST}\.draft|{LOCK}\.[0-9a-f]{{16}}")


def step_numbers(directory: Path) -> list[int]:
    """The steps that have a directory, ascending; whether they are sound is another question."""
    found = (_STEP.fullmatch(name) for name in _names(directory))
    return sorted(int(match[1]) for match in found if match and step_name(int(match[1])) == match[0])


def unfinished(directory: Path) -> list[str]:
    """The saves that were cut off, or are going on."""
    return sorted(name for name in _names(directory) if _WORK.fullmatch(name) and name.endswith(".unfinished"))


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: the directory cannot be read: {error.strerror}") from None


def clean(directory: Path) -> None:
    """Remove what an earlier writer left behind. Requires the lock."""
    for name in _names(directory):
        if _WORK.fullmatch(name):
            remove_tree(directory / name)
        elif _DRAFT.fullmatch(name):
            (directory / name).unlink(missing_ok=True)


def is_good(directory: Path, step: int) -> bool:
    """Whether every byte of a step is what was written. Reads all of it."""
    try:
        with open_step(directory, step) as reader:
            reader.verify()
    except CheckpointError:
        return False
    return True


def set_aside(directory: Path, step: int, owner: str) -> str:
    """Rename a corrupt step out of the way; returns its new name."""
    name = f"{step_name(step)}.{owner}.bad"
    os.rename(directory / step_name(step), directory / name)
    sync_directory(directory)
    return name


def remove_step(directory: Path, step: int, owner: str) -> None:
    """Remove a step. Its name goes first, so that what is half removed is never taken for a step."""
    gone = directory / f"{step_name(step)}.{owner}.removed"
    os.rename(directory / step_name(step), gone)
    sync_directory(directory)
    remove_tree(gone)


def note_newest(directory: Path, step: int | None) -> None:
    """Note the step that is the newest now."""
    draft = directory / f"{_NEWEST}.draft"
    draft.unlink(missing_ok=True)
    write_durably(draft, lambda write: write(json.dumps({"step": step}).encode("ascii")))
    os.rename(draft, directory / _NEWEST)
    sync_directory(directory)


def lost(directory: Path) -> str | None:
    """The name of the step that was published last, when neither it nor a newer one is there any more."""
    with contextlib.suppress(CheckpointError, ValueError, RecursionError), opened(str(directory / _NEWEST)) as fd:
        raw = bytearray(min(os.fstat(fd).st_size, 64))
        read_at(fd, memoryview(raw), 0, _NEWEST)
        step = json.loads(raw)["step"]
        if isinstance(step, int) and step > max(step_numbers(directory), default=-1):
            return step_name(step)
    return None
