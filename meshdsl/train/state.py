"""The state of a run and its checkpoints.

A checkpoint stores the parameters and optimizer state, the step (the position in the data), the seed and random key
(which determine all batches and random numbers), and the number of skipped steps. A resumed run is bitwise equal to one
that never stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshdsl as md

from ..errors import UsageError
from .iterators import go_to
from .values import as_json


@dataclass
class State:
    """The current state of a run. `tree` holds `params` and `state`; `step` is the number of steps done."""

    tree: Any
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    saved: int = -1  # the newest step known to be saved without errors


@dataclass(frozen=True)
class Keeping:
    """Checkpoint options of a run: the directory, the interval in steps, what to resume, and the stored configuration.

    If an earlier save is still being written when a save is due, the save is postponed to the next step after it is
    done. With `wait=True`, the run waits instead.
    """

    checkpoints: md.Checkpoints
    every: int = 100
    resume: str = "auto"  # or "never", or a path
    config: Mapping[str, Any] | None = None
    wait: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoints, md.Checkpoints):
            raise UsageError(
                f"a run saves to md.Checkpoints(directory), got {self.checkpoints!r}\n"
                "  for example Keeping(md.Checkpoints('run'), every=100)"
            )
        if not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"a run saves every N steps, with N at least 1; got every={self.every!r}")

    def due(self, step: int) -> bool:
        """True if this step is to be saved."""
        return step % self.every == 0

    def save(
        self,
        state: State,
        seed: int,
        *,
        wait: bool,
        description: Mapping[str, Any] | None = None,
        position: Any = None,
    ) -> bool:
        """Save the state; returns False, without saving, if an earlier save is running and `wait` is false.

        `description` is what the data says about itself, to compare when the run resumes; `position` is the state of
        an iterator.
        """
        data = {
            "step": state.step,
            "seed": seed,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
            **({"description": _short(description)} if description else {}),
            **({"position": position} if position is not None else {}),
        }
        key = md.random.key(seed)
        saved = self.checkpoints.save(
            state.step, state.tree, config=self.config, data=data, key=key, wait=wait or self.wait
        )
        state.saved = state.step if saved else state.saved
        return saved

    def restore(
        self,
        like: Any,
        program: md.Program,
        seed: int,
        batches: Any = None,
        description: Mapping[str, Any] | None = None,
    ) -> tuple[State, str, list[str]] | None:
        """The restored state, its directory, and what changed since it was saved (settings, data); None for a new run.

        Raises `UsageError` if the checkpoint does not match the run, and `CheckpointError` if no checkpoint is valid.
        """
        source, step = self._source()
        if source is None:
            return None
        try:
            restored = source.restore(step, like=like, program=program)
        except md.ShapeError as error:
            raise self._other_model(source, step, error) from None
        own_steps = self.checkpoints.steps()
        if source is not self.checkpoints and own_steps:
            raise UsageError(
                f"{self.checkpoints.directory} already has checkpoints, up to step {own_steps[-1]}, and the run "
                f"would resume from {self.resume}\n  use another directory for this run"
            )
        if self.resume not in ("auto", "never") and own_steps and own_steps[-1] > restored.step:
            raise UsageError(
                f"{self.checkpoints.directory} has checkpoints after step {restored.step}, up to {own_steps[-1]}\n"
                "  use another directory for this run, or remove them first"
            )
        data = restored.data if isinstance(restored.data, dict) else {}
        if any(type(data.get(name)) is not int for name in ("seed", "skipped", "skipped_in_a_row")):
            raise UsageError(f"step {restored.step} of {source.directory} was not saved by `meshdsl train`")
        if data["seed"] != seed:
            raise UsageError(
                f"step {restored.step} of {source.directory} was trained with seed {data['seed']}, and this run has "
                f"{seed}\n  to continue with the same batches and random numbers, use --seed {data['seed']}"
            )
        go_to(batches, data.get("position"), f"step {restored.step} of {source.directory}")
        saved = restored.step if source is self.checkpoints else -1
        state = State(restored.tree, restored.step, data["skipped"], data["skipped_in_a_row"], saved)
        changes = [
            *_changes(restored.config, self.config),
            *_differences("data", data.get("description"), _short(description)),
        ]
        return state, f"{source.directory}", changes

    def _other_model(self, source: md.Checkpoints, step: int | None, error: md.ShapeError) -> UsageError:
        """The error for a checkpoint whose parameters or optimizer state differ from the run's."""
        restored = source.restore(step, like={})  # reads only the configuration
        problems = [line for line in str(error).splitlines() if line.startswith("  ") and ": is " in line]
        shown = [line.replace("in like=", "in this run") for line in problems[:8]]
        more = [f"  and {len(problems) - 8} more"] if len(problems) > 8 else []
        changed = [f"  {line}" for line in _changes(restored.config, self.config)]
        summary = f"step {restored.step} of {source.directory} was saved with another model or optimizer"
        way_out = "  use the saved configuration, or another directory"
        return UsageError("\n".join([summary, *shown, *more, *changed, way_out]))

    def _source(self) -> tuple[md.Checkpoints | None, int | None]:
        """The checkpoints to resume from, and the step (None: the newest); None and None for a new run."""
        own = self.checkpoints
        if self.resume == "auto":  # the file `newest` remains if the steps were removed: not a new run
            has_steps = own.steps() or (own.directory / "newest").exists()
            return (own, None) if has_steps else (None, None)
        if self.resume == "never":
            if own.steps():
                raise UsageError(
                    f"--resume never, but {own.directory} has checkpoints up to step {own.steps()[-1]}\n"
                    "  use --resume auto to continue from there, or another directory for a new run"
                )
            return None, None
        if not self.resume:
            raise UsageError("--resume must be auto, never or the path of a checkpoint; it is empty")
        return self._named_source()

    def _named_source(self) -> tuple[md.Checkpoints, int | None]:
        """The checkpoints of the path or URL `resume`, and the step if it names one."""
        own = self.checkpoints
        path = md.Checkpoints(self.resume).directory if "://" in self.resume else Path(self.resume)
        match = re.fullmatch(r"step-(\d{8,16})", path.name)
        folder = path.parent if match else path
        if not path.is_dir():
            raise UsageError(f"--resume must be auto, never or the path of a checkpoint; there is no {self.resume!r}")
        step = int(match[1]) if match else None
        if "://" in self.resume:
            at_url = self.resume.removesuffix(f"/{path.name}") if match else self.resume
            return (own if folder == own.directory else md.Checkpoints(at_url, report=own.report)), step
        if os.path.exists(own.directory) and os.path.samefile(folder, own.directory):
            return own, step
        return md.Checkpoints(folder, report=own.report), step


@contextlib.contextmanager
def closing(keep: Keeping | None) -> Iterator[None]:
    """Release the directory's lock at the end; if the block failed, re-raise its error and ignore errors of closing."""
    try:
        yield
    except BaseException:
        if keep is not None:
            with contextlib.suppress(md.CheckpointError):
                keep.checkpoints.close()
        raise
    if keep is not None:
        keep.checkpoints.close()


def _changes(before: Any, now: Any) -> list[str]:
    """The workload's config and training options that changed, one line each."""
    lines: list[str] = []
    for table in ("config", "train"):
        old, new = (c.get(table) if isinstance(c, Mapping) else None for c in (before, now))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed = _differences(table, old, new)
            lines += [line for line in changed if not line.startswith("train.steps was ")]
    return lines


def _differences(name: str, old: Any, new: Any) -> list[str]:
    """The values that differ, by dotted key, one line each. What comes from the checkpoint is escaped and shortened."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted({*map(str, old), *map(str, new)})
        return [line for key in keys for line in _differences(f"{name}.{key}", old.get(key), new.get(key))]
    if as_json(old) == as_json(new) or (old is None and isinstance(new, Mapping)):
        return []
    return [f"{_shown(name)} was {_shown(old)}, now it is {_shown(new)}"]


def _short(description: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A description to store in every checkpoint: its hash if it is long."""
    text = json.dumps(description, sort_keys=True)
    return description if len(text) <= 8192 else {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _shown(value: Any) -> str:
    text = ascii(str(value))[1:-1]
    return text if len(text) <= 200 else f"{text[:197]}..."
