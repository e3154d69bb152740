"""The selective scan: a diagonal state-space layer whose step, input and output depend on the position."""

from __future__ import annotations

import meshdsl as md

from .precision import FLOAT32, DimLike, Precision, dim_of
from .recurrent import then


def selective_scan(
    x: md.Tensor,
    steps: md.Tensor,
    a: md.Tensor,
    b: md.Tensor,
    c: md.Tensor,
    state: md.Tensor | None = None,
    *,
    along: DimLike = "length",
    over: DimLike = "model",
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, md.Tensor]:
    """y[t] = c[t] h[t] with h[t] = exp(steps[t] a) h[t-1] + steps[t] b[t] x[t], and the last h [..., model, state].

    >>> import meshdsl as md
    >>> ones = md.tensor([[1.0], [1.0]], "length state")
    >>> x, steps = md.tensor([[1.0], [4.0]], "length model"), md.tensor([[1.0], [0.5]], "length model")
    >>> y, state = md.nn.selective_scan(x, steps, md.tensor([[-1.0]], "model state"), ones, ones)
    >>> y.numpy().ravel(), state.dims
    (array([1.       , 2.6065307], dtype=float32), (model=1, state=1))

    (Gu and Dao, "Mamba", 2023, algorithm 2.) x and `steps` are [..., length, model], `a` is [model, state], b and c are
    [..., length, state]. h begins as `state`, or as zeros. The states are an associative scan: if `along` is sharded,
    a device sends one state of each channel; if `over` is sharded, nothing. If dims map to the same mesh axis, `over`
    is sharded before `along`. States are computed and returned in the reduce dtype, and all of them are stored.
    """
    length, model = dim_of(x, along), dim_of(x, over)
    rest = [d for d in x.dims if d not in (length, model)]
    (n,) = (d for d in a.dims if d != model)
    dims = [*rest, length, model, n]

    def each(y: md.Tensor) -> md.Tensor:
        return md.prefer(md.broadcast(y, dims), *rest, model, length)

    result = x.dtype
    x, steps, a, b, c = (md.cast(y, precision.reduce) for y in (x, steps, a, b, c))
    decay = md.exp(each(steps) * a)
    drive = each(steps * x) * b
    total, h = md.associative_scan(then, (decay, drive), over=length)
    if state is not None:
        h = h + total * md.cast(state, h.dtype)
    last = md.slice(h, length, length.size - 1, 1)
    y = md.cast(md.einsum(h, c, out=x.dims), result)
    return y, md.reshape(last, [d for d in last.dims if d.name != length.name])
