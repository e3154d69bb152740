"""The mixture-of-experts layer: gate, dispatch, experts, combine (GShard, Lepikhin et al., 2020, section 2)."""

from __future__ import annotations

from typing import Any

import meshdsl as md

from ..linear import ACTIVATIONS
from ..precision import FLOAT32, Precision, dim_of, new_dim
from .assignment import assign
from .dispatch import dispatch_by
from .options import PRESETS, capacity_of, choices_of, near, resolve

__all__ = ["moe_layer"]

EXCHANGES = ("padded", "ragged")


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
    activation: str = "relu",
    gated: bool = False,
    name: str = "moe",
    init: Any = None,
    precision: Precision = FLOAT32,
    **options: Any,
) -> tuple[md.Tensor, md.Tensor]:
    """A feed-forward layer of which each token uses the experts that its gate chooses: (y, auxiliary loss).

    >>> import meshdsl as md
    >>> expert, hidden = md.dims("expert:4 expert_hidden:32")
    >>> model = md.model(lambda x: md.nn.moe_layer(x, expert, hidden))
    >>> model.specs(md.spec("batch:2 length:16 model:8"))["moe/wi"]
    float32[expert=4 model=8 expert_hidden=32]
    >>> md.eval_shape(model.init, md.random.key(0), md.spec("batch:2 length:16 model:8"))["moe/gate"]
    float32[model=8 gate=4]

    x is [groups, tokens, model]: every dim but `tokens` and `over` is batch-like, each of its places a group that is
    routed by itself. y is zero where a token was dropped; add it to x. The loss to add to the model's is `aux_weight`
    times the router's balance loss plus `z_weight` times the mean of logsumexp(logits) ** 2 (ST-MoE, Zoph et al.,
    2022), one number.

    The router's product and softmax are float32. `router` and `options` are those of `md.nn.moe.route`, presets
    included; the capacity is `capacity_of(tokens, experts)` by `capacity_formula` (the preset's; else "mesh_tf") with
    the factor for training or evaluation. In training, with a key, inputs of the gate are multiplied by
    U(1 - jitter, 1 + jitter), and a second choice may be refused at random.

    Between the groups' side and the experts' side dims have other names, so that a layout may split both by one
    axis: `batch` is `expert_batch` at the experts, and `gate` is what the gate calls experts. A layout
    `batch:rows; expert:rows` exchanges slots by all_to_all, in the compute dtype; `expert_hidden:cols` splits each
    expert. `dispatch` is "index", "einsum" or "auto", as in `md.nn.moe.dispatch_by`. `exchange` says what an
    all_to_all sends: "padded", every slot; "ragged", only those up to an expert's last one that is taken (`md.ragged`),
    to equal results. Ragged exchanges run on TPUs and GPUs.

    Raises `ShapeError` for unknown names; a program with a ragged exchange raises `LayoutError` when it is called on
    CPU devices, and is simulated, costed and compiled for TPUs on any.
    """
    if exchange not in EXCHANGES:
        raise md.ShapeError(f"no exchange {exchange!r}; {near(exchange, EXCHANGES)}there are: {', '.join(EXCHANGES)}")
    if activation not in ACTIVATIONS:
        raise md.ShapeError(f"no activation {activation!r}; there are: {', '.join(ACTIVATIONS)}")
    expert, inner = new_dim(experts, "experts"), new_dim(hidden, "the hidden dim")
    token, wide = dim_of(x, tokens), dim_of(x, over)
    groups = [d for d in x.dims if d not in (token, wide)]
    gate = md.Dim("gate", expert.size)
    formula = capacity_formula or (PRESETS[router].capacity if router in PRESETS else "mesh_tf")
    k = choices_of(*resolve(router, options))
    factor = capacity_factor if train or eval_capacity_factor is None else eval_capacity_factor
    slot = md.Dim("slot", capacity_of(token.size, expert.size, factor=factor, k=k, formula=formula))
    noise, coin = (None, None) if key is None or not train else md.random.split(key)

    with md.scope(name):
        logits = _logits(x, wide, gate, jitter if train else 0.0, noise, init, precision)
        found = assign(
            md.softmax(logits, gate),
            tokens=token,
            experts=gate,
            capacity=slot,
            router=router,
            uniforms=None if coin is None else md.random.uniform(coin, [*groups, token]),
            nonpadding=nonpadding,
            **options,
        )
        loss = found.aux_loss * aux_weight
        if z_weight:
            loss = loss + z_weight * _mean_square(md.logsumexp(logits, gate), nonpadding)
        way = dispatch_by(dispatch, found)
        share = min(1.0, k * token.size / (gate.size * slot.size)) if isinstance(found.by, tuple) else 1.0

        def marked(slots: md.Tensor) -> md.Tensor:
            return md.ragged(slots, found.used, slot, share) if exchange == "ragged" else slots

        there = {**{d.name: f"{expert.name}_{d.name}" for d in groups}, gate.name: expert.name}
        sent = md.rename(marked(way.send(md.cast(x, precision.compute))), **there)
        y = _experts(md.prefer(sent, expert), expert, inner, wide, activation, gated, init, precision)
        back = marked(md.rename(md.prefer(y, expert), **{new: old for old, new in there.items()}))
        return md.transpose(way.receive(back), x.dims), loss


def _logits(
    x: md.Tensor, wide: md.Dim, gate: md.Dim, jitter: float, key: md.Tensor | None, init: Any, precision: Precision
) -> md.Tensor:
    """The router's logits [..., gate], in float32 at least."""
    exact = "float64" if precision.reduce == "float64" else "float32"
    w = md.param("gate", [wide, gate], init=init or md.init.lecun(fan_in=wide), dtype=precision.param)
    x = md.cast(x, exact)
    if jitter and key is not None:
        x = x * md.random.uniform(key, x.dims, 1 - jitter, 1 + jitter)
    return md.einsum(x, md.cast(w, exact), out=[*(d for d in x.dims if d != wide), gate])


def _mean_square(x: md.Tensor, nonpadding: md.Tensor | None) -> md.Tensor:
    square = md.square(x)
    return md.mean(square if nonpadding is None else md.where(md.cast(nonpadding, "bool"), square, 0))


def _experts(
    x: md.Tensor,
    experts: md.Dim,
    hidden: md.Dim,
    wide: md.Dim,
    activation: str,
    gated: bool,
    init: Any,
    precision: Precision,
) -> md.Tensor:
    """Each expert's feed-forward layer on its own slots; dims as x."""
    outer = [d for d in x.dims if d != wide]
    act = ACTIVATIONS[activation]

    def product(y: md.Tensor, name: str, gone: md.Dim, made: md.Dim) -> md.Tensor:
        w = md.param(name, [experts, gone, made], init=init or md.init.lecun(fan_in=gone), dtype=precision.param)
        return md.cast(md.prefer(precision.einsum(y, w, out=[*outer, made]), experts), precision.compute)

    y = product(x, "wi", wide, hidden)
    y = act(product(x, "wi_gate", wide, hidden)) * y if gated else act(y)
    return md.transpose(product(y, "wo", hidden, wide), x.dims)
