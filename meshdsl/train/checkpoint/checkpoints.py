"""`Checkpoints`: saved steps of a run, in a directory or at a URL, restored onto any mesh and layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import CheckpointError
from ...layouts import Layout, MeshLike
from ...lowering import Program
from ...trace import Tensor
from . import processes
from .arguments import check_options, check_step, is_url, parse_target, warn
from .object_store import OrbaxStore
from .restore import Restored, RestoreRequest, Store, restore_newest, restore_step
from .store import DirectoryStore
from .trees import checked_state


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
        request = RestoreRequest(like, *parse_target(mesh, layout, program))
        if step is not None:
            return restore_step(self.store, step, request)
        return restore_newest(self.store, request, self.report)
