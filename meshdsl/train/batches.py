"""What training reads: a function of a split and a step. The workload's own data, text, or noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import meshdsl as md

from .data import SPLITS, VOCABULARY, corpus

__all__ = ["Batches", "Text", "data_for", "tensors", "tokens_of"]

Batches = Callable[[str, int], Mapping[str, np.ndarray]]  # (split, step) -> a batch; what lies in it is up to the split


class Text:
    """Text, for a workload whose batch is `tokens` and `targets` with dims batch and length."""

    def __init__(self, seed: int, batch: int, length: int):
        self.seed, self.batch, self.length = seed, batch, length

    def describe(self) -> dict[str, Any]:
        return {"kind": "text", **corpus().describe()}

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        seed = self.seed if split == SPLITS[0] else 0
        return corpus().batch(split, seed, step, self.batch, self.length)


class _Noise:
    """Random numbers of mean 0 and variance 1, for a workload whose batch is numbers: good for trying and timing."""

    def __init__(self, seed: int, sizes: Mapping[str, tuple[int, ...]]):
        self.seed, self.sizes = seed, sizes

    def describe(self) -> dict[str, Any]:
        return {"kind": "noise", "fields": sorted(self.sizes)}

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        bits = np.random.Philox(key=self.seed % 2**128, counter=[0, 0, SPLITS.index(split), step])
        words = {name: bits.random_raw(math.prod(size)).reshape(size) for name, size in self.sizes.items()}
        return {name: (word / 2.0**63 - 1) * math.sqrt(3) for name, word in words.items()}


def data_for(workload: md.Workload, seed: int) -> Batches:
    """The workload's own data; else text for a batch of tokens and targets, noise for a batch of floats.

    Raises `MeshdslError` for any other batch.
    """
    if workload.data is not None:
        return workload.data(workload.config, seed)
    specs = workload.inputs(workload.config)
    listed = ", ".join(f"{name}: {spec}" for name, spec in specs.items())
    if all(spec.dtype.kind == "f" for spec in specs.values()):
        return _Noise(seed, {name: tuple(dim.size for dim in spec.shape) for name, spec in specs.items()})
    shapes = {spec.shape for spec in specs.values()}
    if set(specs) != {"tokens", "targets"} or len(shapes) != 1 or len(specs["tokens"].shape) != 2:
        raise md.MeshdslError(
            f"there is no data for {workload.name}, whose batch is {listed}\n"
            "  text is drawn for a batch of integers called tokens and targets, with dims batch and length\n"
            "  give the workload its own: md.Workload(..., data=f), with f(config, seed)(split, step) -> dict of arrays"
        )
    vocabulary = getattr(workload.config, "vocab", VOCABULARY)
    if vocabulary < VOCABULARY:
        raise md.MeshdslError(f"{workload.name} has a vocabulary of {vocabulary}, and text is {VOCABULARY} bytes")
    batch, length = (dim.size for dim in specs["tokens"].shape)
    return Text(seed, batch, length)


def tensors(batch: Mapping[str, np.ndarray], specs: Mapping[str, Any]) -> dict[str, md.Tensor]:
    """The batch as tensors of the types that the workload takes.

    Raises `MeshdslError` when the data and the workload's inputs do not go together.
    """
    if missing := [name for name in specs if name not in batch]:
        raise md.MeshdslError(
            f"the data gives no {missing[0]!r}; it gives: {', '.join(batch) or 'nothing'}\n"
            f"  the workload's inputs are {', '.join(specs)}: give an array for each, by name"
        )
    return {name: _tensor(name, batch[name], spec) for name, spec in specs.items()}


def _tensor(name: str, values: Any, spec: Any) -> md.Tensor:
    array = np.asarray(values)
    sizes = tuple(d.size for d in spec.shape)
    if array.shape != sizes or not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise md.MeshdslError(
            f"the data gives {name!r} as {array.dtype} of shape {list(array.shape)}, and inputs(config) says {spec}\n"
            "  an array has the shape of these dims, in their order, and numbers that the dtype can hold"
        )
    return md.tensor(array.astype(spec.dtype), spec.shape)


def tokens_of(specs: Mapping[str, Any]) -> int:
    """How many tokens a batch has: the size of `targets`, else of `tokens`; 0 where neither is a list of sequences."""
    named = next((specs[name] for name in ("targets", "tokens") if name in specs), None)
    return math.prod(d.size for d in named.shape) if named is not None and len(named.shape) > 1 else 0
