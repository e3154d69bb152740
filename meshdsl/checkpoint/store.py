"""`Checkpoints`: a run's directory of steps, saved beside the computation and restored onto any mesh and layout."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CheckpointError, LayoutError, MeshdslError, SaveError, ShapeError, at, caller
from ..layouts import Layout, Mesh
from ..lowering import Program
from ..values import Tensor
from . import lock, processes
from .directory import clean, is_good, note_newest, remove_step, set_aside, step_numbers
from .files import remove_tree, sync_directory
from .manifest import STEP_LIMIT
from .read import open_step, step_name
from .restore import Restored, Wanted, restore_newest, restore_step
from .trees import check_header, json_value, key_words, tensors_of
from .write import Plan, Snapshot, await_publication, mark_failed, plan, publish, snapshot, write_part

__all__ = ["Checkpoints", "check_step"]


class Checkpoints:
    """The checkpoints of a run, in a directory of their own; the newest `keep` are kept (None: all).

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     _ = checkpoints.save(7, {"w": md.tensor([1.0, 2.0, 3.0], "io")}, data={"batch": 7})
    ...     found = checkpoints.restore(like={"w": md.spec("io:3")}, mesh=md.Mesh("a:1"), layout=md.Layout("io:a"))
    >>> found.step, found.data, found.tree["w"]
    (7, {'batch': 7}, tensor(float32[io=3], [1. 2. 3.]))

    Nothing is written before the first `save`; from then until `close` this program is the directory's only writer
    (`SaveError` when there is another one; `take_over=True` ignores the lock of a writer that is gone, on another
    host). In a program of several processes, all of them make the same calls, and see one file system. `report`
    gets a line about every step that is passed over; by default it is a warning. `seconds` is how long a process
    waits for the parts of the others.
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
        try:
            if keep is not None and not _is_count(keep):
                raise ShapeError(f"keep is a number of steps from 1, or None to keep all; got {keep!r}")
            if not _is_count(chunk_bytes):
                raise ShapeError(f"chunk_bytes is a number of bytes from 1, got {chunk_bytes!r}")
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise ShapeError(f"seconds is a number above 0, got {seconds!r}")
            if report is not None and not callable(report):
                raise ShapeError(f"report is a function of one line of text, got {report!r}")
            if not isinstance(directory, str | Path) or "\0" in str(directory):
                raise ShapeError(f"directory is the path of a directory, got {directory!r}")
        except ShapeError as error:
            raise at(error, caller()) from None
        self.directory, self.keep = Path(directory), keep
        self.chunk_bytes, self.take_over, self.seconds = chunk_bytes, take_over, seconds
        self.report = report or _warn
        self._owner, self._is_writer = secrets.token_hex(8), False
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the last save and give the directory free. Raises `SaveError` when that save failed."""
        atexit.unregister(self.close)
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            if self._is_writer:
                lock.release(self.directory, self._owner)
                self._is_writer = False

    def wait(self) -> None:
        """Wait until what was saved is on the disk. Raises `SaveError` when it could not be written."""
        writing = self._writing
        if writing is None:
            return
        try:
            writing.result()
        finally:
            if writing.done():  # else a signal interrupted the waiting, and the next call goes on with it
                self._writing = None

    def steps(self) -> list[int]:
        """The steps in the directory, ascending."""
        return step_numbers(self.directory)

    def latest(self) -> int | None:
        """The newest step with a sound manifest, or None. Its chunks are checked when they are read."""
        self.wait()
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointError), open_step(self.directory, step):
                return step
        return None

    def verify(self, step: int) -> None:
        """Read all of a step. Raises `CheckpointError`, naming file and key, when it is not what was written."""
        self.wait()
        try:
            check_step(step)
            with open_step(self.directory, step) as reader:
                reader.verify()
        except MeshdslError as error:
            raise at(error, caller()) from None

    def claim(self) -> None:
        """Become the directory's only writer now, and not at the first save; makes the directory.

        Raises `SaveError` when there is another writer, or nothing can be written there.
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
        """Save a pytree of tensors and numbers as a step; returns when it is copied to the host.

        `config` and `data` (the position in the data) are what JSON can hold, `key` a random key. A save that is
        still being written is awaited first; with `wait=False` this one is not done then, and the result is False.
        Raises `SaveError` when the earlier save failed, when another writer has the directory, and when the step or a
        later one is there already; `ShapeError` for what cannot be stored.
        """
        try:
            check_step(step)
            words = None if key is None else key_words(key)
            fields = {"config": json_value(config, "config"), "data": json_value(data, "data"), "key": words}
            tensors = tensors_of(tree)
            check_header(fields, tensors)
            if not wait and not processes.everywhere(self._writing is None or self._writing.done()):
                return False
            self.wait()
            plans = plan(tensors, self.chunk_bytes)
            folder, save = self._begin(step)
            try:
                taken = snapshot(plans, tensors)
            except BaseException:
                mark_failed(folder, processes.index())
                raise
        except MeshdslError as error:
            raise at(error, caller()) from None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "meshdsl-checkpoint")
            atexit.register(self.close)  # who forgets to close still learns of a failed save
        where = processes.index(), processes.count()
        self._writing = self._thread.submit(
            self._write, folder, {"step": step, "save": save, **fields}, plans, taken, *where
        )
        return True

    def _begin(self, step: int) -> tuple[Path, str]:
        """The directory to write to, and the id of the save, which process 0 makes and all get."""
        save = processes.from_first(secrets.token_hex(8).encode("ascii"), 16).decode("ascii")
        folder = self.directory / f"{step_name(step)}.{save}.unfinished"

        def begin() -> None:
            self._become_writer()
            self._make_room(step)
            folder.mkdir()

        self._on_first(f"{step_name(step)} was not saved", begin)
        return folder, save

    def _on_first(self, failure: str, work: Callable[[], None]) -> None:
        """Process 0 works on the directory; when it cannot, every process raises what it says, or that it says it."""
        problem: Exception | None = None
        if processes.index() == 0:
            try:
                work()
            except (OSError, CheckpointError) as error:
                problem = error
        if processes.everywhere(problem is None):
            return
        if isinstance(problem, CheckpointError):
            raise problem
        raise SaveError(f"{failure}: {problem or 'process 0 says why'}") from problem

    def _become_writer(self) -> None:
        if self._is_writer:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        sync_directory(self.directory.parent)
        lock.acquire(self.directory, self._owner, take_over=self.take_over)
        self._is_writer = True

    def _make_room(self, step: int) -> None:
        """Nothing sound may be overwritten, or be newer than what is saved; what is corrupt steps aside."""
        clean(self.directory)
        for there in self.steps():
            if there < step:
                continue
            if is_good(self.directory, there):
                raise SaveError(
                    f"{step_name(step)} was not saved: {step_name(there)} is there already, in {self.directory}\n"
                    f"  to continue from an earlier step, drop the later ones with discard(after={max(step - 1, 0)}), "
                    "or use another directory"
                )
            aside = set_aside(self.directory, there, self._owner)
            self.report(f"{step_name(there)} in {self.directory} is corrupt; its name is {aside} now")

    def _write(
        self, folder: Path, fields: dict[str, Any], plans: list[Plan], taken: list[Snapshot], process: int, count: int
    ) -> None:
        """What the writer's thread does."""
        step, save = fields["step"], fields["save"]
        try:
            write_part(folder, process, taken)
            if process == 0:
                publish(folder, self.directory / step_name(step), fields, plans, count, self.seconds)
            else:
                await_publication(folder, self.directory, step, save, self.seconds)
        except Exception as error:
            with contextlib.suppress(OSError):
                mark_failed(folder, process)
            if process == 0:
                with contextlib.suppress(OSError):
                    remove_tree(folder)
            there = [step_name(s) for s in self.steps()]
            kept = f"the newest that is there is {there[-1]}" if there else "there is no other"
            raise SaveError(f"{step_name(step)} was not saved in {self.directory}: {error}\n  {kept}") from error
        if process == 0:
            self._retire(step)

    def _retire(self, step: int) -> None:
        try:
            for old in self.steps()[: -self.keep] if self.keep else []:
                remove_step(self.directory, old, self._owner)  # first, because it makes room on a disk that is full
            note_newest(self.directory, step)
        except OSError as error:
            raise SaveError(f"{step_name(step)} was saved, but what follows a save was not done: {error}") from error

    def discard(self, after: int) -> None:
        """Remove the steps after this one, to continue from it. Requires that no other program writes here.

        Raises `ShapeError` for what is no step, and `SaveError` when steps cannot be removed.
        """
        self.wait()

        def discard() -> None:
            self._become_writer()
            there = self.steps()
            note_newest(self.directory, max((step for step in there if step <= after), default=None))
            for step in there:
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
        mesh: Mesh | str | None = None,
        layout: Layout | str | dict[str, Any] | None = None,
        program: Program | None = None,
    ) -> Restored:
        """The tree of a step, or of the newest one that is sound; what is passed over is reported by name.

        `like` is a pytree of specs or tensors: dims are found by name, in any order, and what it leaves out is not
        read (None: everything, by path). Given a `program`, a tensor comes to lie as the program's input of the same
        path; given a mesh and a layout, as the layout says; else as the tensor in `like` lies, or whole on one device.
        Every device's part is read and checked alone. Raises `CheckpointError` when the step, or all of them, cannot be
        trusted, `ShapeError` when `like` does not fit what is stored, and `LayoutError` for a layout that cannot be.
        """
        self.wait()
        try:
            if step is not None:
                check_step(step)
            wanted = Wanted(like, *_placement(mesh, layout, program))
            if step is not None:
                return restore_step(self.directory, step, wanted)
            return restore_newest(self.directory, wanted, self.report)
        except MeshdslError as error:
            raise at(error, caller()) from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_step(step: Any) -> None:
    """Raises `ShapeError` for what is no step."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_LIMIT:
        raise ShapeError(f"a step is a whole number from 0 to {STEP_LIMIT}, got {step!r}")


def _placement(mesh: Any, layout: Any, program: Any) -> tuple[Mesh | None, Layout | None, Program | None]:
    """Where restored tensors are to lie, mesh and layout from text as `md.compile` takes them."""
    if program is None:
        mesh = mesh if mesh is None or isinstance(mesh, Mesh) else Mesh(mesh)
        layout = layout if layout is None or isinstance(layout, Layout) else Layout(layout)
        return mesh, layout, None
    if not isinstance(program, Program):
        raise ShapeError(f"program= is what compiled.program(*args) gives, got {type(program).__name__}")
    if mesh is not None or layout is not None:
        raise LayoutError("a program has its mesh and layout already\n  pass program=, or mesh= and layout=, not both")
    return None, None, program


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
