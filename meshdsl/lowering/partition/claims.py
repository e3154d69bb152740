"""The axes that operands and the layout request for the labels of one equation, and the conflicts between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...dims import Dim, show
from ...errors import MeshdslError, at
from ...ir import Eqn, Labels, Type, Var
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
        return not any(extents.is_padded(d) for d in dims)
    return label not in labels.from_layout or len({extents.padded(d) for d in dims}) == 1


def _gathered(eqn: Eqn, name: str) -> str:
    """Advice to gather a dim for a function of md operations, or of JAX arrays."""
    if eqn.params.get("whole") is not None or not (eqn.params.get("split") or eqn.params.get("contract")):
        return f"take it whole, md.local(..., whole={name!r})"
    return f"leave {name!r} out of split= and contract=, so that it is gathered first"


def _without_padded(scope: Scope, eqn: Eqn, labels: Labels, assigned: Mapping[str, Axes]) -> Mapping[str, Axes]:
    """The axes of dims that are stored without padding; the others are problems of the layout."""
    setting, extents, mesh = scope.setting, scope.setting.extents, scope.setting.mesh
    for v, names in zip(eqn.ins, labels.ins, strict=True):
        for d in v.dims:
            axes = assigned.get(names[d.name] or "", ())
            if axes and (extents.is_padded(d) or d.size % mesh.count(axes)):
                setting.problems.setdefault(
                    f"md.local cannot split dim {d.name!r} over mesh axis {', '.join(map(repr, axes))}\n"
                    f"  an operand has shape {show(v.dims)}; {d.name} is stored as {extents.padded(d)} to have equal "
                    f"blocks, and the function would see the padding\n"
                    f"  {_gathered(eqn, d.name)}, or give the dim a size that divides",
                    eqn.where,
                )
                assigned = {label: cut for label, cut in assigned.items() if label != names[d.name]}
    return assigned


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
    assigned, mesh = _without_padded(scope, eqn, labels, assigned), setting.mesh

    def block(v: Var, names: Mapping[str, str | None]) -> Type:
        sizes = (d.size // mesh.count(assigned.get(names[d.name] or "", ())) for d in v.dims)
        return Type(tuple(Dim(d.name, n) for d, n in zip(v.dims, sizes, strict=True)), v.dtype)

    types = [block(v, names) for v, names in zip(eqn.ins, labels.ins, strict=True)]
    try:
        results = tuple(block(v, names).dims for v, names in zip(eqn.outs, labels.outs, strict=True))
        eqn.operation.type(*types, **{**eqn.params, "results": results})
    except MeshdslError as error:
        raise at(error, eqn.where) from None
    f = eqn.params["f"]
    if isinstance(f, JaxFunction) and f.tested(types):
        eqn = eqn.replace(params={**eqn.params, "check": TESTED})
    return assigned, eqn


def settle_conflicts(scope: Scope, eqn: Eqn, labels: Labels, claims: Claims) -> list[str]:
    """The labels that win by `md.prefer`; unresolved conflicts are reported."""
    if not claims.contested and scope.setting.hints.keys().isdisjoint(eqn.outs):
        return []
    hints = [(v, names, scope.setting.hints.get(v, ())) for v, names in zip(eqn.outs, labels.outs, strict=True)]
    preferred = [label for _, names, hint in hints for d in hint if (label := names[d]) is not None]
    for conflict in claims.contested:
        pair = {conflict.first, conflict.second}
        tensor = next((v for v, names, _ in hints if pair <= set(names.values())), None)
        alike = any(pair <= set(names.values()) for names in labels.ins)
        if tensor is not None and not alike and not eqn.backward and not pair & set(preferred):
            by_label = {label: d for names in labels.outs for d, label in names.items()}
            named = Conflict(conflict.axis, str(by_label[conflict.first]), str(by_label[conflict.second]))
            report_conflict(scope, named, f"the result of {eqn.op}", tensor, eqn.where)
    return preferred
