"""The reason for a collective, as data; programs print a sentence made from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Because(Enum):
    """The kinds of causes. Each value is the template of the printed sentence."""

    UNKNOWN = ""
    REDUCES = "{what} over {dims} of {op}"  # `what`: sum, max or min
    CARRIED = "sum carried by the loop"
    WHOLE = "{op} needs {dim} whole{what}"  # `what`: the reason
    CUT_INSTEAD = "{op} needs {dim} whole, {to} is cut instead"
    BACK = "and back"  # to the dim that was sharded before
    RESPLIT = "{name} -> {to_name} for {op}"
    OTHER_ORDER = "other order of axes for {op}"
    READ = "for {op}"
    ROWS = "{amounts[0]} of {amounts[1]} along {dim} for {op}"
    MOST_ROWS = "{op} moves most of {dim}"
    SUMMARY = "{what} each block of {dim}"  # `what`: "a total for", "a product for", "the 3 best of"
    AROUND = "keys and values go around {dim} for {op}{what}"  # `what`: the reason
    HOME = "the cotangents of keys and values return along {dim}"
    INSTEAD = "{to} is split instead of {dim} for {op}{what}"
    BALANCE = "half blocks of {dim} change places, for equal work under the causal mask"
    TURNS = "{first}, block by block beside the product"  # `parts` holds the gather's cause
    UPDATE = "its update is split"
    WEIGHT_READ = "{tensor} is used here, its update is split"
    WEIGHT_IN_LAYER = "{tensor} is used in this layer, its update is split"
    WEIGHT_AGAIN = "{tensor} is gathered again"
    WEIGHT_OUT_OF_LOOP = "{tensor} leaves the loop"
    COUNTS = "{first}, the counts"  # sent before a ragged exchange; `parts` holds its cause
    ANNOTATED = "{what}"  # `what`: dims, axes and the line of the `md.shard` that decided
    STEPS = "{first}, in steps: {axes} {verb} slow on {what}"  # `what`: the machine; `parts` holds the flat one's cause
    FLAT = "{first}, flat: {what}"  # `what`: the reason why it is not in steps; `parts` holds its cause
    FASTER = "{first}, faster than {what}"  # `what`: the plan that sends fewest bytes; `parts` holds its cause
    TOGETHER = "{amounts[0]} {what} together: {first}{more}"  # `what`: "tensors" or "numbers"; `parts`: their causes


@dataclass(frozen=True)
class Cause:
    """The reason for one collective: its kind, the operation and dims concerned, and the names of the tensors.

    >>> cause = Cause(Because.REDUCES, op="einsum", dims=("io",), what="sum")
    >>> print(cause)
    sum over 'io' of einsum
    >>> joined = Cause(Because.TOGETHER, amounts=(2,), what="tensors", parts=(cause, Cause(Because.READ, op="add")))
    >>> print(joined)
    2 tensors together: sum over 'io' of einsum, ...
    >>> joined.about
    ('io',)
    """

    kind: Because = Because.UNKNOWN
    op: str = ""
    dims: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    what: str = ""
    amounts: tuple[int, ...] = ()
    parts: tuple[Cause, ...] = ()  # the causes of all members of a joined collective
    axes: tuple[str, ...] = ()  # mesh axes concerned

    def __bool__(self) -> bool:
        return self.kind is not Because.UNKNOWN

    def __str__(self) -> str:
        names = [*self.dims, "", ""]
        text = self.kind.value.format(
            op=self.op,
            what=self.what,
            amounts=self.amounts,
            dims=", ".join(map(repr, self.dims)),
            dim=repr(names[0]),
            to=repr(names[1]),
            name=names[0],
            to_name=names[1],
            tensor=next(iter(self.tensors), "") or "a weight",
            first=str(self.parts[0]) if self.parts else "",
            more=", ..." if len(self.parts) > 1 else "",
            axes=" and ".join(map(repr, self.axes)),
            verb="is" if len(self.axes) == 1 else "are",
        )
        return text.removeprefix(", ")  # of a collective without a cause

    @property
    def about(self) -> tuple[str, ...]:
        """The dims that cause the collective, including those of the members of a joined collective."""
        return tuple(dict.fromkeys([*self.dims, *(dim for part in self.parts for dim in part.about)]))


NO_CAUSE = Cause()
