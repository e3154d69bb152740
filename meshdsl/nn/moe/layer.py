"""The mixture-of-experts layer: gate, dispatch, experts, combine (GShard, Lepikhin et al., 2020, section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import meshdsl as md

from ..linear import ACTIVATIONS
from ..precision import FLOAT32, DimLike, Precision, dim_of, new_dim
from .assignment import Assignment, assign, choices
from .dispatch import dispatch_by, unweighted
from .nodes import by_node
from .options import check_known
from .values import EXCHANGE_OPTIONS, Router, TokenExchange


def moe_layer(
    x: md.Tensor,
    experts: DimLike,
    hidden: DimLike,
    *,
    tokens: DimLike = "length",
    over: DimLike = "model",
    router: str | Router = "top2",
    dispatch: str | TokenExchange = "auto",
    train: bool = True,
    key: md.Tensor | None = None,
    nonpadding: md.Tensor | None = None,
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
    routed separately. y is zero for dropped tokens; add y to x. Add the auxiliary loss, a scalar, to the model's loss.

    `router` says which experts a token chooses and how many tokens an expert takes, and `dispatch` how tokens reach
    the experts: the values `md.nn.moe.Router` and `md.nn.moe.TokenExchange`, or their first argument; then `options`
    are their others, as in `router="switch", capacity_factor=1.25, exchange="ragged"`.

    The gate's product and softmax are computed in at least float32; some presets take a sigmoid, and have a parameter
    `gate_bias` that has no gradient. The router's jitter and random choices need `train` and a `key`; `train` also
    chooses its capacity factor. `nonpadding`, with the group dims and `tokens`, is zero for tokens that are not
    routed. With `gated`, an expert is (activation(x wi_gate) * (x wi)) wo, else activation(x wi) wo.

    Group and expert dims are renamed at the experts, so that a layout can shard both sides by one axis: `batch` becomes
    `expert_batch` there, and the gate's expert dim is called `gate`. Under `batch:rows; expert:rows`, slots are
    exchanged by all_to_all in the compute dtype; `expert_hidden:cols` shards each expert.

    Raises `ShapeError` for unknown names, and for options beside a value that has them.
    """
    check_known("activation", activation, ACTIVATIONS)
    router, exchange = _values(router, dispatch, options)
    expert, inner = new_dim(experts, "experts"), new_dim(hidden, "the hidden dim")
    node = None if exchange.nodes is None else new_dim(exchange.nodes, "the nodes")
    token, model_dim = dim_of(x, tokens), dim_of(x, over)
    groups = [d for d in x.dims if d not in (token, model_dim)]
    others = [d for d in (inner, node) if d is not None]
    gate = md.fresh_dim(md.Dim("gate", expert.size), x.dims, others)
    slot = md.Dim("slot", router.capacity(token.size, expert.size, train=train))
    slot = md.fresh_dim(slot, x.dims, others, [expert, gate])
    jitter_key, policy_key = (None, None) if key is None or not train else md.random.split(key)

    with md.scope(name):
        logits = _logits(x, model_dim, gate, router.jitter, jitter_key, init, precision)
        gates = md.sigmoid(logits) if router.preset.scoring == "sigmoid" else md.softmax(logits, gate)
        options = router.options
        if router.preset.biased:
            bias = md.param("gate_bias", [gate], init=md.init.zeros(), dtype=precision.param)
            options = {"bias": md.cast(bias, gates.dtype), **options}
        assignment = assign(
            gates,
            tokens=token,
            experts=gate,
            capacity=slot,
            router=router.kind,
            uniforms=None if policy_key is None else md.random.uniform(policy_key, [*groups, token]),
            nonpadding=nonpadding,
            **options,
        )
        loss = assignment.aux_loss * router.aux_weight
        if router.z_weight:
            loss = loss + router.z_weight * _mean_square(md.logsumexp(logits, gate), nonpadding)
        divided = (expert,)
        if node is not None:
            local = md.Dim(f"{node.name}_expert", expert.size // node.size)
            divided = node, md.fresh_dim(local, x.dims, others, [gate, slot])
        matrices = _matrices(divided, inner, model_dim, gated, init, precision)

        reach = 1 if node is None else router.reach(node.size)
        layer = _Layer(expert, slot, router.choices, matrices, exchange, node, reach, activation, precision)
        return layer(x, assignment), loss


def _values(
    router: str | Router, dispatch: str | TokenExchange, options: Mapping[str, Any]
) -> tuple[Router, TokenExchange]:
    """The router and the exchange; `options` are those of the two that are named by text."""
    sending = {name: value for name, value in options.items() if name in EXCHANGE_OPTIONS}
    routing = {name: value for name, value in options.items() if name not in sending}
    for what, value, beside in (("router", router, routing), ("dispatch", dispatch, sending)):
        if beside and not isinstance(value, str):
            raise md.ShapeError(
                f"{what}={value!r} has its own options, and the call has more: {', '.join(beside)}\n"
                f"  give them to md.nn.moe.{type(value).__name__}"
            )
    return (
        router if isinstance(router, Router) else Router(router, **routing),
        dispatch if isinstance(dispatch, TokenExchange) else TokenExchange(dispatch, **sending),
    )


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


def _matrices(
    experts: tuple[md.Dim, ...], hidden: md.Dim, model_dim: md.Dim, gated: bool, init: Any, precision: Precision
) -> dict[str, md.Tensor]:
    """The parameters of the experts, by name."""
    dims = {
        "wi": (model_dim, hidden),
        **({"wi_gate": (model_dim, hidden)} if gated else {}),
        "wo": (hidden, model_dim),
    }
    return {
        name: md.param(name, [*experts, a, b], init=init or md.init.lecun(fan_in=a), dtype=precision.param)
        for name, (a, b) in dims.items()
    }


@dataclass(frozen=True)
class _Layer:
    """The experts of a layer, and how tokens reach them: called with tokens, it returns their weighted results."""

    expert: md.Dim
    slot: md.Dim
    choices: int  # of each token
    matrices: Mapping[str, md.Tensor]
    exchange: TokenExchange
    node: md.Dim | None
    reach: int  # nodes of each token, at most
    activation: str
    precision: Precision

    def __call__(self, x: md.Tensor, assignment: Assignment) -> md.Tensor:
        groups = [d for d in x.dims if d not in (assignment.tokens, self.matrices["wo"].dims[-1])]
        expert_names = {**self._renamed(self.expert, groups), assignment.experts.name: self.expert.name}
        if self.exchange.dispatch == "grouped":
            md.rename(x, **{d.name: expert_names[d.name] for d in groups})  # a layout may name dims of slots here too
            return md.transpose(self._grouped(x, *choices(assignment)), x.dims)
        if self.node is not None:
            return self._by_node(x, assignment, groups, self.node)
        back = {new: old for old, new in expert_names.items()}
        assignment, weights = unweighted(assignment) if self.exchange.weigh == "hidden" else (assignment, None)
        dispatcher = dispatch_by(self.exchange.dispatch, assignment)
        demand = self.choices * assignment.tokens.size / (self.expert.size * self.slot.size)
        share = min(1.0, demand) if isinstance(assignment.by, tuple) else 1.0

        def mark_ragged(slots: md.Tensor) -> md.Tensor:
            return md.ragged(slots, assignment.used, self.slot, share) if self.exchange.exchange == "ragged" else slots

        inputs = md.rename(mark_ragged(dispatcher.send(md.cast(x, self.precision.compute))), **expert_names)
        weights = None if weights is None else md.rename(weights, **expert_names)
        y = self._experts(md.prefer(inputs, self.expert), weights)
        y = dispatcher.receive(mark_ragged(md.rename(md.prefer(y, self.expert), **back)))
        return md.transpose(y, x.dims)

    def _renamed(self, at: md.Dim, groups: list[md.Dim]) -> dict[str, str]:
        """The names of dims of groups where slots are sharded by nodes or experts, such as `expert_batch`."""
        taken = [self.slot, *(d for w in self.matrices.values() for d in w.dims)]
        return {d.name: md.fresh_dim(md.Dim(f"{at.name}_{d.name}", d.size), taken).name for d in groups}

    def _by_node(self, x: md.Tensor, assignment: Assignment, groups: list[md.Dim], node: md.Dim) -> md.Tensor:
        """The same in two exchanges: tokens to nodes, and within a node to its experts."""
        exchange, local = by_node(assignment, node), self.matrices["wo"].dims[1].name
        there, expert_names = self._renamed(node, groups), self._renamed(self.expert, groups)
        at_experts = {there[d.name]: expert_names[d.name] for d in groups}
        there[exchange.to_nodes.experts.name] = node.name
        first, room = dispatch_by(self.exchange.dispatch, exchange.to_nodes), exchange.to_nodes.capacity
        used = exchange.to_nodes.used
        share = min(1.0, self.reach * assignment.tokens.size / (node.size * room.size))

        def filled(slots: md.Tensor) -> md.Tensor:
            return md.ragged(slots, used, room, share) if self.exchange.exchange == "ragged" else slots

        def to_nodes(slots: md.Tensor) -> md.Tensor:
            return md.prefer(md.rename(slots, **there), node)

        inputs = to_nodes(filled(first.send(md.cast(x, self.precision.compute))))
        within = exchange.within(*map(to_nodes, exchange.sent))
        at_experts[within.experts.name] = local
        within, weights = unweighted(within) if self.exchange.weigh == "hidden" else (within, None)
        second = dispatch_by(self.exchange.dispatch, within)
        weights = None if weights is None else md.rename(weights, **at_experts)
        y = self._experts(md.prefer(md.rename(second.send(inputs), **at_experts), node, local), weights)
        y = second.receive(md.rename(md.prefer(y, node, local), **{new: old for old, new in at_experts.items()}))
        y = first.receive(filled(md.rename(md.prefer(y, node), **{new: old for old, new in there.items()})))
        return md.transpose(y, x.dims)

    def _grouped(self, x: md.Tensor, index: md.Tensor, weights: md.Tensor) -> md.Tensor:
        """The weighted sum of the experts that each token chose; `index` and `weights` are [groups, token, choice]."""

        def product(y: md.Tensor, name: str) -> md.Tensor:
            expert, gone, _ = self.matrices[name].dims
            y = md.prefer(self.precision.grouped_dot(y, self.matrices[name], index, expert, gone), *index.dims)
            if name == "wo" and self.exchange.weigh == "hidden":
                return y  # a cast would reduce partial sums over a sharded `hidden` before the sum over choices
            return md.cast(y, self.precision.compute)

        y = self._feed_forward(x, product, weights if self.exchange.weigh == "hidden" else None)
        y = md.cast(y, self.precision.reduce)
        y = y * md.cast(weights, y.dtype) if self.exchange.weigh == "output" else y
        *_, choice = index.dims
        if y.dtype.itemsize < 4:  # `md.sum` would cast partial sums, which devices would reduce before it
            return md.cast(md.einsum(y, out=[d for d in y.dims if d != choice]), self.precision.compute)
        return md.cast(md.sum(y, choice), self.precision.compute)

    def _experts(self, x: md.Tensor, weights: md.Tensor | None) -> md.Tensor:
        """Applies each expert's feed-forward layer to its slots, times the weights; keeps the dims of x."""

        def product(y: md.Tensor, name: str) -> md.Tensor:
            *experts, gone, new = self.matrices[name].dims
            outer = [d for d in y.dims if d != gone]
            y = self.precision.einsum(y, self.matrices[name], out=[*outer, new])
            return md.cast(md.prefer(y, *experts, *outer), self.precision.compute)

        return md.transpose(self._feed_forward(x, product, weights), x.dims)

    def _feed_forward(
        self, x: md.Tensor, product: Callable[[md.Tensor, str], md.Tensor], weights: md.Tensor | None
    ) -> md.Tensor:
        """`product(y, name)` multiplies y by each element's expert's matrix; `weights` multiply the hidden values."""
        act = ACTIVATIONS[self.activation]
        y = product(x, "wi")
        y = act(product(x, "wi_gate")) * y if "wi_gate" in self.matrices else act(y)
        y = y if weights is None else y * md.cast(weights, y.dtype)
        return product(y, "wo")
