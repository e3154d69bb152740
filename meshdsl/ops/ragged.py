"""What of a tensor is filled: the first so many places along one dim, and a different number in each row.

The mark changes no value and no layout. It is a promise, of which the compiler makes use where what is marked is
exchanged (`lowering.trim`): there only what is filled travels.
"""

from __future__ import annotations

from typing import Any

from ..dims import Dim, DimLike, find, show
from ..errors import ShapeError
from ..ir import Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1
from .contraction import located

__all__ = ["RAGGED", "ragged"]


def _ragged_type(x: Type, counts: Type, *, dim: Dim, share: float) -> Type:
    extra = [d for d in counts.shape if d == dim or d not in x.shape]
    if dim not in x.shape or extra:
        raise ShapeError(
            f"md.ragged counts along {dim!r}, for each place of other dims of the tensor; it has {show(x.shape)}, and "
            f"the counts are {show(counts.shape)}\n"
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
    flops=lambda *_, **__: 0,
    fuses=Fuses.VIEW,
)


def ragged(x: Any, counts: Any, dim: DimLike, share: float = 1.0) -> Tensor:
    """The same tensor, of which along `dim` only the first `counts` places are filled.

    >>> import meshdsl as md
    >>> slots = md.tensor([[5.0, 0.0, 0.0], [7.0, 8.0, 0.0]], "expert slot")
    >>> md.ragged(slots, md.tensor([1, 2], "expert"), "slot").dims
    (expert=2, slot=3)

    `counts` are integers with some of the tensor's other dims. Requires that places past the count hold zero, or are
    read by nobody: where the tensor is exchanged by all_to_all over one mesh axis or several, on its way to the mark or
    from it, under its names or others, only what is filled is sent (a ragged_all_to_all, the counts exchanged first),
    and what is past the count arrives as zero. The gradient is marked with the same counts. Under a layout that
    exchanges nothing the mark is nothing. `share` is the part of all places that is expected to be filled, for the
    estimate of time; it changes no result.

    Raises `ShapeError` for counts that are no integers or have other dims, and for a share outside 0 to 1; when it is
    compiled, `LayoutError` for an exchange that cuts or joins a dim that the counts lack. A program with such an
    exchange runs on TPUs and GPUs: JAX has no ragged_all_to_all for CPUs.
    """
    x, counts = as_tensor(x), as_tensor(counts)

    def resolve() -> Dim:
        if not 0 <= share <= 1:
            raise ShapeError(f"the share of a tensor that is filled is from 0 to 1, got {share}")
        return find(dim, x.dims)

    return bind1(RAGGED, x, counts, dim=located(resolve), share=float(share))
