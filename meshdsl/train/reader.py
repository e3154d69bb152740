"""Reads the metrics of steps: one step late, so that reading costs no step any time.

What is not finite is noticed here: the step has left everything as it was (`Workload.train_step(guard=True)`), and
the run stops, or counts it and goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import meshdsl as md

from .state import State

__all__ = ["NonFiniteLoss", "Reader", "Record", "finite"]

Record = dict[str, Any]


class NonFiniteLoss(md.MeshdslError):
    """A loss or a gradient became NaN or infinite."""

    exit_code = 5


class Reader:
    """The records of steps, and their time. That of the first step, which compiles, is not counted."""

    def __init__(self, state: State, steps: int, tokens: int, non_finite: str, max_skips: int):
        self.state, self.steps, self.tokens = state, steps, tokens
        self.non_finite, self.max_skips = non_finite, max_skips
        self.pending: tuple[int, Mapping[str, md.Tensor]] | None = None
        self.last: tuple[int, float] | None = None
        self.read_one = False
        self.started = time.perf_counter()
        self.seconds, self.counted = 0.0, 0

    def restart(self) -> None:
        """What happened since the last step is not the next one's time."""
        self.started = time.perf_counter()

    def read(self) -> Iterator[Record]:
        """The record of the step that is on its way, if there is one.

        Raises `NonFiniteLoss` when its loss or gradient is not finite, or too many in a row were not.
        """
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        values = {name: float(value.numpy()) for name, value in metrics.items()}
        seconds, self.started = time.perf_counter() - self.started, time.perf_counter()
        bad = values.pop("non_finite")
        self._count(step, values, bad)
        if self.read_one:
            self.seconds, self.counted = self.seconds + seconds, self.counted + 1
        self.read_one = True
        yield {"event": "step", "step": step, **finite(values), "seconds": seconds, **self._rates(step, bad)}

    def _count(self, step: int, values: Mapping[str, float], bad: float) -> None:
        state = self.state
        if not bad:
            state.skipped_in_a_row, self.last = 0, (step, values["loss"])
            return
        state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
        if self.non_finite == "stop":
            raise NonFiniteLoss(_diverged(step, values, bad, self.last))
        if state.skipped_in_a_row >= self.max_skips:
            raise NonFiniteLoss(
                f"{state.skipped_in_a_row} steps in a row were skipped\n  {_diverged(step, values, bad, self.last)}"
            )

    def _rates(self, step: int, bad: float) -> Record:
        """Means of the steps so far: one step is read while the next one runs, so its own time says little."""
        found: Record = {}
        if self.counted:
            mean = self.seconds / self.counted
            found["seconds_left"] = mean * (self.steps - step)
            if self.tokens:
                found["tokens_per_second"] = self.tokens / mean
        return {**found, "skipped": True} if bad else found


def finite(values: Mapping[str, float]) -> Record:
    """The numbers of a record: None for what is not finite, which JSON cannot hold."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _diverged(step: int, values: Mapping[str, float], bad: float, last: tuple[int, float] | None) -> str:
    loss = values["loss"]
    others = ", ".join(f"{name} {value:.6g}" for name, value in values.items() if name != "loss")
    before = f"it was {last[1]:.6g} at step {last[0]}" if last else "it was so from the beginning"
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient of step {step} has {bad:.0f} numbers that are not finite"
        before = f"the loss is {loss:.6g}"
    return (
        f"{what}\n"
        f"  {before}{f'; this step has {others}' if others else ''}\n"
        "  try a lower learning rate, a longer warm-up, or clipping of the gradient's norm"
    )
