"""Half blocks in zigzag order, so that every device has equal work under a causal mask.

Device i of n has the half blocks i and 2 n - 1 - i instead of 2 i and 2 i + 1: its queries then see the same number of
keys as any other's (Brandon et al., "Striped Attention", 2023, give every device equal work by another order). A block
takes two permutes of half a block to get there, and two to get back.
"""

from __future__ import annotations

from ....dims import Dim
from ....ir import Because, Cause, Eqn, Var
from ....layouts.sharding import Axes
from ....ops.index_map import PLACE, ROWS, PlaceTable, replaced
from ..index_map import Exchange
from ..scope import Scope

__all__ = ["in_order", "in_zigzag"]


def _routes(n: int, half: int) -> tuple[tuple[int, int], ...]:
    """The owners of the half blocks 2 i + half: in order, and in zigzag order."""
    chunks = [2 * i + half for i in range(n)]
    return tuple((i, chunk if chunk < n else 2 * n - 1 - chunk) for i, chunk in enumerate(chunks))


def in_zigzag(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes) -> Var:
    """The value with its half blocks in zigzag order; the even one is the first half of each device's block."""
    n = scope.setting.mesh.count(axes)
    return _moved(scope, eqn, x, dim, axes, [_routes(n, half) for half in (0, 1)])


def in_order(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes) -> Var:
    """The value with its half blocks in order again."""
    n = scope.setting.mesh.count(axes)
    back = [tuple(sorted((target, source) for source, target in _routes(n, half))) for half in (0, 1)]
    return _moved(scope, eqn, x, dim, axes, back)


def _moved(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes, routes: list[tuple[tuple[int, int], ...]]) -> Var:
    mesh, extents = scope.setting.mesh, scope.setting.extents
    n, stored = mesh.count(axes), extents.padded(dim)
    size = stored // n // 2
    half = Dim(f"{dim.name}__half", stored // 2)
    sharding = x.sharding.with_split(dim.name, ()).with_split(half.name, axes)
    cause = Cause(Because.BALANCE, eqn.operation.name, (dim.name,))
    came: list[Var] = []

    def var() -> Var:
        return Var(replaced(x.dims, dim, half), x.dtype, "", sharding)

    for k, route in enumerate(routes):
        cut, moved = var(), var()
        rows = {"dim": dim, "rows": half, "starts": (k * size,) * n, "axes": axes}
        scope.eqns.append(Eqn(ROWS, (x,), (cut,), rows, eqn.where, eqn.backward))
        scope.eqns.append(Eqn(Exchange(half.name, axes, route), (cut,), (moved,), {}, eqn.where, eqn.backward, cause))
        came.append(moved)
    out = Var(x.dims, x.dtype, x.name, x.sharding)
    params = {
        "dims": (half, half),
        "whole": (False, False),
        "out": dim,
        "table": PlaceTable((tuple(range(2 * size)),) * n),
        "fill": 0,
        "axes": axes,
    }
    scope.eqns.append(Eqn(PLACE, tuple(came), (out,), params, eqn.where, eqn.backward))
    return out
