"""The streams of a command. Printing never raises and never keeps a run from saving.

A stream whose reader has gone, whose disk is full, or which was closed from the start is muted; `Steady.problem` says
why. Text that the stream's encoding lacks is escaped. With `--json`, stdout has JSON lines only: what a model, a
library or JAX's own C++ prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _BlockedError(Exception):
    """A signal arrived while a write waits for a reader that does not read."""


class Steady:
    """A text stream whose `write` and `flush` never raise. `problem` is the error that muted it, if any."""

    def __init__(self, stream: TextIO | None):
        self.stream: TextIO = stream if stream is not None else _devnull()
        self.problem: OSError | None = None
        self.is_writing = False

    def write(self, text: str) -> int:
        """Write text; characters that the encoding lacks are written as escapes."""
        try:
            return self._attempt("write", text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            return self._attempt("write", text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Flush the stream."""
        self._attempt("flush")

    def _attempt(self, method: str, *text: str) -> int:
        if self.problem is not None:
            return len(text[0]) if text else 0
        self.is_writing = True
        try:
            return getattr(self.stream, method)(*text) or 0
        except UnicodeEncodeError:
            raise
        except OSError as error:
            self._mute(error)
        except ValueError as error:  # the stream is closed
            self._mute(OSError(errno.EBADF, str(error)))
        except _BlockedError:
            self._mute(OSError(errno.EAGAIN, "its reader does not read"))
        finally:
            self.is_writing = False
        return len(text[0]) if text else 0

    def _mute(self, problem: OSError) -> None:
        """Drop all output from now on, also what Python flushes when it exits."""
        self.problem = problem
        with contextlib.suppress(OSError, ValueError):
            number, null = self.stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)

    def is_blocked(self) -> bool:
        """True if a write is waiting for its reader."""
        if not self.is_writing:
            return False
        try:
            return not select.select([], [self.stream.fileno()], [], 0)[1]
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _devnull() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


_active: list[Steady] = []


def unblock() -> None:
    """End a write that waits for a reader that does not read. A signal handler calls this."""
    if any(stream.is_blocked() for stream in _active):
        raise _BlockedError


@contextlib.contextmanager
def steady() -> Iterator[Steady]:
    """Replaces stdout and stderr with `Steady` streams meanwhile; yields that of stdout."""
    _reserve()
    before = sys.stdout, sys.stderr
    streams = [Steady(before[0]), Steady(before[1])]
    _active.extend(streams)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield streams[0]
    finally:
        for stream in streams:
            stream.flush()
            _active.remove(stream)
        sys.stdout, sys.stderr = before


def _reserve() -> None:
    """Open the numbers 0 to 2 if they are closed. Otherwise a checkpoint could get number 2, and be logged into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


_results: list[Any] = []


def results() -> Any:
    """The stream of the command's results: stdout, also while `json_lines` sends other output to stderr."""
    return _results[-1] if _results else sys.stdout


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """Sends all that is printed to stderr meanwhile, except what is written to `results()`."""
    stdout, saved = sys.stdout, None
    is_process_output = isinstance(stdout, Steady) and stdout.stream is sys.__stdout__ and stdout.stream is not None
    if is_process_output:
        with contextlib.suppress(OSError, ValueError):
            stdout.flush()
            saved = os.dup(1)
            os.dup2(2, 1)
    stream = stdout
    if saved is not None:
        stream = cast(Any, Steady(os.fdopen(saved, "w", encoding="utf-8")))
        _active.append(cast(Steady, stream))
    _results.append(stream)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        stream.flush()
        sys.stdout = stdout
        _results.pop()
        if saved is not None:
            _active.remove(cast(Steady, stream))
            cast(Any, stdout).problem = cast(Steady, stream).problem
            with contextlib.suppress(OSError):
                os.dup2(saved, 1)
            with contextlib.suppress(OSError, ValueError):
                cast(Steady, stream).stream.close()
