"""`Checkpoints`: saved steps of a run, in a directory or at a URL, restored onto any mesh and layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ...errors import CheckpointError
from ...ir import Type
from ...layouts import Layout, MeshLike
from ...lowering import Program
from ...trace import KEY_WORD, Tensor, spec_of, tensor, tree
from . import processes
from .arguments import check_fit, check_options, check_step, checked_state, flat, is_url, parse_target, warn
from .device_put import targets
from .object_store import OrbaxReader, OrbaxStore
from .read import StepReader, step_name
from .store import DirectoryStore

Store = DirectoryStore | OrbaxStore
OpenStep = StepReader | OrbaxReader


@dataclass(frozen=True)
class Restored:
    """The result of `Checkpoints.restore`.

    `tree` has the structure of `like`, with its tensors on devices. `config`, `data` and `key` are those given to
    `save`. `bytes_read` is the number of tensor bytes that this process read. `stored` has the types of all tensors of
    the step, by path, also of those that are not in `like`.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     tree = {"w": md.tensor([1.0, 2.0], "io"), "v": md.tensor([3.0], "hidden")}
    ...     _ = checkpoints.save(7, tree, config={"lr": 0.1})
    ...     restored = checkpoints.restore(like={"w": md.spec("io:2")})
    >>> restored.step, restored.tree, restored.config, restored.data, restored.key, restored.bytes_read
    (7, {'w': tensor(float32[io=2], [1. 2.])}, {'lr': 0.1}, None, None, 8)
    """

    step: int
    tree: Any
    config: Any
    data: Any
    key: Tensor | None
    bytes_read: int
    stored: Mapping[str, Type]


class Checkpoints:
    """The checkpoints of a run in a directory; only the newest `keep` steps are kept (None: all).

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     _ = checkpoints.save(7, {"w": md.tensor([1.0, 2.0, 3.0], "io")}, data={"batch": 7})
    ...     restored = checkpoints.restore(like={"w": md.spec("io:3")}, mesh=md.Mesh("a:1"), layout=md.Layout("io:a"))
    >>> restored.step, restored.data, restored.tree["w"]
    (7, {'batch': 7}, tensor(float32[io=3], [1. 2. 3.]))

    The first `save` creates and locks the directory; until `close`, this program is its only writer (`SaveError` if
    there is another one). `take_over=True` replaces the lock of a writer on another machine whose heartbeat has
    stopped, and waits up to a minute to know. In a program of several processes, all processes must make the same
    calls and share one file system. `report` receives a line about every skipped step; the default issues a warning.
    `seconds` is the time a process waits for the other processes' parts.

    A URL (`gs://bucket/run`, `file:///tmp/run`) is written and read by Orbax (the extra `orbax`), which commits a step
    last; a file with the time of its writer's heartbeat replaces the lock, and dims are restored in the order stored.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int | None = 3,
        *,
        chunk_bytes: int = 4 << 20,
        take_over: bool = False,
        report: Callable[[str], object] | None = None,
        seconds: float = 600.0,
    ):
        check_options(directory, keep, chunk_bytes, report, seconds)
        self.keep, self.report = keep, report or warn
        if is_url(directory):
            self.store: Store = OrbaxStore(str(directory), keep, take_over, self.report)
        else:
            self.store = DirectoryStore(Path(directory), keep, chunk_bytes, take_over, self.report, seconds)

    @property
    def directory(self) -> Any:
        """The directory, as a `Path`, or the URL, as the path object of Orbax."""
        return self.store.directory

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the last save and release the lock. Raises `SaveError` if that save failed."""
        self.store.close()

    def wait(self) -> None:
        """Wait until the last save is stored. Raises `SaveError` if it failed."""
        self.store.wait()

    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        return self.store.steps()

    def latest(self) -> int | None:
        """The newest step whose description is valid, or None. Its tensors are not checked."""
        self.wait()
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointError), self.store.open(step):
                return step
        return None

    def verify(self, step: int) -> None:
        """Read and check a whole step. Raises `CheckpointError` naming file and key if it is corrupt."""
        self.wait()
        check_step(step)
        with self.store.open(step) as reader:
            reader.verify()

    def claim(self) -> None:
        """Create the directory, and lock it, now instead of at the first save.

        Raises `SaveError` if there is another writer, or if the directory cannot be written.
        """
        self.store.claim()

    def save(
        self,
        step: int,
        tree: Any,
        *,
        config: Any = None,
        data: Any = None,
        key: Tensor | None = None,
        wait: bool = True,
    ) -> bool:
        """Save a pytree of tensors and numbers as a step; returns True once it is copied to the host.

        A thread writes the files in the background. `config` and `data` (the position in the data) are JSON values;
        `key` is a random key. If an earlier save is still being written, this call waits for it; with `wait=False`,
        this save is skipped and the result is False. Raises `SaveError` if the earlier save failed, if another writer
        holds the lock, or if this step or a later one exists; raises `ShapeError` for values that cannot be stored.
        """
        check_step(step)
        fields, tensors = checked_state(tree, config, data, key)
        if not wait and not processes.all_processes(not self.store.is_writing()):
            return False
        self.wait()
        self.store.save(step, fields, tensors)
        return True

    def discard(self, after: int) -> None:
        """Remove the steps after this one, to continue from it. No other program may write to the directory.

        Raises `ShapeError` if `after` is not a step, and `SaveError` if steps cannot be removed.
        """
        self.wait()
        check_step(after)
        self.store.discard(after)

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        mesh: MeshLike | None = None,
        layout: Layout | str | dict[str, Any] | None = None,
        program: Program | None = None,
    ) -> Restored:
        """Restore a step, by default the newest valid one; skipped steps are reported by name.

        `like` is a pytree of specs or tensors. Dims are matched by name, in any order. Only tensors in `like` are read
        (None: all, as a dict by path). With a `program`, each tensor gets the sharding of the program's input of the
        same path; with a mesh and a layout, that of the layout; otherwise that of the tensor in `like`, or one device
        for a spec. Each process reads and checks only the shards of its devices. Raises `CheckpointError` if the step,
        or every step, is corrupt, `ShapeError` if `like` does not match the stored tensors, and `LayoutError` for an
        illegal layout.
        """
        self.wait()
        if step is not None:
            check_step(step)
        wanted = like, *parse_target(mesh, layout, program)
        return self._newest(*wanted) if step is None else self._restored(step, *wanted)

    def _newest(self, *wanted: Any) -> Restored:
        """Restores the newest valid step; reports each lost, unfinished or skipped step."""
        for line in self.store.problems():
            self.report(line)
        invalid: dict[int, str] = {}
        while True:
            # Listed again each time, because a running writer may have removed a step and saved a newer one.
            newest = max((s for s in self.steps() if s not in invalid), default=-1)
            step = int(processes.gathered(str(newest).encode("ascii"))[0])
            if step < 0:
                problem = f"there is no valid checkpoint in {self.directory}"
                raise CheckpointError("\n  ".join([problem, *invalid.values()]))
            try:
                return self._restored(step, *wanted)
            except CheckpointError as error:
                invalid[step] = str(error.args[0])
                self.report(f"skipped {step_name(step)} in {self.directory}: {error.args[0]}")

    def _restored(self, step: int, *wanted: Any) -> Restored:
        """Restores a step; raises `CheckpointError` in all processes if one of them cannot read its part."""
        restored: Restored | None = None
        problem = CheckpointError(f"{step_name(step)}: another process cannot read its part; see its error")
        try:
            with self.store.open(step) as reader:
                restored = self._read(reader, *wanted)
        except CheckpointError as error:
            problem = error
        if not processes.all_processes(restored is not None) or restored is None:
            raise problem
        return restored

    def _read(self, reader: OpenStep, like: Any, *target: Any) -> Restored:
        stored, header = reader.manifest, reader.manifest.header
        types = {path: entry.type for path, entry in stored.tensors.items()}
        like = types if like is None else like
        leaves = flat(like)
        check_fit(stored, {path: spec_of(x) for path, x in leaves.items()}, header.step)
        restored = self.store.place(reader, targets(leaves, *target))
        key = None if header.key is None else tensor(np.array(header.key, np.uint32), (KEY_WORD,))
        restored_tree = tree.tree_unflatten(tree.tree_structure(like), restored)
        return Restored(header.step, restored_tree, header.config, header.data, key, reader.bytes_read, types)
