"""Layer norm and RMS norm, with a custom gradient that saves only the normalised input and its scale.

With z = (x - mean) / s, the gradient of x is (ct - mean(ct) - z mean(ct z)) / s. RMS norm has no mean(ct) term.
"""

from __future__ import annotations

from typing import Any

import meshdsl as md

from .linear import with_bias
from .precision import FLOAT32, DimsLike, Precision, dims_of


def layer_norm(
    x: md.Tensor,
    over: DimsLike = "model",
    *,
    name: str = "norm",
    eps: float = 1e-5,
    scale: bool = True,
    bias: bool = True,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """(x - mean) / sqrt(variance + eps) * scale + bias, over one dim or several (Ba et al., 2016).

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.layer_norm(x, "model"))
    >>> x = md.tensor([[1.0, 3.0]], "batch model")
    >>> model(model.init(md.random.key(0), x), x)
    tensor(float32[batch=1 model=2], [[-1.  1.]])
    """
    dims = dims_of(x, over)
    y = normal(md.cast(x, precision.reduce), dims, eps, centre=True)
    return scaled(y, dims, name, scale, bias, precision)


def rms_norm(
    x: md.Tensor,
    over: DimsLike = "model",
    *,
    name: str = "norm",
    eps: float = 1e-6,
    scale: bool = True,
    scale_offset: float = 0.0,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """x / sqrt(mean square + eps) * scale, over one dim or several (Zhang and Sennrich, 2019).

    With `scale_offset` 1, x is multiplied by 1 + scale, and the scale starts at 0 (Gemma).

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.rms_norm(x, "model"))
    >>> x = md.tensor([[1.0, 7.0]], "batch model")
    >>> model(model.init(md.random.key(0), x), x)
    tensor(float32[batch=1 model=2], [[0.2 1.4]])
    """
    dims = dims_of(x, over)
    y = normal(md.cast(x, precision.reduce), dims, eps, centre=False)
    return scaled(y, dims, name, scale, False, precision, scale_offset)


def scaled(
    y: md.Tensor,
    dims: tuple[md.Dim, ...],
    name: str,
    scale: bool,
    bias: bool,
    precision: Precision,
    offset: float = 0.0,
) -> md.Tensor:
    """y * (scale + offset) + bias, in the compute dtype, with parameters of these dims; the sum starts at 1."""
    with md.scope(name):
        if scale:
            init = md.init.constant(1 - offset) if offset else md.init.ones()
            factor = md.param("scale", dims, init=init, dtype=precision.param)
            factor = md.cast(factor, y.dtype, reduce=precision.reduce)
            y = y * (factor + offset if offset else factor)
        y = with_bias(y, "bias", dims, precision) if bias else y
    return md.cast(y, precision.compute)


def normal(x: md.Tensor, over: tuple[md.Dim, ...], eps: float, centre: bool) -> md.Tensor:
    """(x - mean) / sqrt(variance + eps), without the mean unless `centre`."""

    def forward(x: md.Tensor) -> tuple[md.Tensor, Any]:
        centred = x - md.mean(x, over) if centre else x
        reciprocal = md.rsqrt(md.mean(md.square(centred), over) + eps)
        normal = centred * reciprocal
        return normal, (normal, reciprocal)

    def backward(saved: Any, ct: md.Tensor) -> tuple[md.Tensor]:
        normal, reciprocal = saved
        inner = ct - md.mean(ct, over) if centre else ct
        return (reciprocal * (inner - normal * md.mean(ct * normal, over)),)

    return md.custom_vjp(lambda x: forward(x)[0], forward, backward)(x)
