"""Infer shardings from dim names: dims with equal labels are split over the same axes.

A dim's default label is its name, or None if the operation needs the dim unsplit. A label in both operands and results
passes its axes through. If a label vanishes, the result is partial over its axes. If a label first appears in the
result, the layout's rule decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..errors import InternalError
from ..ir import Eqn, Labels, learn, named
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..ops.index_map import IndexMap, one_label

REPLICATED = Sharding()


def labels_of(eqn: Eqn) -> Labels:
    """The labels of one operation's dims."""
    if "labels" not in eqn.__dict__:
        learn(eqn, "labels", _labels(eqn))
    return eqn.__dict__["labels"]


def _labels(eqn: Eqn) -> Labels:
    op = eqn.operation
    types = [v.type for v in eqn.ins]
    if op.rule is not None:
        return op.rule(*types, **eqn.params)
    moves = index_map_of(eqn)
    if moves is not None:
        return one_label(moves.dims, types, moves.out)
    blocked = op.blocked(*types, **eqn.params) if op.blocked is not None else ()
    return Labels(tuple(named(v.dims, blocked) for v in eqn.ins), tuple(named(v.dims, blocked) for v in eqn.outs))


def index_map_of(eqn: Eqn) -> IndexMap | None:
    """The index map of an operation that only moves elements; None for other operations."""
    moves = eqn.operation.moves
    return None if moves is None else moves(*(v.type for v in eqn.ins), **eqn.params)


def apply(
    names: Mapping[str, str | None], assigned: Mapping[str, Axes], partial: Collection[str] = (), kind: str = "sum"
) -> Sharding:
    """The sharding of one operand or result when labels have these axes."""
    if not assigned and not partial:
        return REPLICATED
    return Sharding.of({d: assigned.get(label, ()) for d, label in names.items() if label is not None}, partial, kind)


def _assigned(eqn: Eqn, labels: Labels) -> dict[str, Axes]:
    """The axes of every label of the operands."""
    assigned: dict[str, Axes] = {}
    for var, names in zip(eqn.ins, labels.ins, strict=True):
        for dim, label in names.items():
            axes = var.sharding.axes(dim)
            if label is None and axes:
                raise InternalError(f"{eqn.op} at {eqn.where} needs dim {dim!r} whole, it is split over {axes}")
            if label is not None and assigned.setdefault(label, axes) != axes:
                raise InternalError(
                    f"{eqn.op} at {eqn.where}: dim {dim!r} is split over {axes}, elsewhere over {assigned[label]}"
                )
    return assigned


def out_shardings(eqn: Eqn) -> list[Sharding | None]:
    """The result shardings that an operation's rule infers from its operands' shardings.

    New dims keep their stored axes. None means that every sharding is allowed. Raises `InternalError` when operands
    disagree on a label.
    """
    if not eqn.ins:
        return [None] * len(eqn.outs)
    if eqn.operation.shardings is not None:
        return list(eqn.operation.shardings(eqn))
    if all(v.sharding == REPLICATED for v in (*eqn.ins, *eqn.outs)):
        return [REPLICATED] * len(eqn.outs)
    labels = labels_of(eqn)
    assigned = _assigned(eqn, labels)
    pending, kind = _pending(eqn, [axis for label in labels.vanishing for axis in assigned[label]])
    results: list[Sharding | None] = []
    for var, names in zip(eqn.outs, labels.outs, strict=True):
        own_axes = {label: var.sharding.axes(d) for d, label in names.items() if label is not None}
        results.append(apply(names, {**own_axes, **assigned}, pending, kind))
    return results


def _pending(eqn: Eqn, vanished: Sequence[str]) -> tuple[set[str], str]:
    """The axes over which the results are partial, those of vanished labels among them, and the kind of reduction."""
    axes, kinds = set(vanished), set[str]([eqn.operation.reduce] if vanished else [])
    for sharding in (v.sharding for v in eqn.ins if v.sharding.partial):
        axes.update(sharding.partial)
        kinds.add(sharding.kind)
    if len(kinds) > 1 or "" in kinds:
        raise InternalError(f"{eqn.op} at {eqn.where} mixes pending reductions {sorted(kinds)}")
    return axes, next(iter(kinds), "sum")
