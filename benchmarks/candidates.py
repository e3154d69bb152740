"""`Candidate`: one implementation of a training step, which can be timed, read as HLO and compared with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import meshdsl as md
from benchmarks import hlo, ratio

LOSS_TOLERANCE = 1e-5  # relative; float32 sums in another order differ by less


@dataclass
class Candidate:
    """`step` maps a state to (next state, loss); `host` maps a state to unsharded host arrays by name."""

    executable: jax.stages.Compiled
    state: object
    step: Callable[[object], tuple[object, object]]
    host: Callable[[object], dict[str, np.ndarray]] = field(default=lambda state: flat(state))

    @staticmethod
    def of_meshdsl(compiled: md.Compiled, state: object, *batch: object) -> Candidate:
        """A candidate from a compiled step (state, *batch) -> (state, loss), which is called by its executable."""
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
        """Run one step and wait for its results."""
        self.state, loss = self.step(self.state)
        jax.block_until_ready((self.state, loss))
        return loss


def flat(tree: object) -> dict[str, np.ndarray]:
    """The leaves of a tree as host arrays, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf) for path, leaf in leaves}


def worst_difference(start: Mapping, expected: Mapping, actual: Mapping) -> tuple[float, str]:
    """The largest relative error over all arrays, and the name of that array.

    The error of an array is the norm of its difference divided by the norm of its change since the start. The change is
    used instead of the value, because a step changes parameters only a little.
    """
    if expected.keys() != actual.keys():
        raise ValueError(f"the states have different arrays: {sorted(expected.keys() ^ actual.keys())}")

    def relative_error(name: str) -> float:
        before, a, b = (np.asarray(state[name], np.float64) for state in (start, expected, actual))
        return float(np.linalg.norm(a - b) / np.linalg.norm(a - before)) if a.size else 0.0

    worst = {name: relative_error(name) for name in expected}
    # NaN counts as larger than every number.
    name = max(worst, key=lambda n: float("inf") if np.isnan(worst[n]) else worst[n])
    return worst[name], name


def compare(candidates: Mapping[str, Candidate], *, tolerance: float, rounds: int, **labels: object) -> bool:
    """Prints for each candidate the dots and collectives it runs, its error after two steps, and its times.

    The first candidate is the baseline. Returns whether the states agree within `tolerance` (relative to their change)
    and the losses within LOSS_TOLERANCE.
    """
    baseline_name = next(iter(candidates))
    baseline = candidates[baseline_name]
    start = baseline.host(baseline.state)
    losses = {name: [float(np.asarray(c())) for _ in range(2)] for name, c in candidates.items()}
    expected = baseline.host(baseline.state)
    agree = True
    for name, c in candidates.items():
        relative_error, where = worst_difference(start, expected, c.host(c.state))
        loss_error = max(abs(a - b) / abs(a) for a, b in zip(losses[baseline_name], losses[name], strict=True))
        # Comparisons with NaN are false, so test for agreement and not for disagreement.
        agrees = relative_error <= tolerance and loss_error <= LOSS_TOLERANCE
        agree = agree and agrees
        line = {"figure": "program", **labels, "candidate": name, **hlo.summary(c.executable)}
        line |= {"losses": losses[name], "state_difference": relative_error, "worst_array": where, "agrees": agrees}
        if name != baseline_name:
            line["against_" + baseline_name] = hlo.difference(baseline.executable, c.executable)
        print(json.dumps(line), flush=True)
    if rounds:
        ratio.report(candidates, rounds, **labels)
    return agree
