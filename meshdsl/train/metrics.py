"""Writers of a run's records: JSON lines, TensorBoard event files, and a profile of a few steps.

JSON lines are flushed one by one, so a killed run loses at most the current step. A resumed run appends `start` and
`resume` lines; if a step appears twice, the later line is valid.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

import meshdsl as md

from .values import UsageError

__all__ = ["Lines", "Profile", "TensorBoard"]

Record = Mapping[str, Any]


class Lines:
    """Appends each record to a file as one line of JSON.

    Raises `UsageError` if the file cannot be opened, and `MeshdslError` if a later write fails.
    """

    def __init__(self, path: Path, header: Record):
        self.path, self.header = path, dict(header)
        try:
            self.file = _appended(path)
        except (OSError, ValueError) as error:
            reason = "no process reads this pipe" if getattr(error, "errno", None) == errno.ENXIO else str(error)
            raise UsageError(f"--metrics {path} cannot be written: {reason}") from None

    def write(self, record: Record) -> None:
        """Append one record."""
        try:
            self.file.write(json.dumps({**self.header, **record}, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise md.MeshdslError(f"--metrics {self.path}: a write failed: {error.strerror}") from None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # every line was flushed by write, which reported errors
            self.file.close()


def _appended(path: Path) -> TextIO:
    """A file opened to append; a pipe that no process reads is an `OSError` instead of a wait."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)
    os.set_blocking(fd, True)
    return os.fdopen(fd, "a", encoding="utf-8")


class TensorBoard:
    """Writes the metrics of steps and evaluations as scalars, such as `train/loss` and `eval/loss`.

    Raises `UsageError` if tensorboardX is not installed or the directory cannot be written.
    """

    def __init__(self, directory: Path):
        try:
            library = importlib.import_module("tensorboardX")
        except ImportError:
            raise UsageError(
                "--tensorboard needs tensorboardX, which is not installed\n"
                "  pip install 'meshdsl[tensorboard]', or write JSON lines with --metrics FILE"
            ) from None
        try:
            self.writer = library.SummaryWriter(str(directory))
        except (OSError, ValueError) as error:
            raise UsageError(f"--tensorboard {directory} cannot be written: {error}") from None

    def write(self, record: Record) -> None:
        """Write the numbers of a step or evaluation record; other records are ignored."""
        group = {"step": "train", "eval": "eval"}.get(record["event"])
        for name, value in record.items() if group else ():
            if isinstance(value, int | float) and name not in ("step", "batches"):
                self.writer.add_scalar(f"{group}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class Profile:
    """Traces `count` steps with JAX's profiler, starting with the third, for TensorBoard or Perfetto.

    The first two steps are not traced: the first compiles, and the second runs while the first is read. `say` receives
    a message if no profile was written. Raises `UsageError` if the directory cannot be created.
    """

    def __init__(self, directory: Path, count: int = 5, say: Callable[[str], object] = print):
        self.directory, self.count, self.say = directory, count, say
        self.seen, self.running = 0, False
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"--profile {directory} cannot be written: {error}") from None

    def write(self, record: Record) -> None:
        """Start or stop the trace at a step record."""
        if record["event"] != "step":
            return
        self.seen += 1
        if self.seen == 2:
            try:
                jax.profiler.start_trace(str(self.directory))
            except (OSError, ValueError, RuntimeError) as error:
                raise UsageError(f"--profile {self.directory} cannot be written: {error}") from None
            self.running = True
        elif self.seen == 2 + self.count:
            self.close()

    def close(self) -> None:
        """Stop the trace if it runs. A profile that cannot be written is reported and does not fail the run."""
        if self.seen < 2:
            self.say(f"--profile {self.directory}: nothing was traced; tracing starts at the third step")
        elif self.running:
            self.running = False
            try:
                jax.profiler.stop_trace()
            except (OSError, ValueError, RuntimeError) as error:
                self.say(f"--profile {self.directory} could not be written: {error}")
