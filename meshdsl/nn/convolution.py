"""Convolution as a layer. The kernel stores its window dims first, then the input and the output channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import meshdsl as md

from .linear import with_bias
from .precision import FLOAT32, DimLike, Precision, dim_of, new_dim


def conv(
    x: md.Tensor,
    window: Mapping[str, int] | Mapping[md.Dim, int],
    over: DimLike,
    into: DimLike | None = None,
    *,
    stride: Any = 1,
    padding: Any = "same",
    dilation: Any = 1,
    name: str = "conv",
    bias: bool = True,
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Convolution over the dims of `window`, for example `{"height": 3, "width": 3}`, from channels `over` to `into`.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.conv(x, {"height": 3, "width": 3}, "channels", "features:16", stride=2))
    >>> x = md.spec("batch:2 height:8 width:8 channels:3")
    >>> model.specs(x)["conv/w"]
    float32[height_window=3 width_window=3 channels=3 features=16]
    >>> md.eval_shape(model, model.specs(x), x)
    float32[batch=2 height=4 width=4 features=16]

    The output channels take the place of the input channels; they may have the same name. Without `into`, each channel
    is convolved with a kernel of its own (depthwise). `stride`, `padding` and `dilation` are those of `md.conv`.
    """
    channels, elements = dim_of(x, over), _elements(x, window)
    output = channels if into is None else new_dim(into, "the output channels of md.nn.conv")
    if same_name := into is not None and output.name == channels.name:
        output = md.fresh_dim(md.Dim(f"{output.name}_out", output.size), x.dims)
    kernel = [md.fresh_dim(md.Dim(f"{d}_window", n), x.dims, [output]) for d, n in elements.items()]
    fan_in = kernel if into is None else [*kernel, channels]
    with md.scope(name):
        w = md.param("w", [*fan_in, output], init=init or md.init.lecun(fan_in=fan_in), dtype=precision.param)
        y = md.conv(
            md.cast(x, precision.compute),
            md.cast(w, precision.compute),
            window={d: k.name for d, k in zip(elements, kernel, strict=True)},
            out=[d.name if d.name in elements else output if d == channels else d for d in x.dims],
            stride=stride,
            padding=padding,
            dilation=dilation,
            dtype=precision.reduce,
        )
        y = with_bias(y, "b", (output,), precision) if bias else y
    y = md.cast(y, precision.compute)
    return md.rename(y, **{output.name: channels.name}) if same_name else y


def _elements(x: md.Tensor, window: Mapping[str, int] | Mapping[md.Dim, int]) -> dict[str, int]:
    elements = {dim_of(x, d).name: n for d, n in window.items()}
    if empty := [d for d, n in elements.items() if n < 1]:
        raise md.ShapeError(f"the window of md.nn.conv has at least 1 element, got {empty[0]}: {elements[empty[0]]}")
    return elements


def causal_conv(
    x: md.Tensor,
    size: int,
    over: DimLike,
    along: DimLike = "length",
    state: md.Tensor | None = None,
    *,
    name: str = "conv",
    bias: bool = True,
    init: Any = None,
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, md.Tensor]:
    """Convolution of each channel of `over` alone with the `size` positions up to each one, and the inputs to keep.

    >>> import meshdsl as md
    >>> model = md.model(lambda x, state: md.nn.causal_conv(x, 4, "channels", state=state))
    >>> x, state = md.spec("batch:2 length:5 channels:8"), md.spec("batch:2 recent:3 channels:8")
    >>> model.specs(x, state)["conv/w"]
    float32[length_window=4 channels=8]
    >>> md.eval_shape(model, model.specs(x, state), x, state)
    (float32[batch=2 length=5 channels=8], float32[batch=2 recent=3 channels=8])

    The second result has the last `size - 1` inputs, with the dim `recent` in place of `along`: pass it as `state` to
    continue where this call ended. Without a state, zeros precede x. If `along` is sharded, a device sends `size - 1`
    positions to its neighbour. Raises `ShapeError` for a state of another size, and for a `size`
    below 1.
    """
    if size < 1:
        raise md.ShapeError(f"md.nn.causal_conv reads at least 1 position, got size={size}")
    length, before = dim_of(x, along), md.fresh_dim(md.Dim("recent", size - 1), x.dims)
    dims = [before if d == length else d for d in x.dims]
    if state is not None and sorted(state.dims) != sorted(dims):
        raise md.ShapeError(f"the state of md.nn.causal_conv has the dims {dims}, got {list(state.dims)}")
    inputs = md.zeros(dims, x.dtype) if state is None else md.transpose(md.cast(state, x.dtype), dims)
    inputs = md.concat([md.rename(inputs, **{before.name: length.name}), x], length.name)
    recent = md.rename(md.slice(inputs, length.name, length.size, before.size), **{length.name: before.name})
    zeros = (before.size, 0)
    y = conv(
        x if state is None else inputs, {length.name: size}, over,
        padding={length.name: zeros if state is None else (0, 0)},
        name=name, bias=bias, init=init, precision=precision,
    )  # fmt: skip
    return y, recent
