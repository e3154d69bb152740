"""Errors. A message states the request, the actual values, the reason and one fix, and ends with the user's line.

An error has the user's line from the moment it is created: the innermost line on the stack outside meshdsl. Where the
line of an equation says more, `at` replaces it. `ShapeError`, `LayoutError` and `TraceError` are also a `ValueError`,
which callers may catch.
"""

from __future__ import annotations

import difflib
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .notebook import cell_of, rendered

__all__ = [
    "NOWHERE",
    "CheckpointError",
    "InternalError",
    "LayoutError",
    "MeshdslError",
    "SaveError",
    "ShapeError",
    "TraceError",
    "Where",
    "at",
    "caller",
    "expect",
    "is_ours",
    "nearest",
    "raised",
    "short",
    "shown",
    "text_of",
    "users_line",
    "whole",
]


class MeshdslError(Exception):
    """The base class of all errors that meshdsl raises deliberately. `where` is the user's line; the text ends with it.

    >>> import meshdsl as md
    >>> try:
    ...     md.sum(md.tensor([1.0, 2.0], "batch"), over="bach")
    ... except md.MeshdslError as error:
    ...     print(f"line {error.where.line}: {str(error).splitlines()[0]}")
    line 2: no dim 'bach' here; did you mean 'batch'? there are: batch
    """

    is_mistake = True  # False: no line of the user's caused it, and none is added

    def __init__(self, *args: Any):
        super().__init__(*args)
        where = caller() if self.is_mistake else NOWHERE
        self.where: Where | None = None if where == NOWHERE else where

    def __str__(self) -> str:
        text = super().__str__()
        line = f"\n  at {self.where}  {self.where.source()}".rstrip() if self.where is not None else ""
        return text if line in text else text + line  # the text of another error may have shown it

    def _render_traceback_(self) -> list[str]:  # IPython prints this: the user's lines and the message
        return rendered(self, _is_users)


class ShapeError(MeshdslError, ValueError):
    """Dims, shapes or dtypes do not fit the operation.

    >>> import meshdsl as md
    >>> md.tensor([1.0, 2.0, 3.0], "io") + md.tensor([1.0, 2.0], "hidden")
    Traceback (most recent call last):
        ...
    meshdsl.errors.ShapeError: broadcasting [io=3] with [hidden=2] would be an outer product
      ...
    """


class LayoutError(MeshdslError, ValueError):
    """A layout is illegal for a program, a mesh or the available machine. The message lists all problems found.

    >>> import meshdsl as md
    >>> md.compile(md.exp, "rows:4", "bach:rows; batch:cols").program(md.spec("batch:8"))
    Traceback (most recent call last):
        ...
    meshdsl.errors.LayoutError: ...
    """


class TraceError(MeshdslError, ValueError):
    """A traced tensor was used where a concrete one is required, or outside its trace.

    >>> import meshdsl as md
    >>> md.compile(lambda x: x if md.sum(x) > 0 else -x, "rows:4").program(md.spec("batch:8"))
    Traceback (most recent call last):
        ...
    meshdsl.errors.TraceError: a traced tensor cannot decide a Python if, while, and, or, not or assert
      ...
    """


class InternalError(MeshdslError):
    """An internal check of meshdsl failed; please report it with the printed program.

    Also raised for input that meshdsl cannot parse, such as lowered text from another version of JAX:

    >>> import meshdsl as md
    >>> step = md.compile(lambda x: md.sum(x, "io"), "rows:4", "io:rows")
    >>> text = step.lower(md.spec("io:8")).as_text().replace("replica_groups", "groups")
    >>> md.verify(text, step.program(md.spec("io:8")))
    Traceback (most recent call last):
        ...
    meshdsl.errors.InternalError: ...
    """

    def _render_traceback_(self) -> list[str]:  # a report needs all frames
        return traceback.format_exception(self)


class UsageError(MeshdslError):
    """The command line or a configuration file is wrong; a command then ends with exit code 2."""

    exit_code = 2


class CheckpointError(MeshdslError):
    """A checkpoint is missing, damaged, or does not match the request; the message names the file and the key.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     checkpoints.restore(7)
    Traceback (most recent call last):
        ...
    meshdsl.errors.CheckpointError: ...

    `meshdsl train` then exits with `exit_code`, 4.
    """

    exit_code = 4


class SaveError(CheckpointError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     saved = [checkpoints.save(step, {"w": md.tensor([1.0], "io")}) for step in (7, 7)]
    Traceback (most recent call last):
        ...
    meshdsl.errors.SaveError: step-00000007 was not saved: step-00000007 already exists in ...
      ...
    """

    exit_code = 1


class Where(NamedTuple):
    """A source line: file and line number, from 1. `NOWHERE` has an empty file name and line 0.

    `scope`: the names of `jax.named_scope` around an equation that was imported, such as `block/attention`.
    """

    file: str
    line: int
    scope: str = ""

    def __str__(self) -> str:
        return f"{cell_of(self.file) or _relative(self.file)}:{self.line}" if self.file else "(no line)"

    def with_scope(self) -> str:
        """The line, and the scope if there is one, as programs print it."""
        return f"{self} in {self.scope}" if self.scope else str(self)

    def source(self) -> str:
        """The text of the line, or an empty string if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


NOWHERE = Where("", 0)  # for equations and errors without a user's line
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(_PACKAGE, "models") + os.sep  # read as a user's files
_IN_THE_LANGUAGE = tuple(_PACKAGE + unit for unit in ("nn", "optim", "train"))  # fallback: a layer's line
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.__file__) + os.sep)  # packages; standard library
_COMMAND = os.sep + "meshdsl"  # the installed command-line script
# whoever runs a command wrote no line
_COMMANDS = (os.path.join(_PACKAGE, "tools", "commands") + os.sep, os.path.join(_PACKAGE, "tools", "cli.py"))


def caller() -> Where:
    """The innermost line on the stack that is outside meshdsl and installed libraries.

    If there is none, the innermost line in `nn`, `optim` or `train`; else, and outside of a command, `NOWHERE`.
    """
    frame: FrameType | None = sys._getframe(1)
    layer: Where | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file) and not _generated(frame) and not file.startswith("<frozen"):
            return Where(file, frame.f_lineno)
        if layer is None and file.startswith(_IN_THE_LANGUAGE):
            layer = Where(file, frame.f_lineno)
        if file.startswith(_COMMANDS):
            return NOWHERE
        frame = frame.f_back
    return layer or NOWHERE


def raised(error: BaseException) -> Where | None:
    """The innermost line of the user's code in the traceback of an error; None if there is none."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return users_line(reversed(lines))


def users_line(lines: Iterable[tuple[str, int]]) -> Where | None:
    """The first of these lines (file, number) that is in the user's code; None if there is none."""
    return next((Where(file, line) for file, line in lines if _is_users(file) and _is_written(file)), None)


def _is_written(file: str) -> bool:
    """True for a file, and for what somebody wrote at a prompt or in a cell; generated code has no file."""
    return file.startswith(("<stdin>", "<doctest ")) or os.path.exists(file) or cell_of(file) is not None


def is_ours(file: str) -> bool:
    """True for a file of this package, other than its models."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)


@cache
def _is_users(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return file.startswith(_MODELS)
    return not any(part in file for part in _LIBRARIES) and not file.endswith(_COMMAND)


def _generated(frame: FrameType) -> bool:
    """True if a frame runs code that `dataclass` generated for a meshdsl class; such code has no file."""
    return frame.f_code.co_filename == "<string>" and frame.f_globals.get("__name__", "").startswith("meshdsl.")


def at(error: MeshdslError, where: Where) -> MeshdslError:
    """Give the error this line of the user's program in place of the caller's, unless it has one of its own."""
    if error.is_mistake and where != NOWHERE and error.where in (None, caller()):
        error.where = where
    return error


def short(value: Any) -> str:
    """The text of a value on one line, for errors; of at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the text of a user's own class
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown(value: Any) -> str:
    """The text and the type of a value.

    >>> shown("0.5")
    "'0.5' (str)"
    """
    return f"{short(value)} ({type(value).__name__})"


def text_of(error: BaseException) -> str:
    """The text of any error, which may itself fail to print."""
    try:
        return str(error)
    except Exception as problem:
        return f"its text cannot be shown ({type(problem).__name__})"


def whole(name: str, value: Any) -> int:
    """The argument `name` as an integer; raises `ShapeError` for anything else, also for a tensor and a boolean."""
    if isinstance(value, bool) or hasattr(value, "dims") or not hasattr(value, "__index__"):
        raise ShapeError(f"{name} is {shown(value)}; expected int")
    return value.__index__()


def expect(name: str, value: Any, *kinds: Any) -> Any:
    """The argument `name`, which must have one of these types; raises `ShapeError` otherwise."""
    if not isinstance(value, kinds):
        words = ["a function" if kind is Callable else kind.__name__ for kind in kinds]
        raise ShapeError(f"{name} is {shown(value)}; expected {' or '.join(words)}")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion for a misspelt name: the closest known name, or one that it contains, and a list of all known names.

    >>> nearest("hiden", ["batch", "hidden"])
    "did you mean 'hidden'? there are: batch, hidden"
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [k for k in known if len(k) > 3 and k in name]
    listing = f"there are: {', '.join(known)}" if known else "there are none"
    return f"did you mean {close[0]!r}? {listing}" if close else listing


def nearest_path(path: Path, pattern: str = "*") -> str:
    """The suggestion for a missing path: the nearest ones of its folder; the pattern `*/` finds folders only."""
    try:
        there = sorted(str(p) for p in path.parent.glob(pattern))
    except (OSError, ValueError):  # a name that is too long
        there = []
    return nearest(str(path), there if len(there) <= 20 else difflib.get_close_matches(str(path), there))


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)


def _relative(file: str) -> str:
    """The path from the working directory, or, for a file of an installed package, from the folder that it is in."""
    try:
        relative = os.path.relpath(_real(file))  # in a clone, meshdsl/models is a link to models
    except (OSError, ValueError):  # also if the working directory was removed
        return file
    if not relative.startswith(os.pardir):
        return relative
    return file.removeprefix(os.path.dirname(_PACKAGE.rstrip(os.sep)) + os.sep)
