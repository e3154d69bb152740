"""Training data from an iterator whose position is saved with every checkpoint, so that a resumed run is exact.

A `Workload.data` may return a function of split and step, which needs no position, or `Iterated`. The protocol of the
iterator is that of Grain's dataset iterators.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

import meshdsl as md

from ..errors import UsageError


@runtime_checkable
class Stateful(Protocol):
    """An iterator of batches with a position. `get_state()` returns JSON values or bytes, and `set_state` goes there.

    In a program of several processes, every process iterates over the same global batches with the same state.
    """

    def __next__(self) -> Mapping[str, np.ndarray]: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Iterated:
    """Batches of an iterator for training, and of a function for evaluation.

    >>> class Count:
    ...     position = 0
    ...     def __next__(self):
    ...         self.position += 1
    ...         return {"x": np.full(2, self.position)}
    ...     def get_state(self):
    ...         return self.position
    ...     def set_state(self, state):
    ...         self.position = state
    >>> batches = Iterated(Count(), held_out=lambda i: {"x": np.zeros(2)})
    >>> batches("train", 1)["x"], batches("held_out", 0)["x"]
    (array([1, 1]), array([0., 0.]))

    `held_out(i)` is the i-th batch of every evaluation. `describe()` is stored in checkpoints, and reported if it has
    changed when a run resumes. Raises `MeshdslError` if the iterator ends, or is no `Stateful`.
    """

    def __init__(
        self,
        train: Stateful,
        held_out: Callable[[int], Mapping[str, np.ndarray]],
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ):
        if not isinstance(train, Stateful):
            raise md.MeshdslError(
                f"an iterator of batches has the methods __next__, get_state and set_state; got {type(train).__name__}"
            )
        self.train, self.held_out = train, held_out
        self.describe = describe or (lambda: {"kind": "iterator", "type": type(train).__name__})

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        if split != "train":
            return self.held_out(step)
        try:
            return next(self.train)
        except StopIteration:
            raise md.MeshdslError(
                f"the iterator of the training data ended before step {step}\n"
                "  let it repeat, or train for fewer --steps"
            ) from None


def position_of(batches: Any) -> Any:
    """The position of `Iterated` batches as JSON values; None for other data."""
    if not isinstance(batches, Iterated):
        return None
    state = batches.train.get_state()
    return {"base64": base64.b64encode(state).decode("ascii")} if isinstance(state, bytes) else {"state": state}


def go_to(batches: Any, position: Any, where: str) -> None:
    """Go to the position that a checkpoint stores. Raises `UsageError` if it stores none, or the data has no position.

    `where` names the checkpoint.
    """
    has_position = isinstance(position, Mapping) and ("base64" in position or "state" in position)
    if isinstance(batches, Iterated) != has_position:
        stored = "the position of an iterator" if has_position else "no position of an iterator"
        raise UsageError(f"{where} stores {stored}, and this run's data differs\n  use the data of the saved run")
    if has_position:
        coded = position.get("base64")
        batches.train.set_state(base64.b64decode(coded) if isinstance(coded, str) else position["state"])
