"""One attention, or its gradient, that is being lowered: the axes of its dims, and its operands in these shardings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....dims import Dim, names
from ....ir import NO_CAUSE, Because, Cause, Eqn, Labels, Var
from ....layouts import Sharding
from ....layouts.sharding import Axes
from ....ops.attention.records import ATTENTION_GRAD, MOVING, attention_labels, own_shardings
from ....ops.attention.spec import AttentionSpec, value_dim
from ...labels import apply
from ..choose import Claims, choose
from ..claims import claims_of, settle_conflicts
from ..scope import Reader, Scope

Assigned = Mapping[str, Axes]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """An equation, the labels of its dims, and the axes of each label."""

    scope: Scope
    eqn: Eqn
    labels: Labels
    assigned: Assigned

    @staticmethod
    def of(scope: Scope, eqn: Eqn) -> AttentionCall:
        """Assign axes to the dims, so that the fewest bytes are sent."""
        how: AttentionSpec = eqn.params["how"]
        both = how.length and scope.setting.layout.axes(how.length) == scope.setting.layout.axes(how.keys)
        labels = _labels(eqn, how.length if how.keys == how.length or both else how.keys)
        nothing = all(v in scope.unmaterialized for v in eqn.ins)
        claims = Claims() if nothing else claims_of(scope, eqn, labels, ())

        def price(assigned: Assigned) -> float:
            operands = zip(eqn.ins, labels.ins, strict=True)
            return sum(scope.price(v, apply(names, assigned)) for v, names in operands)

        return AttentionCall(scope, eqn, labels, choose(*settle_conflicts(scope, eqn, labels, claims), price))

    @property
    def how(self) -> AttentionSpec:
        return self.eqn.params["how"]

    @property
    def gradient(self) -> bool:
        return self.eqn.op is ATTENTION_GRAD

    @property
    def roles(self) -> dict[str, Var]:
        """The operands by role."""
        return self.how.roles(self.eqn.ins)

    @property
    def keys(self) -> Axes:
        """The axes that split the positions of keys and values."""
        names = self.labels.ins[1]
        return self.assigned.get(names[self.how.keys] or "", ())

    @property
    def along(self) -> bool:
        """True if the same axes split the positions of queries and of keys."""
        return bool(self.keys) and self.labels.ins[1][self.how.keys] == self.how.length

    @property
    def count(self) -> int:
        """The number of devices along the axes that split the keys."""
        return self.scope.setting.mesh.count(self.keys)

    def dim(self, role: str, name: str) -> Dim:
        """A dim of an operand by its name."""
        return next(d for d in self.roles[role].dims if d.name == name)

    def whole_keys(self, assigned: Assigned | None = None) -> AttentionCall:
        """The same call with keys and values gathered."""
        axes = self.assigned if assigned is None else assigned
        return AttentionCall(self.scope, self.eqn, _labels(self.eqn, None), axes)

    def shardings(self) -> dict[str, Sharding]:
        """The sharding of every operand, by role."""
        return {r: apply(names, self.assigned) for r, names in zip(self.roles, self.labels.ins, strict=True)}

    def ins(self, causes: Mapping[str, Cause] | None = None) -> list[Var]:
        """The operands in these shardings, with zeros in the padding of dims that are summed over.

        `causes` are the reasons for the collectives of some operands; the others are "for attention".
        """
        operands: list[Var] = []
        for role, sharding in self.shardings().items():
            v = self.roles[role]
            cause = (causes or {}).get(role, NO_CAUSE)
            reader = Reader(self.eqn.operation.name, self.eqn.where, self.eqn.backward, cause) if cause else self.eqn
            operands.append(self.scope.masked(self.scope.get(v, sharding, reader), self._summed(role), 0, self.eqn))
        return operands

    def _summed(self, role: str) -> tuple[Dim, ...]:
        """The dims of an operand whose padding must be zero, because their elements are added."""
        how, shapes = self.how, [v.dims for v in self.eqn.ins]
        over = {"q": {how.over}, "k": {how.over, how.keys}, "v": {how.keys}}
        if self.gradient and role not in ("mask", "segments", "memory_segments", "offset"):
            every = {how.over, how.length, how.keys, value_dim(shapes[1], shapes[2], how).name}
            every.update(names(how.group(shapes[0], shapes[1])))
            if "bias" in self.roles:
                every.update(names(how.batch(shapes[1])))
            over = {role: every}
        return tuple(d for d in self.roles[role].dims if d.name in over.get(role, ()))

    def outs(self, ins: Sequence[Var]) -> list[Var]:
        """Define the results of the operation on these operands."""
        scope, eqn = self.scope, self.eqn
        if not self.gradient:
            return [
                scope.define(v, apply(names, self.assigned))
                for v, names in zip(eqn.outs, self.labels.outs, strict=True)
            ]
        results: list[Var] = []
        for v, sharding, role in zip(eqn.outs, own_shardings(eqn.replace(ins=tuple(ins))), self.moving, strict=True):
            results.append(scope.define(v, sharding))
            if sharding.partial:
                own = names(self.roles[role].dims)
                splits = [
                    d for s in self.shardings().values() for d, axes in s.split if set(axes) & set(sharding.partial)
                ]
                over = tuple(dict.fromkeys(d for d in splits if d not in own)) or (self.how.length,)
                scope.reasons[v] = (Cause(Because.REDUCES, eqn.operation.name, over, what="sum"), eqn.where, True)
        return results

    @property
    def moving(self) -> list[str]:
        """The operands that have a cotangent."""
        return [r for r in MOVING if r in self.roles]

    def add(self, ins: Sequence[Var], outs: Sequence[Var]) -> None:
        """Add the operation itself to the program."""
        self.scope.eqns.append(self.eqn.replace(ins=tuple(ins), outs=tuple(outs)))


def _labels(eqn: Eqn, keys: str | None) -> Labels:
    shapes, results = [v.dims for v in eqn.ins], [v.dims for v in eqn.outs]
    return attention_labels(shapes, results, eqn.params["how"], keys, eqn.op is ATTENTION_GRAD)
