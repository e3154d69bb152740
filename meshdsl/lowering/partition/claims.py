"""The axes that operands and the layout request for the labels of one equation, and the conflicts between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

from ...dims import Dim, Shape
from ...errors import MeshdslError, at
from ...ir import Eqn, Labels, Type, Var
from ...jax_functions.blocks import elements_of_blocks
from ...jax_functions.function import TESTED, JaxFunction
from ...layouts.sharding import Axes
from .annotations import claim_annotated
from .choose import Claims, Conflict
from .legality import report_conflict
from .scope import Scope


def claims_of(scope: Scope, eqn: Eqn, labels: Labels, pending: Axes) -> Claims:
    """The axes that operands and the layout request for each label, without those that are unavailable.

    Labels that first appear in the result, and renamed dims, take the layout's axes.
    """
    layout, claims = scope.setting.layout, Claims()
    fresh = labels.from_layout | {label for label in labels.from_layout_if_ruled if label in layout.rules}
    for v, names in zip(eqn.ins, labels.ins, strict=True):
        if v not in scope.unmaterialized:
            _claim_operand(scope, claims, v, names, fresh, pending)
    known = set(claims.options) - fresh
    for names in labels.outs:
        for d, label in names.items():
            if label is not None and label not in known:
                claims.add(label, layout.axes(d))
    claim_annotated(claims, eqn.outs, labels, scope.setting.annotations)
    pairs = [*zip(eqn.ins, labels.ins, strict=True), *zip(eqn.outs, labels.outs, strict=True)]
    for label, options in claims.options.items():
        if options:
            dims = [d for v, names in pairs for d in v.dims if names[d.name] == label]
            claims.options[label] = [axes for axes in options if _divides(scope, dims, labels, label, axes)]
    return claims.without(frozenset(pending))


def wanted_axes(scope: Scope, eqn: Eqn, labels: Labels) -> dict[str, Axes]:
    """The axes of each label for results in the shardings in which their only readers take them."""
    found: dict[str, Axes] = {}
    if scope.setting.wanted.keys().isdisjoint(eqn.outs):
        return found
    pairs = [*zip(eqn.ins, labels.ins, strict=True), *zip(eqn.outs, labels.outs, strict=True)]
    for v, names in zip(eqn.outs, labels.outs, strict=True):
        for d, axes in scope.setting.wanted[v].split if v in scope.setting.wanted else ():
            label = names[d]
            dims = [d for x, of in pairs for d in x.dims if of[d.name] == label]
            if label is not None and _divides(scope, dims, labels, label, axes):
                found[label] = axes
    return found


def _claim_operand(
    scope: Scope, claims: Claims, v: Var, names: Mapping[str, str | None], fresh: Collection[str], pending: Axes
) -> None:
    """Claim the axes that split an operand and, for a pending sum, axes over which it could be reduce-scattered."""
    home = scope.default_sharding[v]
    brought = home if home.partial and pending else scope.whole_version(v) or home
    for d, label in names.items():
        if label is not None and label not in fresh:
            claims.add(label, brought.axes(d))
    if not brought.partial or brought.kind != "sum" or pending:
        return
    for d, label in names.items():
        axes = scope.setting.layout.axes(d)
        if axes and label is not None and set(axes) <= set(brought.partial) | set(brought.axes(d)):
            claims.add(label, axes)


def _divides(scope: Scope, dims: Sequence[Dim], labels: Labels, label: str, axes: Axes) -> bool:
    """True if the axes divide every dim with this label, and its blocks match where the label requires it."""
    n, extents = scope.setting.mesh.count(axes), scope.setting.extents
    if any(extents.padded(d) % n for d in dims):
        return False
    if label in labels.must_divide and label not in labels.from_layout_if_ruled:
        return not any(extents.is_padded(d, n) for d in dims)
    return label not in labels.from_layout or len({extents.local(d, n) for d in dims}) == 1


def region_blocks(
    scope: Scope, eqn: Eqn, labels: Labels, assigned: Mapping[str, Axes]
) -> tuple[Mapping[str, Axes], Eqn]:
    """The splits of the operands of an `md.local` region, and the region, which says how its blocks were checked.

    Its gradient uses the same blocks as the region itself.
    """
    setting, key = scope.setting, eqn.params["key"]
    if eqn.params["follows"]:
        assigned = setting.regions.get(key, assigned)
    setting.regions[key] = assigned
    for block in _blocks_of(scope, eqn, labels, assigned):
        types = [Type(_sized(v.dims, block), v.dtype) for v in eqn.ins]
        try:
            eqn.operation.type(*types, **{**eqn.params, "results": tuple(_sized(v.dims, block) for v in eqn.outs)})
        except MeshdslError as error:
            raise at(error, eqn.where) from None
        f = eqn.params["f"]
        if isinstance(f, JaxFunction) and f.tested(types):
            eqn = eqn.replace(params={**eqn.params, "check": TESTED})
    return assigned, eqn


def _blocks_of(scope: Scope, eqn: Eqn, labels: Labels, assigned: Mapping[str, Axes]) -> Iterator[Mapping[Dim, int]]:
    """The numbers of elements, by dim, of the blocks for which a region is compiled; see `without_padding`."""
    lengths: dict[Dim, list[int]] = {}
    for v, names in zip(eqn.ins, labels.ins, strict=True):
        for d in v.dims:
            n = scope.setting.mesh.count(assigned.get(names[d.name] or "", ()))
            elements = elements_of_blocks(d.size, scope.setting.extents.local(d, n), n)
            lengths[d] = sorted({*elements} - {0}, reverse=True) or [0]
    for sizes in product(*lengths.values()):
        yield dict(zip(lengths, sizes, strict=True))


def _sized(dims: Shape, block: Mapping[Dim, int]) -> Shape:
    return tuple(Dim(d.name, block.get(d, d.size)) for d in dims)


def settle_conflicts(scope: Scope, eqn: Eqn, labels: Labels, claims: Claims) -> tuple[Claims, list[str]]:
    """The claims without those of new dims to taken axes, and the labels that win by `md.prefer`.

    Conflicts that are not resolved are reported.
    """
    if not claims.contested and scope.setting.hints.keys().isdisjoint(eqn.outs):
        return claims, []
    hints = [(v, names, scope.setting.hints.get(v, ())) for v, names in zip(eqn.outs, labels.outs, strict=True)]
    preferred = [label for _, names, hint in hints for d in hint if (label := names[d]) is not None]
    if not eqn.backward:
        present = {label for names in labels.ins for label in names.values()}
        kept = {label for names in labels.outs for label in names.values() if label in present}
        claims = claims.without_taken(set(claims.options) - present - set(preferred) - set(claims.annotations), kept)
        for conflict in claims.contested:
            if not {conflict.first, conflict.second} & set(preferred) and scope.setting.wanted.keys().isdisjoint(
                eqn.outs
            ):
                _report_in_result(scope, eqn, labels, claims, conflict)
    return claims, preferred


def _report_in_result(scope: Scope, eqn: Eqn, labels: Labels, claims: Claims, conflict: Conflict) -> None:
    """Reports two dims of a result that claim one axis, unless an operand has both."""
    pair = {conflict.first, conflict.second}
    result = next((v for v, d in zip(eqn.outs, labels.outs, strict=True) if pair <= set(d.values())), None)
    if result is not None and not any(pair <= set(names.values()) for names in labels.ins):
        by_label = {label: d for names in labels.outs for d, label in names.items()}
        named = Conflict(conflict.axis, str(by_label[conflict.first]), str(by_label[conflict.second]))
        report_conflict(scope, claims, named, f"the result of {eqn.op}", result, eqn.where)
