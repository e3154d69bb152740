"""`Checkpoints`: a directory of saved steps, written in the background and restored onto any mesh and layout."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import CheckpointError, MeshdslError, SaveError, ShapeError, at, caller
from ...layouts import Layout, MeshLike
from ...lowering import Program
from ...trace import Tensor
from . import lock, processes
from .arguments import check_options, check_step, is_url, parse_target, warn
from .directory import clean, is_good, links, note_newest, remove_step, set_aside, step_numbers
from .files import open_root, remove_tree
from .read import open_step, step_name
from .restore import Restored, RestoreRequest, restore_newest, restore_step
from .trees import checked_state
from .write import Snapshot, StoragePlan, await_publication, mark_failed, plan, publish, snapshot, write_part

__all__ = ["Checkpoints"]


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

    A URL (`gs://bucket/run`, `file:///tmp/run`) is written and read by Orbax (`pip install meshdsl[orbax]`), which
    commits a step last; there is no lock, and dims are restored in the order in which they were saved.
    """

    in_store = False  # True: written by Orbax at a URL

    def __new__(cls, directory: str | Path, *args: Any, **kwargs: Any) -> Checkpoints:
        if cls is Checkpoints and is_url(directory):
            store = importlib.import_module(f"{__package__}.object_store")  # a subclass, which imports this module
            return object.__new__(store.StoreCheckpoints)
        return super().__new__(cls)

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
        try:
            check_options(directory, keep, chunk_bytes, report, seconds)
            if Path(directory).is_file():
                raise SaveError(f"directory is the file {directory}; checkpoints are stored in a directory")
        except (ShapeError, SaveError) as error:
            raise at(error, caller()) from None
        self.directory, self.keep = Path(directory), keep
        self.chunk_bytes, self.take_over, self.seconds = chunk_bytes, take_over, seconds
        self.report = report or warn
        self._owner = secrets.token_hex(8)
        self._lock: lock.Held | None = None
        self._reported: set[str] = set()  # links
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the last save and release the lock. Raises `SaveError` if that save failed."""
        atexit.unregister(self.close)
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises `SaveError` if it failed."""
        pending = self._writing
        if pending is None:
            return
        try:
            pending.result()
        finally:
            if pending.done():  # else a signal interrupted the wait, and the next call continues it
                self._writing = None

    def steps(self) -> list[int]:
        """The steps in the directory, ascending."""
        return step_numbers(self.directory)

    def latest(self) -> int | None:
        """The newest step with a valid manifest, or None. Its chunks are not checked."""
        self.wait()
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointError), open_step(self.directory, step):
                return step
        return None

    def verify(self, step: int) -> None:
        """Read and check a whole step. Raises `CheckpointError` naming file and key if it is corrupt."""
        self.wait()
        try:
            check_step(step)
            with open_step(self.directory, step) as reader:
                reader.verify()
        except MeshdslError as error:
            raise at(error, caller()) from None

    def claim(self) -> None:
        """Create and lock the directory now instead of at the first save.

        Raises `SaveError` if there is another writer, or if the directory cannot be written.
        """
        try:
            self._on_first(f"{self.directory} cannot be written", self._become_writer)
        except MeshdslError as error:
            raise at(error, caller()) from None

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
        try:
            check_step(step)
            fields, tensors = checked_state(tree, config, data, key)
            if not wait and not processes.all_processes(self._writing is None or self._writing.done()):
                return False
            self.wait()
            plans = plan(tensors, self.chunk_bytes)
            folder, save = self._begin(step)
            try:
                snapshots = snapshot(plans, tensors)
            except BaseException:
                mark_failed(folder, processes.index())
                raise
        except MeshdslError as error:
            raise at(error, caller()) from None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "meshdsl-checkpoint")
            atexit.register(self.close)  # reports a failed save even without close()
        process_info = processes.index(), processes.count()
        self._writing = self._thread.submit(
            self._write, folder, {"step": step, "save": save, **fields}, plans, snapshots, *process_info
        )
        return True

    def _begin(self, step: int) -> tuple[Path, str]:
        """The directory to write to, and the id of the save, which process 0 creates for all processes."""
        save = processes.from_first(secrets.token_hex(8).encode("ascii"), 16).decode("ascii")
        folder = self.directory / f"{step_name(step)}.{save}.unfinished"

        def begin() -> None:
            self._become_writer()
            self._make_room(step)
            folder.mkdir()

        self._on_first(f"{step_name(step)} was not saved", begin)
        return folder, save

    def _on_first(self, failure: str, work: Callable[[], None]) -> None:
        """Run `work` on process 0; if it fails, every process raises an error."""
        problem: Exception | None = None
        if processes.index() == 0:
            try:
                work()
            except (OSError, CheckpointError) as error:
                problem = error
        if processes.all_processes(problem is None):
            return
        if isinstance(problem, CheckpointError):
            raise problem
        raise SaveError(f"{failure}: {problem or 'see the error of process 0'}") from problem

    def _become_writer(self) -> None:
        if self._lock is not None:
            self._lock.check()
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        with open_root(self.directory.parent) as parent:
            os.fsync(parent)
        self._lock = lock.acquire(self.directory, self._owner, take_over=self.take_over, report=self.report)

    def _links(self) -> list[str]:
        """The steps that are links, which this class leaves alone; each is reported once."""
        names = links(self.directory)
        for name in names:
            if name not in self._reported:
                self._reported.add(name)
                self.report(f"{name} in {self.directory} is a link; it is neither read nor removed")
        return names

    def _make_room(self, step: int) -> None:
        """Raises `SaveError` if this step or a later valid step exists; renames corrupt ones."""
        linked = self._links()
        clean(self.directory)
        for existing in self.steps():
            if existing < step:
                continue
            if step_name(existing) in linked:
                raise SaveError(
                    f"{step_name(step)} was not saved: {step_name(existing)} in {self.directory} is a link\n"
                    "  remove the link, move the step itself back, or use another directory"
                )
            if is_good(self.directory, existing):
                raise SaveError(
                    f"{step_name(step)} was not saved: {step_name(existing)} already exists in {self.directory}\n"
                    f"  to continue from an earlier step, remove later ones with discard(after={max(step - 1, 0)}), "
                    "or use another directory"
                )
            new_name = set_aside(self.directory, existing, self._owner)
            self.report(f"{step_name(existing)} in {self.directory} is corrupt; renamed to {new_name}")

    def _write(
        self,
        folder: Path,
        fields: dict[str, Any],
        plans: list[StoragePlan],
        snapshots: list[Snapshot],
        process: int,
        count: int,
    ) -> None:
        """Write this process's part and publish the step; runs on the writer thread."""
        step, save = fields["step"], fields["save"]
        try:
            write_part(folder, process, snapshots)
            if process == 0:
                assert self._lock is not None  # `save` took it
                publish(folder, self.directory / step_name(step), fields, plans, count, self.seconds, self._lock.check)
            else:
                await_publication(folder, self.directory, step, save, self.seconds)
        except Exception as error:
            with contextlib.suppress(OSError, CheckpointError):
                mark_failed(folder, process)
            if process == 0:
                with contextlib.suppress(OSError, CheckpointError), open_root(self.directory) as root:
                    remove_tree(folder.name, root)
            existing = [step_name(s) for s in self.steps()]
            newest = f"the newest saved step is {existing[-1]}" if existing else "no other step is saved"
            raise SaveError(f"{step_name(step)} was not saved in {self.directory}: {error}\n  {newest}") from error
        if process == 0:
            self._retire(step)

    def _retire(self, step: int) -> None:
        try:
            linked = self._links()
            own = [s for s in self.steps() if step_name(s) not in linked]
            for old in own[: -self.keep] if self.keep else []:
                remove_step(self.directory, old, self._owner)  # first, because it makes room on a disk that is full
            note_newest(self.directory, step)
        except (OSError, CheckpointError) as error:
            raise SaveError(f"{step_name(step)} was saved, but old steps were not removed: {error}") from error

    def discard(self, after: int) -> None:
        """Remove the steps after this one, to continue from it. No other program may write to the directory.

        Raises `ShapeError` if `after` is not a step, and `SaveError` if steps cannot be removed.
        """
        self.wait()

        def discard() -> None:
            self._become_writer()
            existing, linked = self.steps(), links(self.directory)
            if refused := [step_name(s) for s in existing if s > after and step_name(s) in linked]:
                raise SaveError(
                    f"steps after {after} were not discarded: {refused[0]} in {self.directory} is a link\n"
                    "  remove the link first; what it points to is never removed"
                )
            note_newest(self.directory, max((step for step in existing if step <= after), default=None))
            for step in existing:
                if step > after:
                    remove_step(self.directory, step, self._owner)

        try:
            check_step(after)
            self._on_first(f"steps after {after} were not discarded", discard)
        except MeshdslError as error:
            raise at(error, caller()) from None

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
        try:
            if step is not None:
                check_step(step)
            request = RestoreRequest(like, *parse_target(mesh, layout, program))
            if step is not None:
                return restore_step(self.directory, step, request)
            return restore_newest(self.directory, request, self.report)
        except MeshdslError as error:
            raise at(error, caller()) from None
