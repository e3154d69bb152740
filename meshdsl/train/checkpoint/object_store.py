"""Steps at a URL (`gs://`, `s3://`, `file://`), as Orbax writes them: TensorStore's files, committed last.

A step is an Orbax checkpoint `step-00000012` of two items: `state`, the tensors as the devices store them, and `meta`,
their dims with configuration, data position and random key. Each process reads and writes its own shards. An object
store has no lock: the file `owner` names the run that writes, and `newest` its last step, so that its loss is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...dims import Dim
from ...errors import CheckpointError, MeshdslError, SaveError, ShapeError
from ...errors.installed import optional
from ...ir import Type
from ...trace import Tensor
from . import processes
from .arguments import flat
from .device_put import Destination, targets
from .digest import sums
from .directory import lost
from .manifest import Header, Manifest, StoredTensor
from .owner import Owner
from .read import STEP, step_name

NEWEST = "newest"
OWN_FORMAT = "use meshdsl's own format, a directory"


class OrbaxStore:
    """The steps at a URL, with the methods of `DirectoryStore`."""

    def __init__(self, url: str, keep: int | None, take_over: bool, report: Callable[[str], object]):
        self.orbax = optional("orbax.checkpoint", "orbax", OWN_FORMAT)
        self.directory = optional("etils.epath", "orbax", OWN_FORMAT).Path(re.sub(r"^file://(?=/)", "", url))
        self.keep = keep
        self._writing: Future[None] | None = None
        self._owner = Owner(self.directory, take_over, report)

    @cached_property
    def _writer(self) -> Any:
        names = {"state": self.orbax.PyTreeCheckpointHandler(), "meta": self.orbax.JsonCheckpointHandler()}
        return self.orbax.AsyncCheckpointer(self.orbax.CompositeCheckpointHandler(**names))

    @cached_property
    def _waiter(self) -> ThreadPoolExecutor:
        """A thread that waits for a save: Orbax's writer does not say whether it still writes."""
        return ThreadPoolExecutor(1, "meshdsl-orbax")

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if "_waiter" in vars(self):
                self.__dict__.pop("_waiter").shutdown()
            if "_writer" in vars(self):
                self.__dict__.pop("_writer").close()
            self._owner.release()

    def wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        with library_errors(SaveError, f"the last save to {self.directory} failed"):
            writing.result()
        self._remove(self.steps()[: -self.keep] if self.keep else [])

    def _remove(self, steps: list[int]) -> None:
        for step in steps if jax.process_index() == 0 else []:
            with library_errors(SaveError, f"{step_name(step)} in {self.directory} was not removed"):
                (self.directory / step_name(step)).rmtree()

    def steps(self) -> list[int]:
        is_committed = self.orbax.utils.is_checkpoint_finalized
        with library_errors(CheckpointError, f"{self.directory} cannot be listed"):
            paths = [p for p in self.directory.iterdir() if STEP.fullmatch(p.name)] if self.directory.exists() else []
            return sorted(int(p.name.removeprefix("step-")) for p in paths if is_committed(p))

    def problems(self) -> list[str]:
        """A line for the newest step, if it is lost. A step that is not committed is not listed."""
        newest = self.directory / NEWEST
        with contextlib.suppress(Exception):  # it is only a hint
            return lost(newest.read_text(), self.steps(), self.directory)
        return []

    def _note_newest(self, step: int | None) -> None:
        if jax.process_index() == 0:
            (self.directory / NEWEST).write_text(json.dumps({"step": step}))

    def _finish(self, step: int) -> None:
        """Wait until a step is committed, on the thread `_waiter`."""
        self._writer.wait_until_finished()
        self._note_newest(step)

    def claim(self) -> None:
        def create() -> None:
            with library_errors(SaveError, f"{self.directory} cannot be written"):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._owner.claim()
                for path in self.directory.glob("step-*"):
                    if not self.orbax.utils.is_checkpoint_finalized(path):  # of a killed run
                        path.rmtree()

        processes.on_first(f"{self.directory} cannot be written", create)

    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def save(self, step: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if empty := [path for path, x in tensors.items() if not x.stored.size]:
            raise ShapeError(f"orbax does not support tensors of size 0: {', '.join(empty)}")
        if later := [existing for existing in self.steps() if existing >= step]:
            raise SaveError(
                f"{step_name(step)} was not saved: {step_name(later[-1])} already exists in {self.directory}"
            )
        self.claim()
        types = {p: [[[d.name, d.size] for d in x.dims], x.dtype.name] for p, x in tensors.items()}
        arrays, args = nested({path: x.stored for path, x in tensors.items()}), self.orbax.args
        with library_errors(SaveError, f"{step_name(step)} was not saved in {self.directory}"):
            meta = {"step": step, "tensors": types, "sums": sums(tensors), **fields}
            saved = args.JsonSave({**meta, "sha256": _sha256(meta)})
            both = args.Composite(state=args.PyTreeSave(arrays), meta=saved)
            self._writer.save(self.directory / step_name(step), args=both)
            self._writing = self._waiter.submit(self._finish, step)

    def discard(self, after: int) -> None:
        self.claim()
        steps = self.steps()
        with library_errors(SaveError, f"{NEWEST} in {self.directory} was not written"):
            self._note_newest(max((step for step in steps if step <= after), default=None))
        self._remove([step for step in reversed(steps) if step > after])

    @contextlib.contextmanager
    def open(self, step: int) -> Iterator[OrbaxReader]:
        if step not in self.steps():
            raise CheckpointError(f"there is no {step_name(step)} in {self.directory}")
        args = self.orbax.args
        with library_errors(CheckpointError, f"{step_name(step)} cannot be read"):
            path = self.directory / step_name(step)
            meta: Any = self._writer.restore(path, args=args.Composite(meta=args.JsonRestore())).meta
            unhashed = not meta.keys() & {"sha256", "sums"}  # of 0.2.0
            if not unhashed and meta.pop("sha256", None) != _sha256(meta):
                raise CheckpointError(f"{step_name(step)} cannot be read: its meta does not have its SHA-256")
            if meta["step"] != step:
                raise CheckpointError(f"{step_name(step)} cannot be read: it is step {meta['step']}, moved")
            stored = {
                p: StoredTensor(p, Type(tuple(Dim(name, size) for name, size in dims), np.dtype(dtype)), (), ())
                for p, (dims, dtype) in meta["tensors"].items()
            }
            header = Header(meta["step"], "", (), meta["config"], meta["data"], meta["key"])
            yield OrbaxReader(self, path, Manifest(header, stored), None if unhashed else meta["sums"])

    def place(self, reader: Any, places: Mapping[str, Destination]) -> list[Tensor]:
        types = {path: reader.manifest.tensors[path].type for path in places}
        names = {path: [d.name for d in of.dims] for path, of in types.items()}
        moved = [path for path, place in places.items() if [d.name for d in place.type.dims] != names[path]]
        if moved:
            raise ShapeError(
                f"{moved[0]}: dims are {types[moved[0]]} in {reader.path}; a URL restores dims in the order stored"
            )
        found: dict[str, Tensor] = {}
        problem = None
        try:
            with library_errors(CheckpointError, f"{reader.path.name} cannot be read"):
                arrays = reader.arrays(places) if places else {}
                found = {p: Tensor(place.type.dims, place.type.dtype, array=arrays[p]) for p, place in places.items()}
        except CheckpointError as error:
            problem = error
        if not processes.all_processes(problem is None):
            raise problem or CheckpointError(f"{reader.path.name}: another process cannot read its part; see its error")
        known = reader.sums
        if known is not None and (corrupt := [path for path, value in sums(found).items() if value != known[path]]):
            raise CheckpointError(
                f"{reader.path.name} is corrupt: {', '.join(corrupt[:5])}: the sum of its bits differs"
            )
        return list(found.values())


class OrbaxReader:
    """An open step, like `read.StepReader`, and the sums of the bits of its tensors; Orbax has none of their data."""

    def __init__(self, store: OrbaxStore, path: Any, manifest: Manifest, sums: Mapping[str, int] | None):
        self.store, self.path, self.manifest, self.sums, self.bytes_read = store, path, manifest, sums, 0

    def arrays(self, places: Mapping[str, Destination]) -> dict[str, jax.Array]:
        """The arrays on their devices: cut, or filled with zeros, to the padding of the new layout."""
        orbax = self.store.orbax
        options = {
            p: orbax.ArrayRestoreArgs(sharding=place.sharding, global_shape=place.sizes, strict=False)
            for p, place in places.items()
        }
        specs = {p: jax.ShapeDtypeStruct(place.sizes, place.type.dtype) for p, place in places.items()}
        request = orbax.args.PyTreeRestore(nested(specs), nested(options), partial_restore=True)
        found = flat(self.store._writer.restore(self.path, args=orbax.args.Composite(state=request)).state)
        self.bytes_read += sum(shard.data.nbytes for x in found.values() for shard in x.addressable_shards)
        return found

    def whole(self, entry: StoredTensor) -> np.ndarray:
        place = targets({entry.path: entry.type}, None, None, None)
        return self.store.place(self, place)[0].numpy()

    def verify(self) -> None:
        for entry in self.manifest.tensors.values():
            self.whole(entry)


def _sha256(meta: Mapping[str, Any]) -> str:
    """The hash of what a step says about itself."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def library_errors(kind: type[CheckpointError], failure: str) -> Iterator[None]:
    """Turns any exception of another library, each of which raises its own, into an error of this kind."""
    try:
        yield
    except MeshdslError:
        raise
    except Exception as error:
        raise kind(f"{failure}: {type(error).__name__}: {str(error)[:300]}") from error


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays as nested dicts, from which orbax derives its file names."""
    tree: dict[str, Any] = {}
    for path, values in arrays.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                raise ShapeError(f"orbax cannot store both {path!r} and a tensor whose path is a prefix of it")
        inner[name] = values
    return tree
