"""Compiled functions run by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import meshdsl as md


def simulated(f: Callable[..., Any], mesh: str, layout: str) -> Callable[..., Any]:
    """The compiled function as NumPy runs it on every device: no XLA, so many layouts cost little."""

    def run(*args: Any) -> Any:
        program = md.compile(f, md.Mesh(mesh), md.Layout(layout)).program(*args)
        arrays = md.simulate(program, *jax.tree.leaves(args))
        specs, structure = jax.tree.flatten(md.eval_shape(f, *args))
        return structure.unflatten([md.tensor(x, spec.dims) for x, spec in zip(arrays, specs, strict=True)])

    return run
