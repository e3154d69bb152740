"""Writers of a run's records: JSON lines, TensorBoard event files, W&B offline runs, and a profile of a few steps.

JSON lines are flushed one by one, so a killed run loses at most the current step. A resumed run appends `start` and
`resume` lines; if a step appears twice, the later line is valid.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

import meshdsl as md

from ...errors import UsageError
from ...errors.installed import optional

Record = Mapping[str, Any]


_OTHERWISE = "write JSON lines with --metrics FILE"


class Lines:
    """Appends each record to a file as one line of JSON.

    Raises `UsageError` if the file cannot be opened, and `MeshdslError` if a later write fails.
    """

    def __init__(self, path: Path, header: Record):
        self.path, self.header = path, dict(header)
        with _written("--metrics", path):
            self.file = _appended(path)

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


@contextlib.contextmanager
def _written(option: str, path: Path) -> Iterator[None]:
    """Raises `UsageError` where the option's file or directory cannot be written."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = "no process reads this pipe" if getattr(error, "errno", None) == errno.ENXIO else str(error)
        raise UsageError(f"{option} {path} cannot be written: {reason}") from None


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
        library = optional("tensorboardX", "tensorboard", _OTHERWISE, UsageError)
        with _written("--tensorboard", directory):
            self.writer = library.SummaryWriter(str(directory))

    def write(self, record: Record) -> None:
        """Write the numbers of a step or evaluation record; other records are ignored."""
        for name, value in _scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class Wandb:
    """Writes the metrics of steps and evaluations into a directory, as an offline run of Weights & Biases.

    Nothing is sent; `wandb sync DIR/wandb/offline-run-*` uploads it. The run's id is kept in `DIR/run-id`, so a resumed
    training run continues the same run. Raises `UsageError` if wandb is not installed or `DIR` cannot be written.
    """

    def __init__(self, directory: Path):
        self.library = optional("wandb", "wandb", _OTHERWISE, UsageError)
        with _written("--wandb", directory):
            directory.mkdir(parents=True, exist_ok=True)
            self.identity = _identity(directory / "run-id")
        self.directory, self.run = directory, None

    def write(self, record: Record) -> None:
        """Begin the run at the start record; write the numbers of step and evaluation records."""
        if record["event"] == "start":
            self.run = self._begin(record)
        scalars = _scalars(record)
        if scalars and self.run is not None:
            self.run.log(scalars, step=record["step"])

    def _begin(self, start: Record) -> Any:
        settings = self.library.Settings(
            silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False
        )
        config = {**start["config"], **{name: start[name] for name in ("mesh", "layout", "seed", "parameters")}}
        return self.library.init(
            mode="offline",
            dir=str(self.directory),
            id=self.identity,
            project="meshdsl",
            name=start["workload"],
            config=config,
            settings=settings,
        )

    def close(self) -> None:
        """Write what is left, and end the process that writes."""
        if self.run is not None:
            self.run.finish()
            self.library.teardown()  # waits for the process


def _scalars(record: Record) -> dict[str, float]:
    """The metrics of a step or evaluation record, such as `train/loss` and `eval/loss`; none of other records."""
    group = {"step": "train", "eval": "eval"}.get(record["event"])
    kept = {name: x for name, x in record.items() if isinstance(x, int | float) and name not in ("step", "batches")}
    return {f"{group}/{name}": x for name, x in kept.items()} if group else {}


def _identity(file: Path) -> str:
    """The id of a run, from its file; a new one if there is none."""
    if file.exists():
        return file.read_text(encoding="ascii").strip()
    identity = secrets.token_hex(4)
    file.write_text(identity + "\n", encoding="ascii")
    return identity


class Profile:
    """Traces `count` steps with JAX's profiler, starting with the third, for TensorBoard or Perfetto.

    The first two steps are not traced: the first compiles, and the second runs while the first is read. `say` receives
    a message if no profile was written. Raises `UsageError` if the directory cannot be created.
    """

    def __init__(self, directory: Path, count: int = 5, say: Callable[[str], object] = print):
        self.directory, self.count, self.say = directory, count, say
        self.seen, self.running = 0, False
        with _written("--profile", directory):
            directory.mkdir(parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        """Start or stop the profiler's trace, if the record is of a step."""
        if record["event"] != "step":
            return
        self.seen += 1
        if self.seen == 2:
            with _written("--profile", self.directory):
                jax.profiler.start_trace(str(self.directory))
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
