"""Recurrent layers: LSTM, GRU, and a diagonal state-space layer.

The products with the inputs are computed for all positions at once; the loop multiplies only by the recurrent weight.
The state-space layer has no loop: its states are an associative scan, so that `along` may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

from .precision import FLOAT32, DimLike, Precision, dim_of, new_dim


def _recurrent(
    x: md.Tensor,
    dims: tuple[md.Dim, md.Dim, md.Dim],
    gates: int,
    state: tuple[md.Tensor, ...] | int,
    step: Callable[..., Any],
    precision: Precision,
) -> tuple[md.Tensor, Any]:
    """The outputs along the first of `dims` and the last state; `step(state, inputs, product)` returns a new state.

    The first tensor of a state is the output. `state` may be a number of zero tensors.
    """
    along, over, hidden = dims
    gate = md.fresh_dim(md.Dim("gate", gates), x.dims, [hidden])
    before = md.fresh_dim(md.Dim(f"{hidden.name}_before", hidden.size), x.dims)
    rest = [d for d in x.dims if d not in (along, over)]
    init = md.init.lecun(fan_in=[over])
    w = md.param("w", [over, gate, hidden], init=init, dtype=precision.param)
    u = md.param("u", [before, gate, hidden], init=md.init.lecun(fan_in=[before]), dtype=precision.param)
    b = md.param("b", [gate, hidden], init=md.init.zeros(), dtype=precision.param)
    inputs = precision.einsum(x, w, out=[along, *rest, gate, hidden])
    inputs = inputs + md.cast(b, inputs.dtype)
    if isinstance(state, int):
        state = (md.zeros([*rest, hidden], precision.reduce),) * state

    def trip(state: Any, row: md.Tensor) -> Any:
        h = md.rename(state[0], **{hidden.name: before.name})
        product = precision.einsum(h, u, out=[*rest, gate, hidden])
        state = step(state, *(md.unstack(y, gate) for y in (row, product)))
        return state, state[0]

    last, outputs = md.scan(trip, state, inputs, over=along)
    outputs = md.transpose(outputs, [hidden if d == over else d for d in x.dims])
    return md.cast(outputs, precision.compute), last


def lstm(
    x: md.Tensor,
    into: DimLike,
    over: DimLike = "model",
    along: DimLike = "length",
    state: tuple[md.Tensor, md.Tensor] | None = None,
    *,
    name: str = "lstm",
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, tuple[md.Tensor, md.Tensor]]:
    """The outputs of an LSTM along a dim, with the dim `into` in place of `over`, and its last state (h, c).

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.lstm(x, "hidden:16"))
    >>> x = md.spec("batch:2 length:5 model:8")
    >>> md.eval_shape(model, model.specs(x), x)[0], model.specs(x)["lstm/u"]
    (float32[batch=2 length=5 hidden=16], float32[hidden_before=16 gate=4 hidden=16])

    (Hochreiter and Schmidhuber, 1997; without peepholes.) The gates are input, forget, cell and output. `state` is the
    one to begin with (default: zeros).
    """
    hidden = new_dim(into, "the hidden dim of md.nn.lstm")

    def step(state: Any, inputs: list[md.Tensor], product: list[md.Tensor]) -> Any:
        i, f, g, o = (a + b for a, b in zip(inputs, product, strict=True))
        c = md.sigmoid(f) * state[1] + md.sigmoid(i) * md.tanh(g)
        return md.sigmoid(o) * md.tanh(c), c

    dims = dim_of(x, along), dim_of(x, over), hidden
    with md.scope(name):
        return _recurrent(x, dims, 4, state or 2, step, precision)


def gru(
    x: md.Tensor,
    into: DimLike,
    over: DimLike = "model",
    along: DimLike = "length",
    state: md.Tensor | None = None,
    *,
    name: str = "gru",
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, md.Tensor]:
    """The outputs of a gated recurrent unit along a dim, with the dim `into` in place of `over`, and its last state.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.gru(x, "hidden:16"))
    >>> x = md.spec("batch:2 length:5 model:8")
    >>> md.eval_shape(model, model.specs(x), x)[0]
    float32[batch=2 length=5 hidden=16]

    (Cho et al., 2014, in the form of cuDNN: the reset gate multiplies the recurrent product and its bias.) The gates
    are reset, update and new. `state` is the one to begin with (default: zeros).
    """
    hidden = new_dim(into, "the hidden dim of md.nn.gru")
    with md.scope(name):
        bias = md.param("b_new", [hidden], init=md.init.zeros(), dtype=precision.param)

        def step(state: Any, inputs: list[md.Tensor], product: list[md.Tensor]) -> Any:
            reset, update = (md.sigmoid(inputs[k] + product[k]) for k in (0, 1))
            new = md.tanh(inputs[2] + reset * (product[2] + md.cast(bias, reset.dtype)))
            return ((1 - update) * new + update * state[0],)

        dims = dim_of(x, along), dim_of(x, over), hidden
        outputs, (last,) = _recurrent(x, dims, 3, 1 if state is None else (state,), step, precision)
    return outputs, last


def state_space(
    x: md.Tensor,
    states: DimLike,
    over: DimLike = "model",
    along: DimLike = "length",
    *,
    name: str = "state_space",
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """A diagonal state-space layer: each channel of `over` drives `states` decaying states along a dim.

    >>> import meshdsl as md
    >>> model = md.model(lambda x: md.nn.state_space(x, "state:16"))
    >>> x = md.spec("batch:2 length:5 model:8")
    >>> md.eval_shape(model, model.specs(x), x), sorted(model.specs(x))
    (float32[batch=2 length=5 model=8], ['state_space/c', 'state_space/d', 'state_space/log_a', 'state_space/log_dt'])

    h[t] = exp(-a dt) h[t-1] + (1 - exp(-a dt)) / a x[t], and y[t] = sum(c h[t]) + d x[t] (Gu et al., "On the
    parameterization and initialization of diagonal state space models", 2022, S4D-Real, zero-order hold). The states
    are an associative scan: if `along` is sharded, one state per device is gathered.
    """
    n, model, length = new_dim(states, "the states of md.nn.state_space"), dim_of(x, over), dim_of(x, along)
    wide = md.cast(x, precision.reduce)

    def rates(key: Any, dims: Any, dtype: Any) -> md.Tensor:
        return md.broadcast(md.log(md.cast(md.iota(n), dtype) + 1), dims)

    def steps(key: Any, dims: Any, dtype: Any) -> md.Tensor:  # from 0.001 to 0.1, evenly in the logarithm
        return md.random.uniform(key, dims, -6.9, -2.3, dtype)

    with md.scope(name):
        log_a = md.param("log_a", [model, n], init=rates, dtype=precision.param)
        log_dt = md.param("log_dt", [model], init=steps, dtype=precision.param)
        c = md.param("c", [model, n], init=md.init.normal(n.size**-0.5), dtype=precision.param)
        d = md.param("d", [model], init=md.init.ones(), dtype=precision.param)
    a = md.exp(md.cast(log_a, wide.dtype))
    exponent = -a * md.exp(md.cast(log_dt, wide.dtype))
    dims = [*x.dims, n]
    decay = md.broadcast(md.exp(exponent), dims)
    drive = md.broadcast(wide, dims) * (-md.expm1(exponent) / a)
    h = md.associative_scan(then, (decay, drive), over=length)[1]
    y = md.einsum(h, md.cast(c, h.dtype), out=x.dims) + md.cast(d, wide.dtype) * wide
    return md.cast(y, precision.compute)


def then(first: Any, second: Any) -> Any:
    """One step (decay, drive) of a linear recurrence after another, as one step."""
    return first[0] * second[0], second[0] * first[1] + second[1]
