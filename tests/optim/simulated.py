"""Compiled functions run by NumPy, and arrays for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import meshdsl as md


@dataclass(frozen=True)
class Simulated:
    """The compiled function as NumPy runs it on every device: no XLA, so many layouts cost little."""

    compiled: md.Compiled
    specs: dict[Any, Any] = field(default_factory=dict)  # of the results, by the types of the arguments

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        signature = (structure, tuple(x.type for x in leaves))
        if signature not in self.specs:
            self.specs[signature] = md.eval_shape(self.compiled.function, *args)
        specs, results = jax.tree.flatten(self.specs[signature])
        arrays = md.simulate(self.compiled.program(*args), *leaves)
        return results.unflatten([md.tensor(x, spec.dims) for x, spec in zip(arrays, specs, strict=True)])

    def under(self, mesh: str, layout: str) -> Simulated:
        """The same function under another layout; it is not traced again."""
        return Simulated(self.compiled.under(mesh, layout), self.specs)


def simulated(f: Callable[..., Any], mesh: str, layout: str) -> Simulated:
    return Simulated(md.compile(f, mesh, layout))


def drawn(seed: int, shapes: Mapping[str, str]) -> dict[str, md.Tensor]:
    """Normal tensors, by the name of each and its dims."""
    rng = np.random.default_rng(seed)
    return {
        path: md.tensor(rng.standard_normal([d.size for d in md.dims(dims)]), dims) for path, dims in shapes.items()
    }
