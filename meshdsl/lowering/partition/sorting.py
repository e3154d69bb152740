"""Sort along a split dim, so that each device stores its block of the sorted dim.

Either an all_to_all moves the split to another dim, each device sorts, and a second all_to_all moves the split back; or
an all_gather gives every device all elements, which it sorts. The second way is taken if it sends fewer bytes, or if no
other dim has blocks that the devices can divide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...dims import Dim
from ...ir import Because, Cause, Eqn, Var
from ...layouts.sharding import Axes
from ..collectives import AllToAll, Slice
from .index_map import gathered
from .scope import Scope


def build(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Mapping[str, Axes], outs: Sequence[Var]) -> None:
    """Add the equations of a sort."""
    (x,), over = ins, eqn.params["over"]
    axes = assigned[over.name]
    other = _other_dim(scope, eqn, x, over, axes)
    if other is None:
        cause = Cause(Because.WHOLE, "sort", (over.name,))
        whole, back = gathered(scope, eqn, x, over, axes, cause), Slice(over.name, axes)
        cause_back = Cause(Because.READ, "sort")
    else:
        out, back = AllToAll(over.name, other.name, axes), AllToAll(other.name, over.name, axes)
        whole = Var(x.dims, x.dtype, "", out.step(x.sharding, scope.setting.mesh))
        scope.add(out, [x], [whole], eqn, Cause(Because.CUT_INSTEAD, "sort", (over.name, other.name)))
        cause_back = Cause(Because.BACK, "sort", (other.name, over.name))
    results = [Var(v.dims, v.dtype, "", whole.sharding) for v in outs]
    scope.add(eqn.operation, [whole], results, eqn, **eqn.params)
    for v, result in zip(results, outs, strict=True):
        scope.add(back, [v], [result], eqn, cause_back)


def _other_dim(scope: Scope, eqn: Eqn, x: Var, over: Dim, axes: Axes) -> Dim | None:
    """The dim to split instead; None if there is none, or if gathering sends fewer bytes.

    Of n blocks, a device receives n - 1 in a gather, and (n - 1) / n of one in each all_to_all.
    """
    mesh, users = scope.setting.mesh, scope.demand.sums.users
    n, extents = mesh.count(axes), scope.setting.extents
    read = [v.dtype.itemsize for v in eqn.outs if users.get(v) or v in scope.graph.outs]
    if x.dtype.itemsize + sum(read) > n * x.dtype.itemsize:
        return None
    others = (d for d in x.dims if d != over and d.size)
    return next((d for d in others if extents.divides(d, mesh.count(x.sharding.axes(d)), n)), None)
