"""Linear layers. Each weight stores its input dims first, then its output dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

from .precision import FLOAT32, DimLike, DimsLike, Precision, dim_of, dims_of, new_dim

ACTIVATIONS: dict[str, Callable[[md.Tensor], md.Tensor]] = {
    "relu": lambda x: md.relu(x),
    "gelu": lambda x: md.gelu(x),
    "silu": lambda x: md.silu(x),
    "tanh": lambda x: md.tanh(x),
    "none": lambda x: x,
}


def weight(name: str, over: tuple[md.Dim, ...], into: tuple[md.Dim, ...], init: Any, precision: Precision) -> md.Tensor:
    """A weight parameter [over..., into...]; the default init is LeCun normal with the dims `over` as fan-in."""
    init = init or md.init.lecun(fan_in=over)
    return md.param(name, [*over, *into], init=init, dtype=precision.param)


def with_bias(y: md.Tensor, name: str, dims: tuple[md.Dim, ...], precision: Precision) -> md.Tensor:
    """y plus a parameter of these dims, which starts at zero."""
    bias = md.param(name, dims, init=md.init.zeros(), dtype=precision.param)
    return y + md.cast(bias, y.dtype, reduce=precision.reduce)


def dense(
    x: md.Tensor,
    over: DimsLike,
    into: DimsLike,
    *,
    name: str = "dense",
    bias: bool = True,
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """x w + b: contracts the dims `over` and adds the dims `into` at the end.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.dense(x, "io", "hidden:16"))
    >>> model.specs(md.spec("batch:2 io:4"))
    {'dense/w': float32[io=4 hidden=16], 'dense/b': float32[hidden=16]}
    """
    summed = dims_of(x, over)
    new_dims = md.dims(into)
    with md.scope(name):
        w = weight("w", summed, new_dims, init, precision)
        y = precision.einsum(x, w, out=[*(d for d in x.dims if d not in summed), *new_dims])
        y = with_bias(y, "b", new_dims, precision) if bias else y
    return md.cast(y, precision.compute)


def linear(
    x: md.Tensor,
    over: DimsLike,
    into: DimsLike,
    *,
    name: str = "linear",
    bias: bool = True,
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """`md.nn.dense` under its name in other libraries; its parameters are `linear/w` and `linear/b`.

    >>> import meshdsl as md
    >>> md.model(lambda x: md.nn.linear(x, "io", "hidden:16", bias=False)).specs(md.spec("batch:2 io:4"))
    {'linear/w': float32[io=4 hidden=16]}
    """
    return dense(x, over, into, name=name, bias=bias, init=init, precision=precision)


def embedding(
    ids: md.Tensor,
    rows: DimLike,
    into: DimLike,
    *,
    name: str = "embed",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, md.Tensor]:
    """Looks up `ids` in a table [rows, into]; returns the rows and the table, for tying it to an output layer.

    >>> import meshdsl as md
    >>> vocab, width = md.dims("vocab:100 model:8")
    >>> model = md.model(lambda tokens: md.nn.embedding(tokens, vocab, width)[0])
    >>> md.eval_shape(model.init, md.random.key(0), md.spec("batch:2 length:5", "int32"))
    {'embed': float32[vocab=100 model=8]}

    A table sharded over `rows` is not gathered: each device looks up its own rows, and the results are summed.
    """
    rows, into = new_dim(rows, "the rows of md.nn.embedding"), new_dim(into, "the width of md.nn.embedding")
    table = md.param(name, [rows, into], init=init or md.init.normal(0.02), dtype=precision.param)
    found = md.take(md.cast(table, table.dtype, reduce=precision.reduce), ids, rows, drop=True)
    return md.cast(found, precision.compute), table


def learned_positions(
    x: md.Tensor,
    over: DimLike = "length",
    into: DimLike = "model",
    *,
    name: str = "positions",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Adds a learned vector to x for each position along `over`; the parameter has dims [over, into].

    >>> import meshdsl as md
    >>> model = md.model(md.nn.learned_positions)
    >>> x = md.spec("batch:2 length:5 model:8")
    >>> model.specs(x), md.eval_shape(model, model.specs(x), x)
    ({'positions': float32[length=5 model=8]}, float32[batch=2 length=5 model=8])

    Raises `ShapeError` if x lacks `over` or `into`.
    """
    dims = (dim_of(x, over), dim_of(x, into))
    table = md.param(name, dims, init=init or md.init.normal(0.02), dtype=precision.param)
    return x + md.cast(table, x.dtype, reduce=precision.reduce)


def feed_forward(
    x: md.Tensor,
    hidden: DimLike,
    over: DimsLike = "model",
    *,
    name: str = "feed_forward",
    activation: str = "relu",
    gated: bool = False,
    bias: bool = False,
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """activation(x w_in) w_out, or if `gated` (activation(x w_gate) * (x w_in)) w_out; has the dims of x.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.feed_forward(x, md.Dim("d_ff", 32), gated=True, activation="silu"))
    >>> specs = model.specs(md.spec("batch:2 model:8"))
    >>> specs["feed_forward/w_gate"], specs["feed_forward/w_out"]
    (float32[model=8 d_ff=32], float32[d_ff=32 model=8])

    (Vaswani et al., 2017, section 3.3; gated: Shazeer, "GLU variants improve Transformer", 2020.) If several dims of
    the hidden tensor map to the same mesh axis, `hidden` is sharded. Raises `ShapeError` for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise md.ShapeError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    summed, inner = dims_of(x, over), new_dim(hidden, "the hidden dim of md.nn.feed_forward")
    rest = [d for d in x.dims if d not in summed]

    def product(y: md.Tensor, kind: str, summed: tuple[md.Dim, ...], into: tuple[md.Dim, ...]) -> md.Tensor:
        y = precision.einsum(y, weight(f"w_{kind}", summed, into, init, precision), out=[*rest, *into])
        y = md.prefer(y, inner) if inner in into else y
        return md.cast(with_bias(y, f"b_{kind}", into, precision) if bias else y, precision.compute)

    with md.scope(name):
        y = product(x, "in", summed, (inner,))
        act = ACTIVATIONS[activation]
        y = act(product(x, "gate", summed, (inner,))) * y if gated else act(y)
        return md.transpose(product(y, "out", (inner,), summed), x.dims)
