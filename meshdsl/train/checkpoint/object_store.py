"""Checkpoints at a URL (`gs://`, `s3://`, `file://`), as Orbax writes them: TensorStore's files, committed last.

A step is an Orbax checkpoint `step-00000012` of two items: `state`, the tensors as the devices store them, and `meta`,
their dims with configuration, data position and random key. Each process reads and writes its own shards. An object
store has no lock, so a run must be the only writer of its URL.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...dims import Dim
from ...errors import CheckpointError, MeshdslError, SaveError, ShapeError, at, caller
from ...ir import Type
from ...layouts import Layout, MeshLike
from ...lowering import Program
from ...trace import KEY_WORD, Tensor, spec_of, tensor, tree
from . import processes
from .arguments import check_options, check_step, parse_target, warn
from .convert import extra, nested
from .device_put import Destination, targets
from .manifest import Header, Manifest, StoredTensor
from .read import step_name
from .restore import Restored
from .store import Checkpoints
from .trees import check_fit, checked_state, flat

__all__ = ["StoreCheckpoints"]


class StoreCheckpoints(Checkpoints):
    """`Checkpoints` of a URL; `chunk_bytes`, `take_over` and `seconds` are for directories."""

    in_store = True

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
        if take_over:
            raise at(ShapeError(f"take_over=True: {directory} is a URL, which has no lock to take over"), caller())
        self.orbax = extra("orbax.checkpoint", "orbax")
        epath = extra("etils.epath", "orbax")
        self.directory = epath.Path(re.sub(r"^file://(?=/)", "", str(directory)))
        self.keep, self.report = keep, report or warn
        self._pending = False

    @cached_property
    def _writer(self) -> Any:
        names = {"state": self.orbax.PyTreeCheckpointHandler(), "meta": self.orbax.JsonCheckpointHandler()}
        return self.orbax.AsyncCheckpointer(self.orbax.CompositeCheckpointHandler(**names))

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if "_writer" in vars(self):
                self.__dict__.pop("_writer").close()

    def wait(self) -> None:
        """Wait until the last save is committed, then remove old steps."""
        if not self._pending:
            return
        self._pending = False
        with self._errors(SaveError, f"the last save to {self.directory} failed"):
            self._writer.wait_until_finished()
            for old in self.steps()[: -self.keep] if self.keep and processes.index() == 0 else []:
                (self.directory / step_name(old)).rmtree()

    def steps(self) -> list[int]:
        with self._errors(CheckpointError, f"{self.directory} cannot be listed"):
            if not self.directory.exists():
                return []
            named = [
                (match, p) for p in self.directory.iterdir() if (match := re.fullmatch(r"step-(\d{8,16})", p.name))
            ]
            return sorted(int(match[1]) for match, p in named if self.orbax.utils.is_checkpoint_finalized(p))

    def latest(self) -> int | None:
        self.wait()
        return max(self.steps(), default=None)

    def verify(self, step: int) -> None:
        """Read a whole step; Orbax's own checksums find corruption."""
        self.restore(step)

    def claim(self) -> None:
        def create() -> None:
            with self._errors(SaveError, f"{self.directory} cannot be written"):
                self.directory.mkdir(parents=True, exist_ok=True)
                for path in self.directory.glob("step-*"):
                    if not self.orbax.utils.is_checkpoint_finalized(path):  # of a killed run
                        path.rmtree()

        self._on_first(f"{self.directory} cannot be written", create)

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
        try:
            check_step(step)
            fields, tensors = checked_state(tree, config, data, key)
            if empty := [path for path, x in tensors.items() if not x.stored.size]:
                raise ShapeError(f"orbax does not support tensors of size 0: {', '.join(empty)}")
            if not wait and not processes.all_processes(not self._writer.is_saving_in_progress()):
                return False
            self.wait()
            if later := [existing for existing in self.steps() if existing >= step]:
                raise SaveError(
                    f"{step_name(step)} was not saved: {step_name(later[-1])} already exists in {self.directory}"
                )
            self.claim()
            types = {p: [[[d.name, d.size] for d in x.dims], x.dtype.name] for p, x in tensors.items()}
            arrays, args = nested({path: x.stored for path, x in tensors.items()}), self.orbax.args
            with self._errors(SaveError, f"{step_name(step)} was not saved in {self.directory}"):
                meta = {"step": step, "tensors": types, **fields}
                both = args.Composite(state=args.PyTreeSave(arrays), meta=args.JsonSave(meta))
                self._pending = True
                self._writer.save(self.directory / step_name(step), args=both)
        except MeshdslError as error:
            raise at(error, caller()) from None
        return True

    def discard(self, after: int) -> None:
        self.wait()
        check_step(after)
        for step in reversed(self.steps()) if processes.index() == 0 else []:
            if step > after:
                with self._errors(SaveError, f"{step_name(step)} in {self.directory} was not removed"):
                    (self.directory / step_name(step)).rmtree()

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        mesh: MeshLike | None = None,
        layout: Layout | str | dict[str, Any] | None = None,
        program: Program | None = None,
    ) -> Restored:
        self.wait()
        try:
            where = parse_target(mesh, layout, program)
            if step is not None:
                check_step(step)
                return self._restored(step, like, *where)
            for newest in reversed(steps := self.steps()):
                try:
                    return self._restored(newest, like, *where)
                except CheckpointError as error:
                    self.report(f"skipped {step_name(newest)} in {self.directory}: {error.args[0]}")
            raise CheckpointError(f"there is no valid checkpoint in {self.directory}; tried: {steps or 'none'}")
        except MeshdslError as error:
            raise at(error, caller()) from None

    def _restored(self, step: int, like: Any, mesh: Any, layout: Any, program: Any) -> Restored:
        args, path = self.orbax.args, self.directory / step_name(step)
        if step not in self.steps():
            raise CheckpointError(f"there is no {step_name(step)} in {self.directory}")
        with self._errors(CheckpointError, f"{step_name(step)} cannot be read"):
            meta: Any = self._writer.restore(path, args=args.Composite(meta=args.JsonRestore())).meta
            types = {
                p: Type(tuple(Dim(name, size) for name, size in shape), np.dtype(dtype))
                for p, (shape, dtype) in meta["tensors"].items()
            }
        wanted = types if like is None else like
        leaves = flat(wanted)
        stored = {p: StoredTensor(p, each, (), ()) for p, each in types.items()}
        check_fit(Manifest(Header(step, "", ()), stored), {p: spec_of(x) for p, x in leaves.items()}, step)
        places = targets(leaves, mesh, layout, program)
        moved = [
            p for p, place in places.items() if [d.name for d in place.type.dims] != [d.name for d in types[p].dims]
        ]
        if moved:
            raise ShapeError(
                f"{moved[0]}: dims are {types[moved[0]]} in {path}; a URL restores dims in the order stored"
            )
        with self._errors(CheckpointError, f"{step_name(step)} cannot be read"):
            arrays = self._arrays(path, places) if places else {}
        tensors = [Tensor(place.type.dims, place.type.dtype, array=arrays[p]) for p, place in places.items()]
        key = None if meta["key"] is None else tensor(np.array(meta["key"], np.uint32), (KEY_WORD,))
        read = sum(shard.data.nbytes for x in arrays.values() for shard in x.addressable_shards)
        restored = tree.tree_unflatten(tree.tree_structure(wanted), tensors)
        return Restored(meta["step"], restored, meta["config"], meta["data"], key, read)

    def _arrays(self, path: Any, places: Mapping[str, Destination]) -> dict[str, jax.Array]:
        """The arrays on their devices: cut, or filled with zeros, to the padding of the new layout."""
        options = {
            p: self.orbax.ArrayRestoreArgs(sharding=place.sharding, global_shape=place.sizes, strict=False)
            for p, place in places.items()
        }
        specs = {p: jax.ShapeDtypeStruct(place.sizes, place.type.dtype) for p, place in places.items()}
        request = self.orbax.args.PyTreeRestore(nested(specs), nested(options), partial_restore=True)
        state = self._writer.restore(path, args=self.orbax.args.Composite(state=request)).state
        return flat(state)

    @contextlib.contextmanager
    def _errors(self, kind: type[CheckpointError], failure: str) -> Any:
        """Turns any exception of Orbax or of the store into an error of this kind."""
        try:
            yield
        except MeshdslError:
            raise
        except Exception as error:
            raise at(kind(f"{failure}: {type(error).__name__}: {str(error)[:300]}"), caller()) from error
