"""Records of a run in files: JSON lines, TensorBoard's event files, and a profile of a few steps.

Lines are appended and flushed one by one, so a run that is killed loses at most the step it was in; after a resume
its `start` and `resume` lines come, and for a step that was run twice the later line counts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

import meshdsl as md

from .values import UsageError

__all__ = ["Lines", "Profile", "TensorBoard"]

Record = Mapping[str, Any]


class Lines:
    """Appends each record to a file, as one line of JSON.

    Raises `UsageError` when it cannot be opened, `MeshdslError` when it cannot be written any more.
    """

    def __init__(self, path: Path, header: Record):
        self.path, self.header = path, dict(header)
        try:
            self.file: TextIO = path.open("a", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--metrics {path} cannot be written: {error}") from None

    def write(self, record: Record) -> None:
        """One line."""
        try:
            self.file.write(json.dumps({**self.header, **record}, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise md.MeshdslError(f"--metrics {self.path} cannot be written any more: {error.strerror}") from None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # every line was flushed; one that could not be has been said
            self.file.close()


class TensorBoard:
    """Writes the numbers of steps and evaluations as scalars, `train/loss` and `eval/loss`.

    Raises `UsageError` when tensorboardX is not installed or the directory cannot be written.
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
        """The record's numbers, if it is of a step or an evaluation."""
        group = {"step": "train", "eval": "eval"}.get(record["event"])
        for name, value in record.items() if group else ():
            if isinstance(value, int | float) and name not in ("step", "batches"):
                self.writer.add_scalar(f"{group}/{name}", value, record["step"])

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class Profile:
    """Traces `count` steps, from the third on, with JAX's profiler, for TensorBoard or Perfetto.

    The first step compiles, and the second is still on its way when the first is read: they are left out. `say` gets a
    line when there is no profile in the end. Raises `UsageError` when the directory cannot be made.
    """

    def __init__(self, directory: Path, count: int = 5, say: Callable[[str], object] = print):
        self.directory, self.count, self.say = directory, count, say
        self.seen, self.running = 0, False
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"--profile {directory} cannot be written: {error}") from None

    def write(self, record: Record) -> None:
        """Start and stop at steps."""
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
        """Stop, if it runs. A profile that cannot be written is no reason to lose the run."""
        if self.seen < 2:
            self.say(f"--profile {self.directory}: nothing was traced; it begins with the third step")
        elif self.running:
            self.running = False
            try:
                jax.profiler.stop_trace()
            except (OSError, ValueError, RuntimeError) as error:
                self.say(f"--profile {self.directory} could not be written: {error}")
