"""Errors in notebooks without the frames of this package, and the cell of a line.

IPython is never imported here; its names are used only where a session of it runs.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable


def cell_of(file: str) -> str | None:
    """The name of the cell whose code has this file name, such as `In[3]`; None if it is not one of IPython's."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return named[1] if named is not None else None


def shows_all_frames() -> bool:
    """True if `MESHDSL_TRACEBACK=full` asks for the frames of this package too."""
    return os.environ.get("MESHDSL_TRACEBACK", "") not in ("", "0")


def rendered(error: BaseException, is_users: Callable[[str], bool]) -> list[str]:
    """The lines of a traceback, with the user's frames only. `MESHDSL_TRACEBACK=full` shows all frames.

    >>> try:
    ...     raise ValueError("no dim 'bach' here")
    ... except ValueError as error:
    ...     print(*rendered(error, lambda file: True), sep="\\n")
    <doctest ...>, line 2
          raise ValueError("no dim 'bach' here")
    <BLANKLINE>
    ValueError: no dim 'bach' here
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(file, line) for file, line in frames if is_users(file)]
    if not users or shows_all_frames():
        return traceback.format_exception(error)
    shown = []
    for file, line in users:
        cell = cell_of(file)
        shown += [f"{f'Cell {cell}' if cell else file}, line {line}", f"      {linecache.getline(file, line).strip()}"]
    return [*shown, "", f"{type(error).__name__}: {error}"]
