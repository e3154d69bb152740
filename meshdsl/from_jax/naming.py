"""The names of dims: those of the user, by the path of an input or with `md.named`, and made-up ones for the rest."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .axes import Axis, Family, link, unite
from .steps import BodyStep, OpenedJaxpr, Value


@dataclass
class Names:
    """What is known of the dims of an imported function.

    `dims`: for each name the sizes, in the order of first use. `made_up`: name, size and place of dims that nobody
    named. `notes`: what a user should know, a sentence each.
    """

    dims: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    made_up: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])
    notes: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])


def given(block: OpenedJaxpr, patterns: Mapping[str, str], names: Names) -> None:
    """Write the names of the user on the axes of inputs and of marked values, before anything is united."""
    first: dict[str, Axis] = {}
    used, later = set[str](), dict[str, str]()
    for value in block.ins:
        matching = [pattern for pattern in patterns if matches(pattern, value.label)]
        used.update(matching[:1])
        later.update(
            dict.fromkeys(matching[1:], f"the inputs that it fits have names by {matching[:1]}, which is first")
        )
        if matching:
            words = patterns[matching[0]].split()
            words = [".", *words] if value.is_stacked and len(words) < len(value.shape) else words
            _write(value, words, first, f"the input {value.label}", names)
    for pattern in patterns:
        if (place := _PLACE.fullmatch(pattern)) and (value := _value_at(block, place)) is not None:
            words = ["."] * len(value.shape)
            words[int(place["axis"])] = patterns[pattern]
            _write(value, words, first, f"the array at {place['line']}", names)
            used.add(pattern)
    for pattern in patterns:
        if pattern not in used:
            known = "\n    ".join(f"{v.label} {v.shape}" for v in block.ins)
            why = later.get(pattern, f"no input has such a path\n  there are:\n    {known}")
            names.problems.append(f"names= has {pattern!r}, and {why}")
    for step in block.walk():
        if step.primitive == "md_named":
            _write(step.ins[0], step.params["words"], first, f"the array at {step.where}", names)


_PLACE = re.compile(r"(?P<line>\S+:\d+)( (?P<kind>[\w-]+),)? axis (?P<axis>\d+)")  # as print(m) writes it


def _value_at(block: OpenedJaxpr, place: re.Match[str]) -> Value | None:
    """The first result of a line, of this primitive if there is one, that has the axis."""
    for step in block.walk():
        here = str(step.where) == place["line"] or str(step.where).endswith("/" + place["line"])
        if here and place["kind"] in (None, step.primitive):
            for out in step.outs:
                if len(out.shape) > int(place["axis"]) and out.shape[int(place["axis"])] > 1:
                    return out
    return None


def matches(pattern: str, label: str) -> bool:
    """True if a pattern fits the path of an input, or the path after a slash."""
    return fnmatch.fnmatchcase(label, pattern) or fnmatch.fnmatchcase("/" + label, pattern)


def _write(value: Value, words: Sequence[str], first: dict[str, Axis], what: str, names: Names) -> None:
    if len(words) != len(value.shape):
        names.problems.append(
            f"{what} has the shape {value.shape}, and {len(words)} names: {' '.join(words)}\n"
            "  give one word for each axis; '.' leaves an axis without a name"
        )
        return
    for i, (axis, word) in enumerate(zip(value.axes, words, strict=True)):
        if word == ".":
            continue
        if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", part) for part in word.split("*")):
            names.problems.append(f"{what} has the name {word!r}; a name has letters, digits and '_', or is '.' or a*b")
        elif axis.size == 1:
            names.notes.append(f"{what}, axis {i}, has one element and no dim; the name {word} is not used there")
        elif "*" in word:
            axis.words = tuple(word.split("*"))
        elif not axis.named.by_user or axis.named.name != word:
            family = axis.named
            if family.by_user:
                names.problems.append(f"{what}, axis {i}, is named {word}, and also {family.name}")
                continue
            family.name, family.by_user = word, True
            other = first.setdefault(word, axis)
            if other is not axis and not (unite if other.size == axis.size else link)(other, axis):
                names.problems.append(f"{what} would have the dim {word!r} twice; give one of the axes another name")


def settle(block: OpenedJaxpr, names: Names, prefer: Sequence[str]) -> None:
    """Name the parts of merged axes, and the dims that nobody named; collect all dims."""
    values = list(dict.fromkeys(block.values()))
    taken = {atom.named.name for v in values for axis in v.axes for atom in axis.atoms() if atom.named.by_user}
    for value in values:
        for i, axis in enumerate(value.axes):
            _parts(axis, f"{place_of(value)}, axis {i}", names, taken)
            names.notes += [note for note in _outer_part(axis) if note not in names.notes]
    for step in block.walk():
        names.notes += [note for note in _kept_whole(step) if note not in names.notes]
    _make_up(values, names, taken)
    unknown = [name for name in prefer if name not in names.dims]
    if unknown:
        known = " ".join(names.dims)
        names.problems.append(f"prefer= has {' '.join(unknown)}, and no dim has such a name; there are {known}")


def _make_up(values: Sequence[Value], names: Names, taken: set[str]) -> None:
    """Name the dims that nobody named, and collect the sizes of all."""
    alike: dict[tuple[str, int], Axis] = {}
    places = ((v, i, k, atom) for v in values for i, axis in enumerate(v.axes) for k, atom in enumerate(axis.atoms()))
    for value, i, k, atom in places:
        base = _base(value, i, k if len(value.axes[i].atoms()) > 1 else None, atom)
        if not atom.named.name and not link(alike.setdefault((base, atom.size), atom), atom):
            alike[base, atom.size] = atom
        if not atom.named.name:
            atom.named.name = _free(base, taken)
            names.made_up.append((atom.named.name, atom.size, f"{place_of(value)}, axis {i}"))
        sizes = names.dims.setdefault(atom.named.name, [])
        if atom.size not in sizes:
            sizes.append(atom.size)


def _parts(axis: Axis, what: str, names: Names, taken: set[str]) -> None:
    """Give the words `a*b` of the user to the parts of an axis."""
    words, atoms = axis.root.words, axis.atoms()
    if not words:
        return
    axis.root.words = ()
    families: list[Family] = [atom.named for atom in atoms]
    if len(words) != len(atoms):
        parts = "*".join(str(atom.size) for atom in atoms)
        split = f"the code splits it into {parts}" if len(atoms) > 1 else "nothing in the code splits it"
        names.problems.append(f"{what} is named {'*'.join(words)}, and {split}; give one name for each part")
        return
    for word, family in zip(words, families, strict=True):
        if family.by_user and family.name != word:
            names.problems.append(f"{what} is named {'*'.join(words)}, and its part {word} is {family.name} elsewhere")
        family.name, family.by_user = word, True
        taken.add(word)


def _outer_part(axis: Axis) -> list[str]:
    """A note on an axis that has one name of the user's and is split."""
    atoms = axis.atoms()
    if len(atoms) < 2 or not axis.named.by_user or atoms[0].named is not axis.named:
        return []
    sizes = "*".join(str(atom.size) for atom in atoms)
    return [f"an axis named {axis.named.name} is split into {sizes}, and the name is that of the first part"]


def _kept_whole(step: BodyStep) -> list[str]:
    """Notes on reshapes that would split an axis to which the user gave one name."""
    return [
        f"{atom.named.name} is one dim, and {step.where} reshapes it; name its parts, as in a*b, to shard them"
        for left, right in step.groups
        if len(left) + len(right) > 2 and [a for x in left for a in x.atoms()] != [a for x in right for a in x.atoms()]
        for atom in dict.fromkeys(a for x in (*left, *right) for a in x.atoms())
        if atom.named.by_user
    ]


def _base(value: Value, axis: int, part: int | None, atom: Axis) -> str:
    """A name made of the first place where a dim occurs: `wte_1` for axis 1 of the inputs params/wte.

    Dims with equal names of this kind, as those of equal layers, are one dim wherever they can be.
    """
    beside = atom.root.beside
    if beside is not None and len(beside.atoms()) == 1 and beside.named.name:
        return f"{beside.named.name}_2"
    if value.is_stacked and axis == 0:
        return "layer"
    words = [word for word in value.label.split("/") if word and not word.isdigit()]
    base = f"{words[-1] if words else _kind(value)}_{axis}" + ("" if part is None else f"_{part}")
    return re.sub(r"\W", "_", base).lstrip("0123456789_")


def _kind(value: Value) -> str:
    return value.maker.primitive if value.maker is not None else "constant"


def place_of(value: Value) -> str:
    """Where a value occurs first: the path of an input, or a line."""
    if value.label:
        return value.label
    return f"{value.where} {_kind(value)}" if value.where else _kind(value)


def _free(base: str, taken: set[str]) -> str:
    name, k = base, 1
    while name in taken:
        k += 1
        name = f"{base}_{k}"
    taken.add(name)
    return name
