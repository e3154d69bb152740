"""A block of steps, run on tensors: each step becomes operations of meshdsl, by a table of handlers.

A handler takes the replay, a step and its operands: tensors, or numbers for constants of one element. It returns the
result, or a list of results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import meshdsl as md
from meshdsl import jax_functions

from .steps import BodyStep, OpenedJaxpr, Value
from .tensors import constant, stored, whole


class NotImportedError(Exception):
    """A step that cannot be imported: the reason, and a way out."""


@dataclass
class Replay:
    """Runs blocks. `prefer`: the order in which dims of a product get a mesh axis.

    `refusals`: what cannot be imported, a text each; a refused step gives zeros, so that all are found at once.
    `notes`: what the user should know.
    """

    prefer: Sequence[str] = ()
    refusals: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def preferred(self, t: md.Tensor) -> md.Tensor:
        own = {d.name for d in t.dims}
        names = [name for name in self.prefer if name in own]
        return md.prefer(t, *names) if len(names) > 1 else t

    def note(self, step: BodyStep, text: str) -> None:
        note = f"{step.where}: {text}" if step.where else text
        if note not in self.notes:
            self.notes.append(note)

    def run(self, block: OpenedJaxpr, tensors: Sequence[Any]) -> list[md.Tensor]:
        """The results of a block, with all dims, in the order of their axes."""
        env: dict[Value, Any] = dict(zip(block.ins, tensors, strict=True))

        def read(v: Value) -> Any:
            if v not in env:
                env[v] = constant(v)
            return env[v]

        for step in block.steps:
            with jax_functions.location(step.where) if step.where else contextlib.nullcontext():
                results = self.results(step, [read(v) for v in step.ins])
            env.update(zip(step.outs, results, strict=True))
        return [whole(v, read(v)) for v in block.outs]

    def results(self, step: BodyStep, xs: list[Any]) -> Sequence[Any]:
        try:
            results = _HANDLERS.get(step.primitive, _HANDLERS[OTHERS])(self, step, xs)
        except NotImportedError as refusal:
            where = f" at {step.where}  {step.where.source()}" if step.where else ""
            self.refusals.append(f"{step.primitive}{where}: {refusal}")
            results = [md.full(stored(v), 0, dtype="uint32" if v.is_key else v.dtype) for v in step.outs]
        return results if isinstance(results, list | tuple) else [results]


Handler = Callable[[Replay, BodyStep, list[Any]], Any]
OTHERS = ""  # the name of primitives that have no handler of their own
_HANDLERS: dict[str, Handler] = {}


def operation(*names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of these primitives."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register
