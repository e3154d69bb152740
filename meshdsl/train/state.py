"""What a run has to remember to go on as if it had never stopped, and where that is kept.

Parameters and optimizer state bit for bit; the step, which is the position in the data; the seed and the random key,
from which the batch and the random numbers of every step follow; how many steps were skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshdsl as md

from .values import UsageError, as_json

__all__ = ["Keeping", "State", "keeping"]


@dataclass
class State:
    """Where a run is. `tree` holds `params` and `state`; `step` steps are done."""

    tree: Any
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    saved: int = -1  # the step of the newest checkpoint that is known to be sound


@dataclass(frozen=True)
class Keeping:
    """A run's checkpoints: where they go, how often, what is resumed, and the configuration stored with each.

    A step whose turn comes while an earlier one is still being written is not waited for: the first step after that
    is saved in its place, unless `wait` is set.
    """

    checkpoints: md.Checkpoints
    every: int = 100
    resume: str = "auto"  # or never, or a path
    config: Mapping[str, Any] | None = None
    wait: bool = False

    def due(self, step: int) -> bool:
        """Whether the step is one of those to save."""
        return step % self.every == 0

    def save(self, state: State, seed: int, *, wait: bool) -> bool:
        """Save; False when an earlier save still goes on and `wait` is not set."""
        data = {
            "step": state.step,
            "seed": seed,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
        }
        key = md.random.key(seed)
        saved = self.checkpoints.save(
            state.step, state.tree, config=self.config, data=data, key=key, wait=wait or self.wait
        )
        state.saved = state.step if saved else state.saved
        return saved

    def restore(self, like: Any, program: md.Program, seed: int) -> tuple[State, str, list[str]] | None:
        """The state to go on from, where it was, and what changed since it was saved; None for a fresh run.

        Raises `UsageError` where the run and what is there do not go together, `CheckpointError` when nothing that
        is there can be trusted.
        """
        source, step = self._source()
        if source is None:
            return None
        try:
            found = source.restore(step, like=like, program=program)
        except md.ShapeError as error:
            raise self._other_model(source, step, error) from None
        there = self.checkpoints.steps()
        if source is not self.checkpoints and there:
            raise UsageError(
                f"{self.checkpoints.directory} has checkpoints of its own, the newest of step {there[-1]}, and the run "
                f"is to resume from {self.resume}\n  give this run another directory"
            )
        if self.resume not in ("auto", "never") and there and there[-1] > found.step:
            raise UsageError(
                f"{self.checkpoints.directory} has checkpoints after step {found.step}, up to {there[-1]}\n"
                "  give this run another directory, or remove them first"
            )
        data = found.data if isinstance(found.data, dict) else {}
        if any(type(data.get(name)) is not int for name in ("seed", "skipped", "skipped_in_a_row")):
            raise UsageError(f"step {found.step} of {source.directory} was not saved by a training run")
        if data["seed"] != seed:
            raise UsageError(
                f"step {found.step} of {source.directory} was trained with seed {data['seed']}, and this run has "
                f"{seed}\n  its batches and random numbers go on only with --seed {data['seed']}"
            )
        saved = found.step if source is self.checkpoints else -1
        state = State(found.tree, found.step, data["skipped"], data["skipped_in_a_row"], saved)
        return state, f"{source.directory}", _changes(found.config, self.config)

    def _other_model(self, source: md.Checkpoints, step: int | None, error: md.ShapeError) -> UsageError:
        """What to say when the checkpoint has other parameters, or another optimizer's state, than the run."""
        found = source.restore(step, like={})  # reads the configuration alone
        problems = [line for line in str(error).splitlines() if line.startswith("  ") and ": is " in line]
        shown = [line.replace("like= says", "this run has") for line in problems[:8]]
        more = [f"  and {len(problems) - 8} more"] if len(problems) > 8 else []
        changed = [f"  {line}" for line in _changes(found.config, self.config)]
        what = f"step {found.step} of {source.directory} is of another model or optimizer"
        way_out = "  give this run the configuration that was saved, or another directory"
        return UsageError("\n".join([what, *shown, *more, *changed, way_out]))

    def _source(self) -> tuple[md.Checkpoints | None, int | None]:
        own = self.checkpoints
        if self.resume == "auto":  # the note of the newest step is there although the steps are gone: not fresh
            started = own.steps() or (own.directory / "newest").exists()
            return (own, None) if started else (None, None)
        if self.resume == "never":
            if own.steps():
                raise UsageError(
                    f"--resume never, and {own.directory} has checkpoints up to step {own.steps()[-1]}\n"
                    "  --resume auto goes on from there; a fresh run needs another directory"
                )
            return None, None
        path = Path(self.resume)
        if not self.resume:
            raise UsageError("--resume is auto, never or the path of a checkpoint, and it is empty")
        named = re.fullmatch(r"step-(\d{8,16})", path.name)
        folder = path.parent if named else path
        if not path.is_dir():
            raise UsageError(f"--resume is auto, never or the path of a checkpoint, and there is no {self.resume!r}")
        step = int(named[1]) if named else None
        if own.directory.exists() and os.path.samefile(folder, own.directory):
            return own, step
        return md.Checkpoints(folder, report=own.report), step


@contextlib.contextmanager
def keeping(keep: Keeping | None) -> Iterator[None]:
    """Give the directory free at the end. What went wrong first is what is said."""
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
    """What of the workload's config and the training is not as it was, one line each."""
    found = []
    for table in ("config", "train"):
        old, new = (c.get(table) if isinstance(c, Mapping) else None for c in (before, now))
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            continue
        for key in sorted({*old, *new}):
            if as_json(old.get(key)) != as_json(new.get(key)) and f"{table}.{key}" != "train.steps":
                found.append(f"{table}.{key} was {old.get(key)}, now it is {new.get(key)}")
    return found
