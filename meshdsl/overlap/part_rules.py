"""Operations that read or make single parts of a cut dim, and reshapes whose outer dim has one element per device.

An `index` reads one row of a dim, and a `stack` of rows makes one. If the dim is cut, a row is in one part, so an
index needs only that part, and each part of a stack needs only its rows. (A model that routes its tokens in parts has
such rows; see `meshdsl.nn.moe`.)

A reshape passes on the cut of the outer dim of a merge or split. If a device stores one element of the outer dim, its
block is cut along the next one: a batch, for example, of one group of several sequences per device.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dims import Dim, Shape
from ..ir import Eqn
from ..layouts import Mesh
from ..ops.joining import INDEX, STACK
from ..ops.reshape import RESHAPE, groups

__all__ = ["inner_cut", "row_of", "rows_of_parts"]


def row_of(eqn: Eqn, dim: str, parts: int) -> tuple[int, int] | None:
    """The part that an index along the cut `dim` reads, and the row of that part; None for another equation."""
    if eqn.op is not INDEX or eqn.params["dim"].name != dim or eqn.params["dim"].size % parts:
        return None
    return divmod(eqn.params["at"], eqn.params["dim"].size // parts)


def rows_of_parts(eqn: Eqn, parts: int) -> list[slice] | None:
    """The operands of a stack that each part of its new dim consists of; None for another equation."""
    if eqn.op is not STACK or len(eqn.ins) % parts or eqn.outs[0].sharding.axes(eqn.params["dim"].name):
        return None
    each = len(eqn.ins) // parts
    return [slice(i * each, (i + 1) * each) for i in range(parts)]


def inner_cut(eqn: Eqn, dim: str, mesh: Mesh) -> str | None:
    """The dim of a reshape's result along which a device's block is cut if that of the operand is cut along `dim`.

    Only for reshapes whose outer dim, before or after, has one element per device; None for another equation.
    """
    if eqn.op is not RESHAPE or not all(d.size for d in eqn.ins[0].dims):
        return None
    x, y = eqn.ins[0], eqn.outs[0]

    def local(v_dims: Shape, axes_of: Sequence[tuple[str, ...]]) -> list[Dim]:
        """The dims of which a device has more than one element."""
        return [d for d, axes in zip(v_dims, axes_of, strict=True) if d.size > mesh.count(axes)]

    for left, right in groups(x.dims, y.dims):
        if dim not in [d.name for d in left] or left == right:
            continue
        inner = local(left, [x.sharding.axes(d) for d in left]), local(right, [y.sharding.axes(d) for d in right])
        if not all(inner) or inner[0][0].name != dim:
            return None
        outer_moved = inner[0][0] != left[0] or inner[1][0] != right[0]
        return inner[1][0].name if outer_moved else None
    return None
