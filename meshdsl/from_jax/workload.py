"""An imported loss as a `md.Workload`, for the commands that analyze, search and compare layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import meshdsl as md


@dataclass(frozen=True)
class Config:
    """An imported function has its sizes already: nothing is left to set."""


def workload_of(m: Any, name: str, labels: Sequence[str], examples: Sequence[Any], count: int) -> md.Workload:
    """The training step of a loss: its first argument are the parameters, the others are a batch.

    `labels` are the paths of all inputs, `examples` their arrays, and the first `count` are the parameters. The
    optimizer is `md.optim.adamw(1e-3)`. Parameters that were given as arrays start there, and specs as normal numbers.
    Raises `ShapeError` if the first argument has no parameters.
    """
    if not count:
        raise md.ShapeError(f"the first argument of {name} has no arrays; it has the parameters of a workload")
    paths, batch = [_path(label) for label in labels[:count]], [_path(label, whole=True) for label in labels[count:]]
    specs = jax.tree.leaves(m.specs, is_leaf=lambda x: hasattr(x, "dims"))

    @md.model
    def model(batch: Mapping[str, md.Tensor]) -> Mapping[str, md.Tensor]:
        return {
            path: md.param(path, spec.dims, init=_starting_at(examples[i]), dtype=spec.dtype)
            for i, (path, spec) in enumerate(zip(paths, specs, strict=False))
        }

    def inputs(config: Config) -> dict[str, Any]:
        return dict(zip(batch, specs[count:], strict=True))

    def loss(config: Config) -> Callable[..., Any]:
        return lambda params, data: m(*map(params.__getitem__, paths), *map(data.__getitem__, batch))

    return md.Workload(
        name,
        Config(),
        model=lambda config: model,
        inputs=inputs,
        loss=loss,
        optimizer=lambda config: md.optim.adamw(1e-3),
        imported=m,
    )


def _path(label: str, whole: bool = False) -> str:
    """The path of a parameter, `layers_0/w` for params/layers/0/w."""
    words: list[str] = []
    for word in label.split("/")[0 if whole or "/" not in label else 1 :]:
        word = re.sub(r"\W", "_", word)
        if word[:1].isdigit() and words:
            words[-1] += f"_{word}"
        else:
            words.append(word if word.isidentifier() else f"_{word}")
    return "_".join(words) if whole else "/".join(words)


def _starting_at(array: Any) -> Callable[..., md.Tensor] | None:
    """The initialiser that gives an array that was imported; None for a type."""
    if array is None:
        return None
    value = np.asarray(array)
    return lambda key, dims, dtype: md.cast(md.tensor(value, dims), dtype)
