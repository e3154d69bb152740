"""Placement operations set how a tensor is sharded; they never change values.

`prefer` sets precedence among dims and names no mesh axis, so a model that uses it works under every layout. `shard`
names mesh axes, so it ties a model to a mesh; `replicate` removes all sharding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..dims import ByDim, DimLike, find, show
from ..errors import InternalError, LayoutError, expect
from ..ir import Bounded, Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1

PREFER = Op(
    "prefer",
    type=lambda x, *, names: x,
    kernel=lambda c, x, *, names: x,
    vjp=lambda ct, x, names: (bind1(PREFER, ct, names=names),),
    linear=Linear.JOINT,
    fuses=Fuses.VIEW,
    again=True,
    bounded=Bounded.BY_OPERANDS,
)


def prefer(x: Any, *dims: DimLike) -> Tensor:
    """The same tensor; if several of its dims compete for a mesh axis, `dims` are sharded first, in the given order.

    >>> import meshdsl as md
    >>> md.prefer(md.tensor([[1.0]], "group expert"), "expert").dims
    (group=1, expert=1)
    """
    x = as_tensor(x)
    chosen = tuple(find(d, x.dims).name for d in dims)
    return bind1(PREFER, x, names=chosen)


SHARD = Op(
    "shard",
    type=lambda x, *, split: x,
    kernel=lambda c, x, *, split: x,
    vjp=lambda ct, x, split: (bind1(SHARD, ct, split=split),),
    fuses=Fuses.VIEW,
    bounded=Bounded.BY_OPERANDS,
)


def shard(x: Any, split: ByDim[str | Iterable[str]]) -> Tensor:
    """The same tensor, sharded exactly as `split` says; a dim not named is not sharded.

    Operations before it are sharded in the same way along dims that they keep, where neither an operand nor the layout
    decides and all readers ask for the same (GShard, Lepikhin et al., 2020, section 3.2).

    >>> import meshdsl as md
    >>> md.shard(md.tensor([1.0, 2.0], "batch"), {"batch": "rows"}).dims
    (batch=2,)

    `split` maps dims to mesh axes, major to minor. Raises `LayoutError` if an axis is used twice, and at compilation if
    the mesh lacks an axis.
    """
    x = as_tensor(x)

    pairs = tuple(
        (find(d, x.dims).name, tuple(re.split(r"[\s,+]+", axes)) if isinstance(axes, str) else tuple(axes))
        for d, axes in expect("split", split, Mapping).items()
    )
    used = [axis for _, axes in pairs for axis in axes]
    if twice := [axis for axis in used if used.count(axis) > 1]:
        requested = " ".join(f"{name}:{','.join(axes)}" for name, axes in pairs)
        raise LayoutError(
            f"md.shard uses the axis {twice[0]!r} twice in one tensor\n"
            f"  the requested split is {requested} of {show(x.dims)}, and a tensor can use an axis once\n"
            "  remove one of them, or use another axis"
        )
    return bind1(SHARD, x, split=pairs)


def replicate(x: Any) -> Tensor:
    """The same tensor, replicated on every device.

    >>> import meshdsl as md
    >>> md.replicate(md.tensor([1.0], "a")).dims
    (a=1,)
    """
    return shard(x, {})


def _unreachable_kernel(*_: Any, **__: Any) -> Any:
    raise InternalError("partition replaces a cut by a rename and a collective")


# A pending sum under other dim names, scattered over the axes of `split`; created by sharded weight updates
RESHARD_TO_PRIVATE_DIM = Op("cut", type=lambda x, *, shape, split: Type(shape, x.dtype), kernel=_unreachable_kernel)
