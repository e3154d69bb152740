"""The table of a model: for each parameter, the tensor of a Hugging Face file and the dims of its axes.

A line is `path: (name, axes)`. Commas separate the axes of the file's tensor, and spaces the dims of ours that one axis
flattens, major first. `{layer}` in a name is an index along the dim `layer`: one tensor for each; `{2*layer+1}` is
twice the index and one more, and `{node expert}` counts the elements of two dims, major first. `1/3` is the second of
three equal parts of an axis. So these two lines

    "layer/attention/wk": ("model.layers.{layer}.self_attn.k_proj.weight", "heads head, model")
    "layer/attention/wk": ("h.{layer}.attn.c_attn.weight", "model, 1/3 heads head")

read a parameter [layer, model, heads, head] from one matrix for each layer, transposed and reshaped by the dims.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...dims import Shape
from ...errors import ShapeError
from ..checkpoint.grid import Box
from .config import HubConfig

Index = tuple[int | slice, ...]
STACKED = re.compile(r"\{(?:(\d+)\*)?(\w+(?: \w+)*)(?:\+(\d+))?\}")  # a factor, stacked dims, what is added


@dataclass(frozen=True)
class HuggingFace:
    """The names of a workload's parameters and config in a Hugging Face directory; `Workload.hugging_face`.

    `tensors` maps the path of each parameter to the name of its tensor and the dims of that tensor's axes; it may be a
    function of the workload's config. Lines for parameters that a config does not have are left out.

    `keys` maps keys of config.json to fields of the workload's config, `fixed` to the only value that the model
    supports. `defaults` has the values of keys that a file may lack, or functions of a `md.HubConfig` that return them.
    For anything else, `settings(hub)` returns further fields of the config, and `config(values)` their keys.

    `base` is the prefix of names that files of the bare model lack. Tensors that match a pattern of `ignored` are
    buffers, not parameters. `architecture` is the class in transformers that an export names. `merged(params)` are the
    parameters with lines, of a workload that has more: those of `md.nn.lora`.

    >>> import meshdsl as md
    >>> md.HuggingFace({"w": ("linear.weight", "out, io")}, {"in_features": "io"}).keys
    {'in_features': 'io'}
    """

    tensors: Mapping[str, tuple[str, str]] | Callable[[Any], Mapping[str, tuple[str, str]]]
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[HubConfig], dict[str, Any]] = lambda hub: {}
    config: Callable[[Any], dict[str, Any]] = lambda config: {}
    merged: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    base: str = ""
    ignored: tuple[str, ...] = ()
    architecture: str = ""

    def lines(self, config: Any) -> Mapping[str, tuple[str, str]]:
        """The lines of `tensors` for this config."""
        return self.tensors(config) if callable(self.tensors) else self.tensors

    def read_config(self, hub: HubConfig, like: Any) -> dict[str, Any]:
        """The fields of a config such as `like`; what does not fit is collected in `hub.problems`."""
        fields = {name: self._value(hub, key, getattr(like, name)) for key, name in self.keys.items()}
        for key, value in self.fixed.items():
            hub.only(key, value)
        fields |= self.settings(hub)
        hub.close()
        return fields

    def write_config(self, config: Any) -> dict[str, Any]:
        """The contents of config.json; `read_config` of them gives the same fields."""
        keys = {key: getattr(config, name) for key, name in self.keys.items()}
        return {"architectures": [self.architecture], **self.fixed, **keys, **self.config(config)}

    def _value(self, hub: HubConfig, key: str, like: Any) -> Any:
        default: Any = self.defaults.get(key)
        if callable(default):
            default = default(hub)
        if isinstance(like, bool):
            return hub.flag(key, default)
        return hub.number(key, default) if isinstance(like, float) else hub.size(key, default)


@dataclass(frozen=True)
class Rule:
    """A line of a table with the sizes of the parameter's dims."""

    name: str  # with {dim} for stacked dims
    dims: Shape  # of the parameter
    stacked: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]  # of the file's tensor; of dim names and parts such as "1/3"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the file."""
        return tuple(math.prod(self._size(item) for item in axis) for axis in self.axes)

    def names(self) -> list[str]:
        """The file's tensors of the whole parameter."""
        sizes = tuple(d.size for d in self.dims)
        return [name for name, _, _ in self.parts(Box((0,) * len(sizes), sizes))]

    def parts(self, box: Box) -> Iterator[tuple[str, Index, Index]]:
        """The file's tensors in one block of the parameter: name, index in the block, index in what is `arranged`."""
        at = [[d.name for d in self.dims].index(dim) for dim in self.stacked]
        outer = tuple(s for i, s in enumerate(box.slices()) if i not in at)
        for index in itertools.product(*(range(box.start[i], box.start[i] + box.size[i]) for i in at)):
            inner: list[int | slice] = [slice(n) for n in box.size]
            for i, n in zip(at, index, strict=True):
                inner[i] = n - box.start[i]
            yield self._named(dict(zip(self.stacked, index, strict=True))), tuple(inner), outer

    def _named(self, index: Mapping[str, int]) -> str:
        """The name with the indices of the stacked dims."""
        sizes = {d.name: d.size for d in self.dims}

        def number(match: re.Match[str]) -> str:
            place = functools.reduce(lambda n, dim: n * sizes[dim] + index[dim], match[2].split(), 0)
            return str(int(match[1] or 1) * place + int(match[3] or 0))

        return STACKED.sub(number, self.name)

    def arranged(self, stored: np.ndarray) -> np.ndarray:
        """A view of the file's tensor with the parameter's dims in its order, without the stacked ones."""
        items = [item for axis in self.axes for item in axis]
        parts = stored.reshape([self._size(item) for item in items])
        parts = parts[tuple(int(item.partition("/")[0]) if "/" in item else slice(None) for item in items)]
        dims = [item for item in items if "/" not in item]
        return parts.transpose([dims.index(d.name) for d in self.dims if d.name not in self.stacked])

    def _size(self, item: str) -> int:
        if "/" in item:
            return int(item.partition("/")[2])
        return next(d.size for d in self.dims if d.name == item)


def rule_of(path: str, line: tuple[str, str], shape: Shape) -> Rule:
    """Read the line of one parameter: the name of its tensor in the file, and the dims of that tensor's axes.

    `{layer}` in a name is each index of that dim; `0/2 io` is the first of two equal parts of an axis. Raises
    `ShapeError` unless name and axes have each dim of the parameter once.

    >>> from meshdsl.dims import dims
    >>> rule = rule_of("w", ("h.{layer}.weight", "out, 0/2 io"), dims("layer:2 io:3 out:5"))
    >>> rule.stored_shape, rule.names()
    ((5, 6), ['h.0.weight', 'h.1.weight'])
    """
    name, axes = line[0], tuple(tuple(axis.split()) for axis in line[1].split(",")) if line[1].strip() else ()
    stacked = tuple(dim for match in STACKED.finditer(name) for dim in match[2].split())
    named = [*stacked, *(item for axis in axes for item in axis if "/" not in item)]
    if sorted(named) != sorted(d.name for d in shape):
        raise ShapeError(
            f"the table reads {path!r} from {name!r} with the dims {' '.join(named)}, and its dims are {list(shape)}\n"
            "  name each of them once: stacked ones in the name as {layer}, the others in the axes"
        )
    return Rule(name, shape, stacked, axes)
