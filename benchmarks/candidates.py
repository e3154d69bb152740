"""A candidate is one way to run a training step, with what is needed to time it, read it and check it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import meshdsl as md
from benchmarks import hlo, ratio

LOSS_TOLERANCE = 1e-5  # relative: float32 sums in another order


@dataclass
class Candidate:
    """`step` takes a state to (the next state, the loss); `host` takes it to whole host arrays by name."""

    executable: jax.stages.Compiled
    state: object
    step: Callable[[object], tuple[object, object]]
    host: Callable[[object], dict[str, np.ndarray]] = field(default=lambda state: flat(state))

    @staticmethod
    def of_meshdsl(compiled: md.Compiled, state: object, *batch: object) -> Candidate:
        """A compiled step (state, *batch) -> (state, loss), called as the others are: by its executable."""
        executable = compiled.lower(state, *batch).compile()
        leaves, structure = jax.tree_util.tree_flatten(state)
        tensors = [*leaves, *jax.tree_util.tree_leaves(batch)]
        arrays = [
            jax.device_put(np.asarray(x.numpy()), at)
            for x, at in zip(tensors, executable.input_shardings[0], strict=True)
        ]
        n = len(leaves)

        def step(state: Any) -> tuple[Any, object]:
            *state, loss = executable(*state, *arrays[n:])
            return state, loss

        return Candidate(executable, arrays[:n], step, lambda state: flat(structure.unflatten(state)))

    def __call__(self) -> object:
        """One blocking step."""
        self.state, loss = self.step(self.state)
        jax.block_until_ready((self.state, loss))
        return loss


def flat(tree: object) -> dict[str, np.ndarray]:
    """The leaves of a tree as host arrays, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf) for path, leaf in leaves}


def worst_difference(start: Mapping, expected: Mapping, actual: Mapping) -> tuple[float, str]:
    """The worst array and the norm of how far it is off, as a part of the norm of its change since the start.

    Measured against the change and not the value, because a step is small beside the parameters it changes.
    """
    if expected.keys() != actual.keys():
        raise ValueError(f"the states do not have the same arrays: {sorted(expected.keys() ^ actual.keys())}")

    def off(name: str) -> float:
        before, a, b = (np.asarray(state[name], np.float64) for state in (start, expected, actual))
        return float(np.linalg.norm(a - b) / np.linalg.norm(a - before)) if a.size else 0.0

    worst = {name: off(name) for name in expected}
    # A NaN is larger than every number here.
    name = max(worst, key=lambda n: float("inf") if np.isnan(worst[n]) else worst[n])
    return worst[name], name


def compare(candidates: Mapping[str, Candidate], *, tolerance: float, rounds: int, **labels: object) -> bool:
    """Prints what each candidate runs, how far it is from the first after two steps, and its times.

    The first candidate is the baseline. Returns whether the states agree within the tolerance (of their
    change) and the losses within LOSS_TOLERANCE.
    """
    first = next(iter(candidates))
    baseline = candidates[first]
    start = baseline.host(baseline.state)
    losses = {name: [float(np.asarray(c())) for _ in range(2)] for name, c in candidates.items()}
    expected = baseline.host(baseline.state)
    agree = True
    for name, c in candidates.items():
        off, where = worst_difference(start, expected, c.host(c.state))
        loss_off = max(abs(a - b) / abs(a) for a, b in zip(losses[first], losses[name], strict=True))
        # A NaN is on no side of a comparison, so ask for what is right.
        good = off <= tolerance and loss_off <= LOSS_TOLERANCE
        agree = agree and good
        line = {"figure": "program", **labels, "candidate": name, **hlo.summary(c.executable)}
        line |= {"losses": losses[name], "state_difference": off, "worst_array": where, "agrees": good}
        if name != first:
            line["against_" + first] = hlo.difference(baseline.executable, c.executable)
        print(json.dumps(line), flush=True)
    if rounds:
        ratio.report(candidates, rounds, **labels)
    return agree
