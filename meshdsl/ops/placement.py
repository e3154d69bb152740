"""Placement says where a tensor should lie; it never changes a value.

`prefer` states precedence and names no mesh axis, so a model that uses it works under every layout. `shard` and
`replicate` name axes and are for the person who owns both the model and the mesh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..dims import DimLike, find
from ..ir import Fuses, Linear, Op
from ..trace import as_tensor, bind1
from ..values import Tensor
from .contraction import located

__all__ = ["SHARD", "prefer", "replicate", "shard"]

PREFER = Op(
    "prefer",
    type=lambda x, *, names: x,
    kernel=lambda c, x, *, names: x,
    vjp=lambda ct, x, names: (bind1(PREFER, ct, names=names),),
    linear=Linear.JOINT,
    flops=lambda *_, **__: 0,
    fuses=Fuses.VIEW,
)


def prefer(x: Any, *dims: DimLike) -> Tensor:
    """The same tensor; where its dims compete for a mesh axis, these are split, the first named first.

    >>> import meshdsl as md
    >>> md.prefer(md.tensor([[1.0]], "group expert"), "expert").dims
    (group=1, expert=1)
    """
    x = as_tensor(x)
    chosen = located(lambda: tuple(find(d, x.dims).name for d in dims))
    return bind1(PREFER, x, names=chosen)


SHARD = Op(
    "shard",
    type=lambda x, *, split: x,
    kernel=lambda c, x, *, split: x,
    vjp=lambda ct, x, split: (bind1(SHARD, ct, split=split),),
    flops=lambda *_, **__: 0,
    fuses=Fuses.VIEW,
)


def shard(x: Any, split: Mapping[str, str | Iterable[str]]) -> Tensor:
    """The same tensor, split exactly so: a dim not named is whole on every device.

    >>> import meshdsl as md
    >>> md.shard(md.tensor([1.0, 2.0], "batch"), {"batch": "rows"}).dims
    (batch=2,)

    Raises `LayoutError` at compilation when the mesh lacks an axis, or one axis is given twice.
    """
    x = as_tensor(x)

    def resolve() -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple(
            (find(d, x.dims).name, tuple(re.split(r"[\s,+]+", axes)) if isinstance(axes, str) else tuple(axes))
            for d, axes in split.items()
        )

    return bind1(SHARD, x, split=located(resolve))


def replicate(x: Any) -> Tensor:
    """The same tensor, whole on every device.

    >>> import meshdsl as md
    >>> md.replicate(md.tensor([1.0], "a")).dims
    (a=1,)
    """
    return shard(x, {})
