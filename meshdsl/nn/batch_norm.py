"""Batch norm, whose running statistics are explicit state, and group norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import meshdsl as md

from .norms import normal, scaled
from .precision import FLOAT32, DimLike, DimsLike, Precision, dim_of, dims_of

State = Mapping[str, md.Tensor]


def batch_norm(
    x: md.Tensor,
    over: DimsLike,
    state: State | None = None,
    *,
    training: bool = True,
    momentum: float = 0.9,
    unbiased: bool = False,
    name: str = "norm",
    eps: float = 1e-5,
    scale: bool = True,
    bias: bool = True,
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, dict[str, md.Tensor]]:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the dims `over`, and the running statistics afterwards.

    >>> import meshdsl as md
    >>> model = md.model(lambda x, state: md.nn.batch_norm(x, "batch", state))
    >>> x = md.tensor([[1.0], [3.0]], "batch channels")
    >>> y, state = model(model.init(md.random.key(0), x, None), x, None)
    >>> y, state["mean"]
    (tensor(float32[batch=2 channels=1], [[-1.]
     [ 1.]]), tensor(float32[channels=1], [0.2]))

    (Ioffe and Szegedy, 2015.) In training, the batch's own mean and (biased) variance normalise, and the running ones
    become `momentum * running + (1 - momentum) * batch`; with `unbiased`, the batch's variance is multiplied by
    n / (n - 1) for this, as in PyTorch. Otherwise the running ones normalise, and stay. The state is a dict with `mean`
    and `var`, of the dims that are not in `over`; None is zeros and ones. It has no gradient. If `over` has a
    sharded dim, the statistics are those of the whole batch on all devices.
    """
    if not 0 <= momentum <= 1:
        raise md.ShapeError(f"the momentum of md.nn.batch_norm is from 0 to 1, got {momentum}")
    dims = dims_of(x, over)
    kept = [d for d in x.dims if d not in dims]
    wide = md.cast(x, precision.reduce)
    old = dict(state) if state else {"mean": md.zeros(kept, wide.dtype), "var": md.ones(kept, wide.dtype)}
    if training:
        y = normal(wide, dims, eps, True)
        still = md.stop_gradient(wide)
        n = math.prod(d.size for d in dims)
        factor = n / (n - 1) if unbiased and n > 1 else 1.0
        batch = {"mean": md.mean(still, dims), "var": md.var(still, dims) * factor}
        new = {key: momentum * x + (1 - momentum) * md.cast(batch[key], x.dtype) for key, x in old.items()}
    else:
        mean, var = (md.cast(md.stop_gradient(old[key]), wide.dtype) for key in ("mean", "var"))
        y, new = (wide - mean) * md.rsqrt(var + eps), old
    return scaled(y, tuple(kept), name, scale, bias, precision), new


def group_norm(
    x: md.Tensor,
    groups: int,
    over: DimLike = "channels",
    along: DimsLike = (),
    *,
    name: str = "norm",
    eps: float = 1e-5,
    scale: bool = True,
    bias: bool = True,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Norm over each of `groups` equal groups of the channels `over`, and over the dims `along`; scale per channel.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.group_norm(x, 2, "channels", along="height width"))
    >>> x = md.spec("batch:2 height:4 width:4 channels:8")
    >>> md.eval_shape(model, model.specs(x), x), model.specs(x)["norm/scale"]
    (float32[batch=2 height=4 width=4 channels=8], float32[channels=8])

    (Wu and He, 2018.) Raises `ShapeError` unless the groups divide the channels.
    """
    channels, dims = dim_of(x, over), dims_of(x, along)
    if groups < 1 or channels.size % groups:
        raise md.ShapeError(f"md.nn.group_norm cannot divide {channels!r} into {groups} equal groups")
    sizes = {"group": groups, "member": channels.size // groups}
    parts = [md.fresh_dim(md.Dim(f"{channels.name}_{part}", size), x.dims) for part, size in sizes.items()]
    split = md.unflatten(md.cast(x, precision.reduce), channels, parts)
    y = md.reshape(normal(split, (parts[1], *dims), eps, True), x.dims)
    return scaled(y, (channels,), name, scale, bias, precision)
