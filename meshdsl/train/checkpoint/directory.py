"""The entries of a run's checkpoint directory.

`step-00000012` is a complete step; a step gets this name once all its files are on disk. A suffix marks other states:
`.unfinished` (a save in progress or interrupted), `.removed` (a step being deleted), `.bad` (a corrupt step that was
renamed). The file `newest` stores the last published step, so that its loss is detected. The file `lock` identifies
the writer. A step that is a link is not read; where a step is moved or removed, it is the link itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...errors import CheckpointError
from .files import move, read_at, regular_size, remove_tree, write_durably
from .lock import LOCK
from .manifest import STEP_LIMIT
from .read import STEP, open_step, step_name

_WORK = re.compile(r"step-\d{8,16}\.[0-9a-f-]+\.(unfinished|removed)")
_NEWEST = "newest"
_DRAFT = re.compile(rf"{_NEWEST}\.draft|{LOCK}\.[0-9a-f]{{16}}")


def step_numbers(directory: Path) -> list[int]:
    """The steps that have a directory, ascending. They are not verified."""
    matches = (STEP.fullmatch(name) for name in _names(directory))
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])


def unfinished(directory: Path) -> list[str]:
    """The names of saves that are in progress or were interrupted."""
    return sorted(name for name in _names(directory) if _WORK.fullmatch(name) and name.endswith(".unfinished"))


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: the directory cannot be read: {error.strerror}") from None


def clean(directory: Path) -> None:
    """Remove temporary files and unfinished saves of earlier writers. Requires the lock."""
    for name in _names(directory):
        if _WORK.fullmatch(name):
            remove_tree(directory / name)
        elif _DRAFT.fullmatch(name):
            (directory / name).unlink(missing_ok=True)


def is_good(directory: Path, step: int) -> bool:
    """True if a step is intact. Reads and hashes the whole step."""
    try:
        with open_step(directory, step) as reader:
            reader.verify()
    except CheckpointError:
        return False
    return True


def set_aside(directory: Path, step: int, name: str) -> Path:
    """Rename a step, to `.bad` or `.removed`, so that it is not read as a step; returns its new path."""
    new = directory / f"{step_name(step)}.{name}"
    move(directory / step_name(step), new)
    return new


def note_newest(directory: Path, step: int | None) -> None:
    """Store the newest step in the file `newest`."""
    draft = directory / f"{_NEWEST}.draft"
    draft.unlink(missing_ok=True)
    write_durably(draft, [json.dumps({"step": step}).encode("ascii")])
    move(draft, directory / _NEWEST)


def lost_newest(directory: Path) -> list[str]:
    """A line for the last published step, if neither it nor a newer step exists."""
    newest = directory / _NEWEST
    with contextlib.suppress(CheckpointError):
        return lost(read_at(newest, size=min(regular_size(newest), 64)), step_numbers(directory), directory)
    return []


def lost(text: str | bytes | bytearray, steps: Sequence[int], directory: object) -> list[str]:
    """A line for the step that the file `newest` names, if neither it nor a newer one is among `steps`.

    The file is only a hint: a damaged one names no step.
    """
    with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
        step = json.loads(text)["step"]
        if max(steps, default=-1) < step <= STEP_LIMIT and step is not True:
            return [f"{step_name(step)} was saved in {directory} and is missing now"]
    return []
