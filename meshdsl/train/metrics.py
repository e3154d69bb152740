"""Records of a run in files: JSON lines, TensorBoard's event files, and a profile of a few steps.

Lines are appended and flushed one by one, so a run that is killed loses at most the step it was in; after a resume
its `start` and `resume` lines come, and for a step that was run twice the later line counts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from .values import UsageError

__all__ = ["Lines", "Profile", "TensorBoard"]

Record = Mapping[str, Any]


class Lines:
    """Appends each record to a file, as one line of JSON. Raises `UsageError` when it cannot be opened."""

    def __init__(self, path: Path, header: Record):
        self.header = dict(header)
        try:
            self.file: TextIO = path.open("a", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--metrics {path} cannot be written: {error}") from None

    def write(self, record: Record) -> None:
        """One line."""
        self.file.write(json.dumps({**self.header, **record}, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
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
    """Traces the steps from the third to the `count`th after it with JAX's profiler, for TensorBoard or Perfetto.

    The first step compiles, and the second is still on its way when the first is read: they are left out.
    """

    def __init__(self, directory: Path, count: int = 5):
        self.directory, self.count = directory, count
        self.seen, self.running = 0, False

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
        if self.running:
            self.running = False
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()
