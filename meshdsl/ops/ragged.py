"""`md.ragged` marks how many leading slots along one dim are filled, with a separate count per row.

The mark changes no value and no layout. When the marked tensor is exchanged between devices, the compiler sends only
the filled slots (`schedule.ragged_exchange`).
"""

from __future__ import annotations

from typing import Any

from ..dims import Dim, DimLike, find, show
from ..errors import ShapeError
from ..ir import Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1


def _ragged_type(x: Type, counts: Type, *, dim: Dim, share: float) -> Type:
    extra = [d for d in counts.dims if d == dim or d not in x.dims]
    if dim not in x.dims or extra:
        raise ShapeError(
            f"md.ragged counts along {dim!r}, for each place of other dims of the tensor; it has {show(x.dims)}, and "
            f"the counts are {show(counts.dims)}\n"
            f"  give counts with some of the tensor's dims, {dim.name!r} not among them"
        )
    if counts.dtype.kind not in "iu":
        raise ShapeError(f"md.ragged takes counts in integers, got {counts}\n  cast them: md.cast(counts, 'int32')")
    return x


RAGGED = Op(
    "ragged",
    type=_ragged_type,
    kernel=lambda c, x, counts, *, dim, share: x,
    vjp=lambda ct, x, counts, dim, share: (bind1(RAGGED, ct, counts, dim=dim, share=share), None),
    linear=Linear.FIRST,
    fuses=Fuses.VIEW,
)


def ragged(x: Any, counts: Any, dim: DimLike, share: float = 1.0) -> Tensor:
    """The same tensor, marked as filled only in the first `counts` slots along `dim`.

    >>> import meshdsl as md
    >>> slots = md.tensor([[5.0, 0.0, 0.0], [7.0, 8.0, 0.0]], "expert slot")
    >>> md.ragged(slots, md.tensor([1, 2], "expert"), "slot").dims
    (expert=2, slot=3)

    `counts` is an integer tensor with some of the tensor's other dims. Slots past the count must hold zero or never be
    read. If the tensor is exchanged by all_to_all over one or several mesh axes, before or after the mark, also after
    a rename, only filled slots are sent: the counts are exchanged first, then a ragged_all_to_all runs. Slots past the
    count arrive as zero. The gradient is marked with the same counts. Under a layout without such an exchange, the
    mark has no effect. `share` is the expected fraction of filled slots; only the predicted time depends on it.

    Raises `ShapeError` for counts that are not integers or have other dims, and for a share outside 0 to 1. At
    compilation, raises `LayoutError` for an exchange that splits or joins a dim that the counts lack. CPU devices, for
    which JAX has no ragged_all_to_all, send every slot and give the same result.
    """
    x, counts = as_tensor(x), as_tensor(counts)

    if not 0 <= share <= 1:
        raise ShapeError(f"the share of a tensor that is filled is from 0 to 1, got {share}")
    return bind1(RAGGED, x, counts, dim=find(dim, x.dims), share=float(share))
