"""The mixture-of-experts layer: gate, dispatch, experts, combine (GShard, Lepikhin et al., 2020, section 2)."""

from __future__ import annotations

from typing import Any

import meshdsl as md

from ..linear import ACTIVATIONS
from ..precision import FLOAT32, Precision, dim_of, new_dim
from .assignment import assign
from .dispatch import dispatch_by, unweighted
from .options import PRESETS, capacity_of, choices_of, resolve, suggest

__all__ = ["moe_layer"]

EXCHANGES = ("padded", "ragged")
WEIGHED = ("output", "hidden")


def moe_layer(
    x: md.Tensor,
    experts: str | md.Dim,
    hidden: str | md.Dim,
    *,
    tokens: str | md.Dim = "length",
    over: str | md.Dim = "model",
    router: str = "top2",
    capacity_factor: float = 2.0,
    eval_capacity_factor: float | None = None,
    capacity_formula: str | None = None,
    train: bool = True,
    key: md.Tensor | None = None,
    nonpadding: md.Tensor | None = None,
    jitter: float = 0.0,
    aux_weight: float = 0.01,
    z_weight: float = 0.0,
    dispatch: str = "auto",
    exchange: str = "padded",
    weigh: str = "output",
    activation: str = "relu",
    gated: bool = False,
    name: str = "moe",
    init: Any = None,
    precision: Precision = FLOAT32,
    **options: Any,
) -> tuple[md.Tensor, md.Tensor]:
    """A mixture-of-experts feed-forward layer; returns y, with the dims of x, and the auxiliary loss.

    >>> import meshdsl as md
    >>> expert, hidden = md.dims("expert:4 expert_hidden:32")
    >>> model = md.model(lambda x: md.nn.moe_layer(x, expert, hidden))
    >>> model.specs(md.spec("batch:2 length:16 model:8"))["moe/wi"]
    float32[expert=4 model=8 expert_hidden=32]
    >>> md.eval_shape(model.init, md.random.key(0), md.spec("batch:2 length:16 model:8"))["moe/gate"]
    float32[model=8 gate=4]

    x is [groups, tokens, model]. Every dim other than `tokens` and `over` is a group dim: each of its elements is
    routed separately. y is zero for dropped tokens; add y to x. Add the auxiliary loss, a scalar, to the model's loss:
    it is `aux_weight` times the router's balance loss plus `z_weight` times the mean of logsumexp(logits) ** 2
    (ST-MoE, Zoph et al., 2022).

    The gate's product and softmax are computed in at least float32. `router` and `options` are those of
    `md.nn.moe.route`, or a preset. The capacity is `capacity_of(tokens, experts)` with `capacity_formula` (default: the
    preset's, else "mesh_tf"; "all" drops no token) and `capacity_factor`, or `eval_capacity_factor` if `train` is
    false. In training with a key, the inputs of the gate are multiplied by U(1 - jitter, 1 + jitter), and second
    choices may be rejected at random.

    Group and expert dims are renamed at the experts, so that a layout can shard both sides by one axis: `batch` becomes
    `expert_batch` there, and the gate's expert dim is called `gate`. Under `batch:rows; expert:rows`, slots are
    exchanged by all_to_all in the compute dtype; `expert_hidden:cols` shards each expert. `dispatch` is "index",
    "einsum" or "auto" (see `md.nn.moe.dispatch_by`). `exchange` is "padded", to send every slot, or "ragged", to send
    each expert's slots up to the last filled one (`md.ragged`); the results are equal. Ragged exchanges run on TPUs
    and GPUs. `weigh` says what the weights of the choices multiply: the "output" of the experts, in the sum over a
    token's slots, or their "hidden" layer, so that partial sums over a sharded `hidden` stay partial until this sum,
    and are reduced for each token instead of each slot.

    Raises `ShapeError` for unknown names. A program with a ragged exchange raises `LayoutError` when it is called on
    CPU devices; simulation, cost and compilation for TPUs work on any machine.
    """
    if exchange not in EXCHANGES:
        raise md.ShapeError(
            f"unknown exchange {exchange!r}; {suggest(exchange, EXCHANGES)}known: {', '.join(EXCHANGES)}"
        )
    if weigh not in WEIGHED:
        raise md.ShapeError(f"unknown weigh {weigh!r}; {suggest(weigh, WEIGHED)}known: {', '.join(WEIGHED)}")
    if activation not in ACTIVATIONS:
        raise md.ShapeError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    expert, inner = new_dim(experts, "experts"), new_dim(hidden, "the hidden dim")
    token, model_dim = dim_of(x, tokens), dim_of(x, over)
    groups = [d for d in x.dims if d not in (token, model_dim)]
    gate = md.Dim("gate", expert.size)
    formula = capacity_formula or (PRESETS[router].capacity if router in PRESETS else "mesh_tf")
    k = choices_of(*resolve(router, options))
    factor = capacity_factor if train or eval_capacity_factor is None else eval_capacity_factor
    slot = md.Dim("slot", capacity_of(token.size, expert.size, factor=factor, k=k, formula=formula))
    jitter_key, policy_key = (None, None) if key is None or not train else md.random.split(key)

    with md.scope(name):
        logits = _logits(x, model_dim, gate, jitter if train else 0.0, jitter_key, init, precision)
        assignment = assign(
            md.softmax(logits, gate),
            tokens=token,
            experts=gate,
            capacity=slot,
            router=router,
            uniforms=None if policy_key is None else md.random.uniform(policy_key, [*groups, token]),
            nonpadding=nonpadding,
            **options,
        )
        loss = assignment.aux_loss * aux_weight
        if z_weight:
            loss = loss + z_weight * _mean_square(md.logsumexp(logits, gate), nonpadding)
        weights = None
        if weigh == "hidden":
            assignment, weights = unweighted(assignment)
        dispatcher = dispatch_by(dispatch, assignment)
        share = min(1.0, k * token.size / (gate.size * slot.size)) if isinstance(assignment.by, tuple) else 1.0

        def mark_ragged(slots: md.Tensor) -> md.Tensor:
            return md.ragged(slots, assignment.used, slot, share) if exchange == "ragged" else slots

        expert_names = {**{d.name: f"{expert.name}_{d.name}" for d in groups}, gate.name: expert.name}
        expert_inputs = md.rename(mark_ragged(dispatcher.send(md.cast(x, precision.compute))), **expert_names)
        weights = None if weights is None else md.rename(weights, **expert_names)
        y = _experts(
            md.prefer(expert_inputs, expert), weights, expert, inner, model_dim, activation, gated, init, precision
        )
        expert_outputs = mark_ragged(md.rename(md.prefer(y, expert), **{new: old for old, new in expert_names.items()}))
        return md.transpose(dispatcher.receive(expert_outputs), x.dims), loss


def _logits(
    x: md.Tensor, model_dim: md.Dim, gate: md.Dim, jitter: float, key: md.Tensor | None, init: Any, precision: Precision
) -> md.Tensor:
    """The router's logits [..., gate], in at least float32."""
    dtype = "float64" if precision.reduce == "float64" else "float32"
    w = md.param("gate", [model_dim, gate], init=init or md.init.lecun(fan_in=model_dim), dtype=precision.param)
    x = md.cast(x, dtype)
    if jitter and key is not None:
        x = x * md.random.uniform(key, x.dims, 1 - jitter, 1 + jitter)
    return md.einsum(x, md.cast(w, dtype), out=[*(d for d in x.dims if d != model_dim), gate])


def _mean_square(x: md.Tensor, nonpadding: md.Tensor | None) -> md.Tensor:
    square = md.square(x)
    return md.mean(square if nonpadding is None else md.where(md.cast(nonpadding, "bool"), square, 0))


def _experts(
    x: md.Tensor,
    weights: md.Tensor | None,
    experts: md.Dim,
    hidden: md.Dim,
    model_dim: md.Dim,
    activation: str,
    gated: bool,
    init: Any,
    precision: Precision,
) -> md.Tensor:
    """Applies each expert's feed-forward layer to its slots, times the weights; keeps the dims of x."""
    outer = [d for d in x.dims if d != model_dim]
    act = ACTIVATIONS[activation]

    def product(y: md.Tensor, name: str, input_dim: md.Dim, output_dim: md.Dim) -> md.Tensor:
        w = md.param(
            name, [experts, input_dim, output_dim], init=init or md.init.lecun(fan_in=input_dim), dtype=precision.param
        )
        y = precision.einsum(y, w, out=[*outer, output_dim])
        return md.cast(md.prefer(y, experts, *outer), precision.compute)

    y = product(x, "wi", model_dim, hidden)
    y = act(product(x, "wi_gate", model_dim, hidden)) * y if gated else act(y)
    if weights is not None:
        y = y * md.cast(weights, y.dtype)
    return md.transpose(product(y, "wo", hidden, model_dim), x.dims)
