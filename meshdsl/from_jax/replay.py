"""A block of steps, run on tensors: each step becomes the operations of meshdsl that `operations` names for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import meshdsl as md
from meshdsl import jax_functions

from .axes import dims
from .operations import HANDLERS, RefusedError, elementwise
from .operations.fallback import through_local
from .steps import Block, Step, Value
from .tensors import constant, whole


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

    def note(self, step: Step, text: str) -> None:
        note = f"{step.where or 'no line'}: {text}"
        if note not in self.notes:
            self.notes.append(note)

    def run(self, block: Block, tensors: Sequence[Any]) -> list[md.Tensor]:
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

    def results(self, step: Step, xs: list[Any]) -> Sequence[Any]:
        handler = HANDLERS.get(step.name)
        try:
            if handler is None and step.name in jax_functions.ELEMENTWISE:
                handler = elementwise.any_function
            results = (handler or through_local)(self, step, xs)
        except RefusedError as refusal:
            where = f" at {step.where}  {step.where.source()}" if step.where else ""
            self.refusals.append(f"{step.name}{where}: {refusal}")
            results = [md.full(dims(v.axes), 0, dtype=v.dtype) for v in step.outs]
        return results if isinstance(results, list | tuple) else [results]
