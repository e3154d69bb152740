"""Names and layouts that arguments and code already have. They are hints: the analysis may contradict them.

They are read from public attributes, so that no library is imported:

    names, value       a box of flax.linen, as of nn.with_partitioning: a word for each axis
    get_metadata()     a variable of flax.nnx: `out_sharding` has a word for each axis
    axes, array        an array of haliax: each axis has a name
    sharding.spec      an array or its type, jax.lax.with_sharding_constraint and reshard: axes of a mesh

A word that is an axis of a mesh which the function or its arguments know proposes a layout; any other one names a dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .axes import Axis, link
from .naming import Names, place_of
from .steps import OpenedJaxpr, Value

Words = Sequence[Sequence[str]]  # for each axis
Hint = tuple[Value, Words]
_CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


def is_annotated(x: Any) -> bool:
    """True for a container of one array that has words for its axes."""
    return bool(_written(x)) and not isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _written(x: Any) -> Any:
    """The words on a container, one entry for each axis; None if it has none."""
    if hasattr(x, "names") and hasattr(x, "value"):
        return x.names
    if hasattr(x, "axes") and hasattr(x, "array"):
        return tuple(axis.name for axis in x.axes)
    return x.get_metadata().get("out_sharding") if hasattr(x, "get_metadata") else None


def words_of(x: Any) -> Words:
    """The words of a container or of a sharding, for each axis."""
    spec = getattr(getattr(x, "sharding", x), "spec", None)
    entries: Any = _written(x) if spec is None else spec
    each = [entry if isinstance(entry, tuple) else (entry,) for entry in entries or ()]
    return [tuple(word for word in entry if isinstance(word, str)) for entry in each]


def mesh_axes(x: Any) -> set[str]:
    """The axes of the mesh of a container or a sharding."""
    mesh = getattr(getattr(x, "sharding", x), "mesh", None)
    return set(getattr(mesh, "axis_names", ()))


def constraints(block: OpenedJaxpr) -> Iterator[tuple[Value, Any]]:
    """Values and their shardings, where the function has a constraint."""
    for step in block.walk():
        if step.primitive in _CONSTRAINTS:
            yield step.ins[0], step.params[_CONSTRAINTS[step.primitive]]


def name_dims(block: OpenedJaxpr, hints: Sequence[Hint], axes: set[str], names: Names) -> None:
    """Give the names of the hints to dims without one; what does not fit is a note."""
    every = (atom for v in block.values() for axis in v.axes for atom in axis.atoms())
    first = {atom.named.name: atom for atom in every if atom.named.name}
    for value, words in hints:
        for i, (axis, entry) in enumerate(zip(value.axes, words, strict=False)):
            word = re.sub(r"\W", "_", entry[0]) if len(entry) == 1 and entry[0] not in axes else ""
            problem = _named(axis, word, first) if word and axis.atoms() else ""
            note = f"{place_of(value)}, axis {i}, is annotated {word}, {problem}; the annotation is not used"
            if problem and note not in names.notes:
                names.notes.append(note)


def _named(axis: Axis, word: str, first: dict[str, Axis]) -> str:
    """Name the outer part of an axis; returns why it cannot have the name."""
    atom = axis.atoms()[0]
    family = atom.named
    if family.name:
        return "" if family.name == word else f"and is {family.name}"
    if not link(first.setdefault(word, atom), atom):
        return "and a value would have that dim twice"
    atom.named.name, atom.named.by_user = word, True
    return ""


def layout_of(hints: Sequence[Hint], axes: set[str], parameters: Sequence[Value]) -> str:
    """The layout that the axes of the mesh in hints make: where a parameter is split over an axis that its values
    use for another dim, as in FSDP, the axis stores parameters."""
    rules: dict[str, tuple[Axis, Sequence[str]]] = {}
    stored: dict[str, None] = {}
    for value, words in sorted(hints, key=lambda hint: hint[0] in parameters):
        for axis, entry in zip(value.axes, words, strict=False):
            if not entry or not axis.atoms() or not axes.issuperset(entry):
                continue
            atom = axis.atoms()[0]
            name, others = atom.named.name, [other for other, used in rules.values() if set(used) & set(entry)]
            if all(other.named is atom.named or other.named.values.isdisjoint(atom.named.values) for other in others):
                rules.setdefault(name, (atom, entry))
            elif value in parameters:
                stored.update(dict.fromkeys(entry))
    texts = [f"{name}:{','.join(entry)}" for name, (_, entry) in rules.items()]
    return "; ".join([*texts, *([f"params:{','.join(stored)}"] if stored else [])])
