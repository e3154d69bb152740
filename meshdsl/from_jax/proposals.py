"""Names to paste for an imported function whose dims nobody named, and the dims that are worth sharding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .axes import Axis
from .naming import Names, matches
from .steps import OpenedJaxpr, Value

SHARE = 0.99  # of all parameters: the weights whose dims matter


def dims_to_shard(block: OpenedJaxpr, names: Names, first: int) -> list[str]:
    """The dims that a search should split: those that the user named; without any, those of data and large weights."""
    made_up = {name for name, _, _ in names.made_up}
    named = [name for name in names.dims if name not in made_up]
    values = [*_data(block, first), *_large(block.ins[:first])]
    return named or list(dict.fromkeys(a.named.name for v in values for axis in v.axes for a in axis.atoms()))


def data_dim(block: OpenedJaxpr, first: int) -> str:
    """The dim that all data have first; empty if there is none."""
    leading = {v.axes[0].atoms()[0].named.name for v in _data(block, first) if v.axes[0].atoms()}
    return leading.pop() if len(leading) == 1 else ""


def names_to_paste(block: OpenedJaxpr, names: Names, first: int) -> dict[str, str]:
    """Patterns that name every made-up dim of data and large weights, by what the function does with it."""
    made_up = {name for name, _, _ in names.made_up}
    better = {**{name: name for name in names.dims if name not in made_up}, **_roles(block, made_up, first)}
    covered, patterns = set[str](), dict[str, str]()
    for v in [*_data(block, first), *_large(block.ins[:first])]:
        if made_up.intersection(better).intersection(_names(v)) - covered:
            pattern, alike = _pattern(v, block.ins)
            covered.update(name for w in alike for name in _names(w))
            axes = v.axes[1 if v.is_stacked else 0 :]
            patterns[pattern] = " ".join(_words([a.named.name for a in axis.atoms()], better) for axis in axes)
    return patterns


def _names(v: Value) -> list[str]:
    return [a.named.name for axis in v.axes for a in axis.atoms()]


def _pattern(v: Value, inputs: Sequence[Value]) -> tuple[str, list[Value]]:
    """The shortest pattern of a path that fits only inputs whose axes have the same parts, and these."""
    for pattern in (re.sub(r".*/", "*/", v.label), re.sub(r"\d+", "*", v.label)):
        alike = [w for w in inputs if matches(pattern, w.label)]
        if v in alike and all(_sizes(w) == _sizes(v) for w in alike):
            return pattern, alike
    return v.label, [v]


def _sizes(v: Value) -> list[list[int]]:
    return [[a.size for a in axis.atoms()] for axis in v.axes]


def _words(axis: Sequence[str], better: dict[str, str]) -> str:
    return "*".join(better[name] for name in axis) if axis and all(name in better for name in axis) else "."


def _large(values: Sequence[Value]) -> list[Value]:
    """The largest parameters, which are all but a hundredth of the parameters."""
    ordered, kept, total = sorted(values, key=lambda v: -v.size), list[Value](), sum(v.size for v in values)
    for v in ordered:
        if sum(w.size for w in kept) < SHARE * total:
            kept.append(v)
    return kept


def _roles(block: OpenedJaxpr, made_up: set[str], first: int) -> dict[str, str]:
    """A name for each made-up dim whose role is known."""
    better: dict[str, str] = {}
    taken: set[str] = set()
    for axis, role in _axes_with_roles(block, first):
        for atom, word in zip(axis.atoms(), role.split(), strict=False):
            old = atom.named.name
            if old in made_up and old not in better and len(axis.atoms()) == len(role.split()):
                same = sum(name.rpartition("_")[0] == word or name == word for name in taken)
                better[old] = word if not same else f"{word}_{same + 1}"
                taken.add(better[old])
    return better


def _axes_with_roles(block: OpenedJaxpr, first: int) -> Iterator[tuple[Axis, str]]:
    """Axes, and what they are in a model: the first that fits an axis counts."""
    if data_dim(block, first):
        for v in _data(block, first):
            roles = _OF_DATA.get((len(v.shape), v.is_floating), ("batch",))
            yield from zip(v.axes, roles, strict=False)
    for step in block.walk():
        if step.primitive == "scan":
            yield from ((v.axes[0], "layer") for v in step.ins[step.params["num_consts"] + step.params["num_carry"] :])
        if step.parts:
            yield step.ins[0].axes[step.params["axis"]], "parts heads head"
        table = step.ins[0] if step.primitive == "gather" and not step.ins[1].is_floating else None
        if table is not None and len(table.shape) == 2 and table.is_floating:
            yield from zip(table.axes, ("vocab", "model"), strict=True)
    for v in _large(block.ins[:first]):
        for axis in v.axes:
            yield (
                axis,
                {2: "heads head", 3: "heads group head"}.get(len(axis.atoms()), "" if axis.root.rigid else "hidden"),
            )


_OF_DATA = {  # (number of axes, floating)
    (2, False): ("batch", "length"), (2, True): ("batch", "model"), (3, True): ("batch", "length", "model"),
    (4, True): ("batch", "height", "width"),
}  # fmt: skip


def _data(block: OpenedJaxpr, first: int) -> list[Value]:
    """The data: all but the first argument, without keys and numbers."""
    return [v for v in block.ins[first:] if v.shape and not v.is_key and str(v.dtype) != "uint32"]
