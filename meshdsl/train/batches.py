"""Training data: a function of split and step. It is the workload's own function, text or noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import meshdsl as md

from ..errors.values import as_json
from .data import SPLITS, VOCABULARY, corpus

Batches = Callable[[str, int], Mapping[str, np.ndarray]]  # (split, step) -> arrays by input name


class Text:
    """Batches of text, for a workload whose inputs are `tokens` and `targets` with dims batch and length."""

    bytes_per_token = 1.0

    def __init__(self, seed: int, batch: int, length: int):
        self.seed, self.batch, self.length = seed, batch, length

    def describe(self) -> dict[str, Any]:
        return {"kind": "text", **corpus().describe()}

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        seed = self.seed if split == SPLITS[0] else 0
        return corpus().batch(split, seed, step, self.batch, self.length)


class _Noise:
    """Batches of random numbers (mean 0, variance 1), for a workload whose inputs are floats; useful for timing."""

    def __init__(self, seed: int, sizes: Mapping[str, tuple[int, ...]]):
        self.seed, self.sizes = seed, sizes

    def describe(self) -> dict[str, Any]:
        return {"kind": "noise", "fields": sorted(self.sizes)}

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        bits = np.random.Philox(key=self.seed % 2**128, counter=[0, 0, SPLITS.index(split), step])
        words = {name: bits.random_raw(math.prod(size)).reshape(size) for name, size in self.sizes.items()}
        return {name: (word / 2.0**63 - 1) * math.sqrt(3) for name, word in words.items()}


def data_for(workload: md.Workload, seed: int) -> Batches:
    """The workload's data function; without one, text for integer tokens and targets, or noise for float inputs.

    Raises `MeshdslError` for other inputs.
    """
    if workload.data is not None:
        return workload.data(workload.config, seed)
    specs = workload.inputs(workload.config)
    listed = ", ".join(f"{name}: {spec}" for name, spec in specs.items())
    if all(spec.dtype.kind == "f" for spec in specs.values()):
        return _Noise(seed, {name: tuple(dim.size for dim in spec.dims) for name, spec in specs.items()})
    shapes = {spec.dims for spec in specs.values()}
    if set(specs) != {"tokens", "targets"} or len(shapes) != 1 or len(specs["tokens"].dims) != 2:
        raise md.MeshdslError(
            f"there is no data for {workload.name}, whose inputs are {listed}\n"
            "  text works for two integer inputs called tokens and targets, with dims batch and length\n"
            "  pass your own data: md.Workload(..., data=f), with f(config, seed)(split, step) -> dict of arrays"
        )
    vocabulary = getattr(workload.config, "vocab", VOCABULARY)
    if vocabulary < VOCABULARY:
        raise md.MeshdslError(
            f"{workload.name} has a vocabulary of {vocabulary}, and text has {VOCABULARY} byte values\n"
            f"  set vocab to at least {VOCABULARY}, or give the workload its own data"
        )
    batch, length = (dim.size for dim in specs["tokens"].dims)
    return Text(seed, batch, length)


def described(batches: Batches) -> dict[str, Any] | None:
    """The result of the data's `describe()` as JSON values; None if it has no such method."""
    describe = getattr(batches, "describe", None)
    return as_json(describe()) if describe is not None else None


def targets_of(loss: Callable[..., Any], *args: Any) -> dict[str, md.nn.losses.Targets]:
    """The inputs of a loss that are targets of `md.nn.softmax_cross_entropy`, with their classes and what is ignored.

    `args` are specs of its parameters, batch and key. Inputs that the loss changes first, such as by a shift, are not
    found.
    """
    found: dict[str, md.nn.losses.Targets] = {}

    def traced(params: Any, batch: Mapping[str, md.Tensor], *key: md.Tensor) -> Any:
        with md.nn.losses.targets_seen() as seen:
            loss(params, batch, *key)
        found.update({name: each for each in seen for name, x in batch.items() if x is each.targets})
        return ()

    md.eval_shape(traced, *args)
    return found


def tensors(
    batch: Mapping[str, np.ndarray], specs: Mapping[str, Any], targets: Mapping[str, md.nn.losses.Targets]
) -> dict[str, md.Tensor]:
    """Converts a batch of arrays to tensors with the dims and dtypes of the workload's inputs.

    Raises `MeshdslError` if an input is missing, if its shape or dtype does not match, or if one of `targets` has a
    value that is neither a class nor ignored.
    """
    if not isinstance(batch, Mapping):
        raise md.MeshdslError(
            f"a batch is a dict of arrays, got {type(batch).__name__}\n"
            f"  return one array for each of the workload's inputs: {', '.join(specs)}"
        )
    if missing := [name for name in specs if name not in batch]:
        raise md.MeshdslError(
            f"the batch has no array {missing[0]!r}; it has: {', '.join(batch) or 'none'}\n"
            f"  return one array for each of the workload's inputs: {', '.join(specs)}"
        )
    for name, each in targets.items():
        _check_targets(name, np.asarray(batch[name]), each)
    return {name: _tensor(name, batch[name], spec) for name, spec in specs.items()}


def _check_targets(name: str, values: np.ndarray, targets: md.nn.losses.Targets) -> None:
    """Raises `MeshdslError` for a target that is neither a class nor ignored."""
    dim, ignore = targets.classes, targets.ignore
    counted = values if ignore is None else values[values != ignore]
    wrong = [int(x) for x in (np.max(counted, initial=0), np.min(counted, initial=0)) if not 0 <= x < dim.size]
    if wrong:
        marked = "no target is ignored" if ignore is None else f"{ignore} marks targets that are ignored"
        raise md.MeshdslError(
            f"the array {name!r} of the batch has the target {wrong[0]}, and {dim.name} has the classes 0 to "
            f"{dim.size - 1}; {marked}\n  set the size of {dim.name} to that of the data's vocabulary, check the dtype "
            "that the data is read as, or pass ignore= to md.nn.softmax_cross_entropy"
        )


def _tensor(name: str, values: Any, spec: Any) -> md.Tensor:
    array = np.asarray(values)
    sizes = tuple(d.size for d in spec.dims)
    if array.shape != sizes or not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise md.MeshdslError(
            f"the array {name!r} of the batch is {array.dtype} of shape {list(array.shape)}, and inputs(config) says "
            f"{spec}\n  return an array with these sizes in this order, and a dtype that can be cast to {spec.dtype}"
        )
    return md.tensor(array.astype(spec.dtype), spec.dims)


def tokens_of(specs: Mapping[str, Any]) -> int:
    """The number of tokens of a batch: the size of `targets`, else of `tokens`; 0 if neither has two dims or more."""
    spec = next((specs[name] for name in ("targets", "tokens") if name in specs), None)
    return math.prod(d.size for d in spec.dims) if spec is not None and len(spec.dims) > 1 else 0


def data_of_bytes(config: Any, seed: int) -> Batches:
    """The bytes of the Python standard library's text, for `--data meshdsl.train:data_of_bytes`."""
    return Text(seed, config.batch, config.length)
