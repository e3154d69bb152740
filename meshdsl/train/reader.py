"""Reads the metrics of steps, one step late, so that devices never wait for the host.

It also handles losses and gradients that are not finite. Such a step has changed nothing
(`Workload.train_step(guard=True)`); the run stops, or counts the step as skipped and continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import meshdsl as md

from .state import State

Record = dict[str, Any]


class NonFiniteLoss(md.MeshdslError):
    """A loss or a gradient became NaN or infinite."""

    exit_code = 5
    is_mistake = False


class Recorder:
    """Creates the records of steps and measures their time.

    The time to compile the first step is reported apart, and this step does not count in the mean.
    """

    def __init__(
        self, state: State, steps: int, tokens: int, non_finite: str, max_skips: int, peak_seconds: float | None = None
    ):
        self.state, self.steps, self.tokens, self.peak_seconds = state, steps, tokens, peak_seconds
        self.device = jax.local_devices()[0]
        self.non_finite, self.max_skips = non_finite, max_skips
        self.pending: tuple[int, Mapping[str, md.Tensor]] | None = None
        self.last: tuple[int, float] | None = None
        self.read_one = False
        self.compile_seconds: float | None = None  # of the first step, once it has started
        self.started = time.perf_counter()
        self.seconds, self.counted = 0.0, 0

    def restart(self) -> None:
        """Restart the clock, so that a save or an evaluation does not count as step time."""
        self.started = time.perf_counter()

    def read(self) -> Iterator[Record]:
        """Wait for the pending step, if any, and yield its record.

        Raises `NonFiniteLoss` if its loss or gradient is not finite; in mode "skip", after too many such steps in a
        row.
        """
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        values = {name: float(value.numpy()) for name, value in metrics.items()}
        seconds, self.started = time.perf_counter() - self.started, time.perf_counter()
        non_finite_count = values.pop("non_finite")
        self._count(step, values, non_finite_count)
        compiling: Record = {}
        if not self.read_one and self.compile_seconds is not None:
            compiling = {"compile_seconds": self.compile_seconds}
            seconds = max(seconds - self.compile_seconds, 0.0)
        if self.read_one:
            self.seconds, self.counted = self.seconds + seconds, self.counted + 1
        self.read_one = True
        yield {
            "event": "step",
            "step": step,
            **finite(values),
            "seconds": seconds,
            **compiling,
            **self._rates(step, non_finite_count),
        }

    def _count(self, step: int, values: Mapping[str, float], non_finite_count: float) -> None:
        state = self.state
        if not non_finite_count:
            state.skipped_in_a_row, self.last = 0, (step, values["loss"])
            return
        state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
        if self.non_finite == "stop":
            raise NonFiniteLoss(_diverged(step, values, non_finite_count, self.last))
        if state.skipped_in_a_row >= self.max_skips:
            raise NonFiniteLoss(
                f"{state.skipped_in_a_row} steps in a row were skipped\n"
                f"  {_diverged(step, values, non_finite_count, self.last)}"
            )

    def _rates(self, step: int, non_finite_count: float) -> Record:
        """Tokens per second, utilisation and seconds left, from the mean over all steps, which overlap with reading.

        Also the peak memory of one device, where the platform reports it.
        """
        rates: Record = {}
        if self.device is not None:
            stats = self.device.memory_stats() or {}
            if "peak_bytes_in_use" in stats:
                rates["peak_bytes"] = stats["peak_bytes_in_use"]
            else:
                self.device = None  # CPU devices report nothing
        if self.counted:
            mean = self.seconds / self.counted
            rates["seconds_left"] = mean * (self.steps - step)
            if self.tokens:
                rates["tokens_per_second"] = self.tokens / mean
            if self.peak_seconds:
                rates["mfu"] = self.peak_seconds / mean
        return {**rates, "skipped": True} if non_finite_count else rates


def finite(values: Mapping[str, float]) -> Record:
    """The values, with None for NaN and infinity, which JSON does not support."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _diverged(step: int, values: Mapping[str, float], non_finite_count: float, last: tuple[int, float] | None) -> str:
    loss = values["loss"]
    others = ", ".join(f"{name} {value:.6g}" for name, value in values.items() if name != "loss")
    context = f"it was {last[1]:.6g} at step {last[0]}" if last else "this is the first step of this run"
    problem = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        problem = f"the gradient of step {step} has {non_finite_count:.0f} elements that are not finite"
        context = f"the loss is {loss:.6g}"
    return (
        f"{problem}\n"
        f"  {context}{f'; this step has {others}' if others else ''}\n"
        "  try a lower learning rate, a longer warm-up, or gradient clipping"
    )
