"""The options of a mixture-of-experts layer as two values: its router, and the exchange of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import meshdsl as md

from ..precision import DimLike
from .options import PRESETS, Preset, capacity_of, check_known, choices_of, resolve


@dataclass(frozen=True, init=False, eq=False)
class Router:
    """Which experts a token chooses, how many tokens an expert takes, and what an uneven load costs.

    >>> import meshdsl as md
    >>> switch = md.nn.moe.Router("switch", capacity_factor=1.25)
    >>> md.eval_shape(
    ...     md.model(lambda x: md.nn.moe_layer(x, "expert:4", "hidden:32", router=switch)[0]).init,
    ...     md.random.key(0), md.spec("batch:2 length:16 model:8"),
    ... )["moe/wi"]
    float32[expert=4 model=8 hidden=32]

    `kind` is a router of `md.nn.moe.route` or a preset, and `options` are those of `route`. An expert has
    `capacity_of(tokens, experts)` slots in each group, by `capacity_formula` (default: the preset's, else "mesh_tf";
    "all" drops no token) and `capacity_factor`, or `eval_capacity_factor` outside training. In training with a key,
    the inputs of the gate are multiplied by U(1 - `jitter`, 1 + `jitter`), and second choices may be rejected at
    random. The auxiliary loss is `aux_weight` times the router's balance loss plus `z_weight` times the mean of
    logsumexp(logits) ** 2 (ST-MoE, Zoph et al., 2022).

    Raises `ShapeError` for an unknown router, option or value.
    """

    kind: str
    capacity_factor: float
    eval_capacity_factor: float | None
    capacity_formula: str | None
    jitter: float
    aux_weight: float
    z_weight: float
    options: dict[str, Any]

    def __init__(
        self,
        kind: str = "top2",
        *,
        capacity_factor: float = 2.0,
        eval_capacity_factor: float | None = None,
        capacity_formula: str | None = None,
        jitter: float = 0.0,
        aux_weight: float = 0.01,
        z_weight: float = 0.0,
        **options: Any,
    ):
        resolve(kind, options)
        given = {name: value for name, value in locals().items() if name != "self"}
        vars(self).update(given)

    @property
    def preset(self) -> Preset:
        """The published variant of this name, or one without options."""
        return PRESETS.get(self.kind) or Preset(self.kind, "mesh_tf")

    @property
    def choices(self) -> int:
        """The number of experts that a token chooses."""
        return choices_of(*resolve(self.kind, self.options))

    def capacity(self, tokens: int, experts: int, *, train: bool) -> int:
        """The slots of an expert for one group of `tokens`."""
        evaluated = not train and self.eval_capacity_factor is not None
        factor = self.eval_capacity_factor if evaluated else self.capacity_factor
        assert factor is not None
        formula = self.capacity_formula or self.preset.capacity
        return capacity_of(tokens, experts, factor=factor, k=self.choices, formula=formula)

    def reach(self, nodes: int) -> int:
        """The most of `nodes` that have experts for one token: its choices, or the best groups if each is a node."""
        _, options = resolve(self.kind, self.options)
        return min(self.choices, options["best_groups"] if options.get("groups") == nodes else self.choices)


@dataclass(frozen=True)
class TokenExchange:
    """How tokens reach the experts of a mixture-of-experts layer; the results of all ways are equal.

    >>> import meshdsl as md
    >>> print(md.nn.moe.TokenExchange("index", exchange="ragged"))
    TokenExchange(dispatch='index', exchange='ragged', nodes=None, weigh='output')

    `dispatch` is "index", "einsum" or "auto" (see `md.nn.moe.dispatch_by`), or "grouped": no slots, but each token
    times the matrices of its experts (`md.grouped_dot`), so that the experts compute no empty slots. This is for
    layers that drop no token, of routers where tokens choose; where a layout splits `expert`, devices gather the
    matrices. `exchange` is "padded", to send every slot, or "ragged", to send each expert's slots up to the last
    filled one (`md.ragged`). CPU devices, for which JAX has no ragged exchange, send every slot.

    With `nodes`, a dim such as "node:4" of consecutive experts, a token is sent once to each node that has experts for
    it, and there to these experts; kept tokens and values are those of the exchange without (`md.nn.moe.by_node`). The
    experts' matrices then have the dims `node` and `node_expert`, and group dims are called `node_batch` in between, as
    in the layout `batch:gpu,node; node_batch:gpu; node:node; node_expert:gpu`.

    `weigh` says what the weights of the choices multiply: the "output" of the experts, in the sum over a token's slots,
    or their "hidden" layer, so that partial sums over a sharded `hidden` stay partial until this sum, and are reduced
    for each token instead of each slot.

    Raises `ShapeError` for unknown names, and for values that exclude each other.
    """

    dispatch: str = "auto"
    exchange: str = "padded"
    nodes: DimLike | None = None
    weigh: str = "output"

    def __post_init__(self) -> None:
        check_known("exchange", self.exchange, ("padded", "ragged"))
        check_known("weigh", self.weigh, ("output", "hidden"))
        if self.dispatch == "grouped" and self.exchange == "ragged":
            raise md.ShapeError(
                "exchange='ragged' sends filled slots, and dispatch='grouped' has none; leave out one of them"
            )
        if self.dispatch == "grouped" and self.nodes is not None:
            raise md.ShapeError("nodes= sends slots, and dispatch='grouped' has none; leave out one of them")


EXCHANGE_OPTIONS = tuple(each.name for each in fields(TokenExchange))[1:]
