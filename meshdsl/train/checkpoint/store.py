"""Steps in a directory, in meshdsl's own format: written by a thread, under a lock, and published last."""

from __future__ import annotations

import atexit
import contextlib
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from ...errors import CheckpointError, SaveError, at, caller
from ...trace import Tensor
from . import lock, processes
from .device_put import Destination, device_put
from .directory import clean, is_good, lost_newest, note_newest, set_aside, step_numbers, unfinished
from .files import remove_tree, sync
from .read import StepReader, open_step, step_name
from .write import Copies, Save, plan, snapshot


class DirectoryStore:
    """The steps in a directory; see `Checkpoints` for the options. All processes make the same calls."""

    def __init__(
        self,
        directory: Path,
        keep: int | None,
        chunk_bytes: int,
        take_over: bool,
        report: Callable[[str], object],
        seconds: float,
    ):
        if directory.is_file():
            raise SaveError(f"directory is the file {directory}; checkpoints are stored in a directory")
        self.directory, self.keep = directory, keep
        self.chunk_bytes, self.take_over, self.report, self.seconds = chunk_bytes, take_over, report, seconds
        self._owner = secrets.token_hex(8)
        self._lock: lock.Held | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def close(self) -> None:
        """Wait, and stop to be the writer."""
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
        """Wait until the step is stored and old steps are removed; raises `SaveError` if this failed."""
        pending = self._writing
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointError as error:
            raise at(error, caller()) from error.__cause__
        finally:
            if pending.done():  # else a signal interrupted the wait, and the next call continues it
                self._writing = None

    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        return step_numbers(self.directory)

    def problems(self) -> list[str]:
        """A line for each step that is lost or unfinished."""
        interrupted = [f"{name} in {self.directory} is an unfinished save" for name in unfinished(self.directory)]
        return lost_newest(self.directory) + interrupted

    def open(self, step: int) -> contextlib.AbstractContextManager[StepReader]:
        """Open a step; raises `CheckpointError` if its description is missing or invalid."""
        return open_step(self.directory, step)

    def place(self, reader: Any, places: Mapping[str, Destination]) -> list[Tensor]:
        """The tensors of these paths on their devices; each process reads its own shards."""
        return [device_put(reader, reader.manifest.tensors[path], place) for path, place in places.items()]

    def claim(self) -> None:
        """Become the writer; raises `SaveError` if that is impossible."""
        processes.on_first(f"{self.directory} cannot be written", self._become_writer)

    def is_writing(self) -> bool:
        """True while this process writes a step in the background."""
        return self._writing is not None and not self._writing.done()

    def save(self, step: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Start to write a step after `wait`; returns once the tensors are copied to the host."""
        plans = plan(tensors, self.chunk_bytes)
        folder, unique = self._begin(step)
        header = {"step": step, "save": unique, **fields}
        save = Save(folder, self.directory / step_name(step), header, plans, self.seconds)
        try:
            copied = snapshot(plans, tensors)
        except BaseException:
            save.mark_failed()
            raise
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "meshdsl-checkpoint")
            atexit.register(self.close)  # reports a failed save even without close()
        self._writing = self._thread.submit(self._write, step, save, copied)

    def discard(self, after: int) -> None:
        """Remove the steps after this one."""

        def discard() -> None:
            self._become_writer()
            existing = self.steps()
            note_newest(self.directory, max((step for step in existing if step <= after), default=None))
            for step in existing:
                if step > after:
                    self._remove(step)

        processes.on_first(f"steps after {after} were not discarded", discard)

    def _begin(self, step: int) -> tuple[Path, str]:
        """The directory to write to, and the id of the save, which process 0 creates for all processes."""
        save = processes.gathered(secrets.token_hex(8).encode("ascii"))[0].decode("ascii")
        folder = self.directory / f"{step_name(step)}.{save}.unfinished"

        def begin() -> None:
            self._become_writer()
            self._make_room(step)
            folder.mkdir()

        processes.on_first(f"{step_name(step)} was not saved", begin)
        return folder, save

    def _become_writer(self) -> None:
        if self._lock is not None:
            self._lock.check()
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        sync(self.directory.parent)
        self._lock = lock.acquire(self.directory, self._owner, take_over=self.take_over, report=self.report)

    def _make_room(self, step: int) -> None:
        """Raises `SaveError` if this step or a later valid step exists; renames corrupt ones."""
        clean(self.directory)
        for existing in self.steps():
            if existing < step:
                continue
            if is_good(self.directory, existing):
                raise SaveError(
                    f"{step_name(step)} was not saved: {step_name(existing)} already exists in {self.directory}\n"
                    f"  to continue from an earlier step, remove later ones with discard(after={max(step - 1, 0)}), "
                    "or use another directory"
                )
            new = set_aside(self.directory, existing, f"{self._owner}.bad")
            self.report(f"{step_name(existing)} in {self.directory} is corrupt; renamed to {new.name}")

    def _remove(self, step: int) -> None:
        remove_tree(set_aside(self.directory, step, f"{self._owner}.removed"))

    def _write(self, step: int, save: Save, copied: list[Copies]) -> None:
        """Write this process's part and publish the step; runs on the writer thread."""
        is_first = jax.process_index() == 0
        try:
            save.write_part(copied)
            if is_first:
                assert self._lock is not None  # `save` took it
                save.publish(self._lock.check)
            else:
                save.await_publication()
        except Exception as error:
            with contextlib.suppress(OSError):
                save.mark_failed()
            if is_first:
                with contextlib.suppress(OSError):
                    remove_tree(save.folder)
            existing = [step_name(s) for s in self.steps()]
            newest = f"the newest saved step is {existing[-1]}" if existing else "no other step is saved"
            raise SaveError(f"{step_name(step)} was not saved in {self.directory}: {error}\n  {newest}") from error
        if is_first:
            self._retire(step)

    def _retire(self, step: int) -> None:
        try:
            for old in self.steps()[: -self.keep] if self.keep else []:
                self._remove(old)  # first, because it makes room on a disk that is full
            note_newest(self.directory, step)
        except (OSError, CheckpointError) as error:
            raise SaveError(f"{step_name(step)} was saved, but old steps were not removed: {error}") from error
