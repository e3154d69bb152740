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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import meshdsl as md

from ..errors import UsageError
from ..errors.values import as_json
from ..optim.per_tensor import path_of
from .iterators import go_to


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
        **more: Any,
    ) -> bool:
        """Save the state; returns False, without saving, if an earlier save is running and `wait` is false.

        `description` is what the data says about itself, to compare when the run resumes; `position` is the state of
        an iterator; `more` are values to compare, such as the rows of a batch.
        """
        data = {
            "step": state.step,
            "seed": seed,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
            **({"description": _short(description)} if description else {}),
            **({"position": position} if position is not None else {}),
        }
        config = {**(self.config or {}), **({"run": more} if more else {})} or None
        key = md.random.key(seed)
        saved = self.checkpoints.save(state.step, state.tree, config=config, data=data, key=key, wait=wait or self.wait)
        state.saved = state.step if saved else state.saved
        return saved

    def restore(
        self,
        like: Any,
        program: md.Program,
        seed: int,
        batches: Any = None,
        description: Mapping[str, Any] | None = None,
        *,
        init: Callable[[Any], Any] | None = None,
        optimizer_changed: bool = False,
        **more: Any,
    ) -> tuple[State, dict[str, Any]] | None:
        """The restored state, and for the record of the resumption its directory, and what changed since it was saved.

        None for a new run. `more` are the values that `save` stored, in this run.

        With `optimizer_changed`, optimizer state that `like` lacks is dropped, and `init(params)` makes what the
        checkpoint lacks. Raises `UsageError` if the checkpoint does not match the run, and `CheckpointError` if no
        checkpoint is valid.
        """
        source, step = self._source()
        if source is None:
            return None
        restored, changes_of_state = self._restored(source, step, like, program)
        self._check_own_steps(source, restored.step)
        where = f"step {restored.step} of {source.directory}"
        data = restored.data if isinstance(restored.data, dict) else {}
        config = restored.config if isinstance(restored.config, dict) else {}
        before = run if isinstance(run := config.get("run"), dict) else {}
        optimizer = (
            _differences("optimizer", before["optimizer"], more.get("optimizer")) if "optimizer" in before else []
        )
        if any(type(data.get(name)) is not int for name in ("seed", "skipped", "skipped_in_a_row")):
            raise UsageError(f"{where} was not saved by `meshdsl train`")
        if data["seed"] != seed:
            raise UsageError(
                f"{where} was trained with seed {data['seed']}, and this run has "
                f"{seed}\n  to continue with the same batches and random numbers, use --seed {data['seed']}"
            )
        if changes_of_state.any and not optimizer_changed:
            way_out = (
                "to continue like this, use --optimizer-changed (optimizer_changed=True); otherwise use the saved "
                "optimizer, or another directory"
            )
            problem = f"{where} has the state of another optimizer"
            raise UsageError("\n  ".join([problem, *optimizer, str(changes_of_state), way_out]))
        go_to(batches, data.get("position"), where)
        saved = restored.step if source is self.checkpoints else -1
        tree = changes_of_state.completed(restored.tree, like, init)
        state = State(tree, restored.step, data["skipped"], data["skipped_in_a_row"], saved)
        changes = [
            *_changes(restored.config, self.config),
            *_differences("data", data.get("description"), _short(description)),
            *([] if "position" in data else _rows(restored.step, before, more, description)),
            *optimizer,
            *_differences("versions", before.get("versions"), more.get("versions")),
            *([str(changes_of_state)] if changes_of_state.any else []),
        ]
        kept = changes_of_state.to_dict()
        return state, {"from": f"{source.directory}", "changed": changes, "optimizer_state": kept}

    def _check_own_steps(self, source: md.Checkpoints, step: int) -> None:
        """Raises `UsageError` if the run's own directory has steps that this run would not continue."""
        own_steps = self.checkpoints.steps()
        if source is not self.checkpoints and own_steps:
            raise UsageError(
                f"{self.checkpoints.directory} already has checkpoints, up to step {own_steps[-1]}, and the run "
                f"would resume from {self.resume}\n  use another directory for this run"
            )
        if self.resume not in ("auto", "never") and own_steps and own_steps[-1] > step:
            raise UsageError(
                f"{self.checkpoints.directory} has checkpoints after step {step}, up to {own_steps[-1]}\n"
                "  use another directory for this run, or remove them first"
            )

    def _restored(
        self, source: md.Checkpoints, step: int | None, like: Any, program: md.Program
    ) -> tuple[md.Restored, StateChanges]:
        """What the checkpoint and the run both have, by path, and how their optimizer states differ."""
        wanted = _by_path(like)
        try:
            restored = source.restore(step, like=wanted, program=program)
        except md.ShapeError as error:
            stored = source.restore(step, like={}).stored
            both = {path: spec for path, spec in wanted.items() if _fits(stored.get(path), spec)}
            if any(not path.startswith("state/") for path in wanted.keys() - both.keys()):
                raise self._other_model(source, step, error) from None
            restored = source.restore(step, like=both, program=program)
        kept = [path for path in wanted if path in restored.tree]
        made = [path for path in wanted if path not in restored.tree]
        dropped = [path for path in restored.stored if path.startswith("state/") and path not in restored.tree]
        return restored, StateChanges(kept, dropped, made)

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


@dataclass(frozen=True)
class StateChanges:
    """The optimizer state that a run keeps from its checkpoint, drops, and makes anew, by path."""

    kept: list[str]
    dropped: list[str]
    made: list[str]

    @property
    def any(self) -> bool:
        return bool(self.dropped or self.made)

    def to_dict(self) -> dict[str, list[str]]:
        """The names of each, by what happens to them."""
        return {name: _entries(getattr(self, name)) for name in ("kept", "dropped", "made")}

    def __str__(self) -> str:
        parts = [f"{name} {', '.join(entries) or 'none'}" for name, entries in self.to_dict().items()]
        return f"optimizer state: {'; '.join(parts)}"

    def completed(self, restored: Mapping[str, Any], like: Any, init: Callable[[Any], Any] | None) -> Any:
        """The tree of the run, with the state that the checkpoint lacks made from the restored parameters."""

        def tree(values: Mapping[str, Any]) -> Any:
            return jax.tree_util.tree_map_with_path(lambda keys, _: values.get(path_of(keys)), like)

        if not self.made or init is None:
            return tree(restored)
        made = _by_path({"state": init(tree(restored)["params"])})
        return tree({**made, **restored})


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree)}


def _fits(stored: Any, wanted: Any) -> bool:
    return stored is not None and (set(stored.dims), stored.dtype) == (set(wanted.dims), wanted.dtype)


def _entries(paths: list[str]) -> list[str]:
    """The entries of optimizer state, with the number of parameters where there are several: `m of 8 parameters`."""
    entries: dict[str, list[str]] = {}
    for path in paths:
        group, name, *parameter = path.split("/", 2)
        if group == "state":
            entries.setdefault(_shown(name), []).extend(_shown(each) for each in parameter)
    return [
        f"{name} of {len(of)} parameters" if len(of) > 3 else f"{name} of {' and '.join(of)}" if of else name
        for name, of in entries.items()
    ]


def _rows(step: int, saved: Mapping[str, Any], now: Mapping[str, Any], description: Any) -> list[str]:
    """How many rows are skipped, or seen twice, because the size of a batch has changed."""
    before, after = saved.get("rows"), now.get("rows")
    ordered = isinstance(description, Mapping) and description.get("kind") in ("tokens", "datasets")
    if type(before) is not int or type(after) is not int or before == after:
        return []
    if isinstance(description, Mapping) and not ordered:
        return [f"a batch had {before} rows, now it has {after}"]
    rows = f"{abs(after - before) * step} rows are {'skipped' if after > before else 'seen twice'}"
    unless = "" if ordered else ", if batches(split, step) reads rows in order"
    return [f"a batch had {before} rows, now it has {after}: {rows}{unless}"]


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
