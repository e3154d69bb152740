"""DeepSeek-V3: latent attention, and a mixture of experts with a shared one and sigmoid gates (DeepSeek-AI, 2024).

    for each layer:  x = x + attention(norm(x));  x = x + FFN(norm(x)) + sum over the chosen experts e of g_e FFN_e(...)

The attention is that of models/latent_attention.py. The first layers, a loop over `dense`, have one feed-forward layer.
The gate's bias has no gradient; it is read and written with the weights, and no rule here updates it. The predicted
second token (section 2.2) is left out. The layouts are those of models/mixtral.py.

By default, no token is dropped: the experts compute grouped products, which gather experts that are on different
devices. The preset `deepseek_v3` keeps them where they are and sends slots: with `capacity_factor=1.25`, a sequence is
a group, and tokens beyond an expert's slots skip it. The paper drops none (`capacity_factor=0`). `nodes=8` also sends a
token once to each node that has experts for it (section 2.1.2); the layout then names `node` and `node_expert` instead
of `expert`. `deepseek_by_node` and `deepseek_v3_by_node` have as many nodes as groups, and layouts for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import meshdsl as md
from meshdsl.models import causal, deepseek_names, mixtral
from meshdsl.models.latent_attention import LatentAttention
from meshdsl.models.rotary import Rotary

__all__ = [
    "NODE_LAYOUTS", "Config", "deepseek", "deepseek_by_node", "deepseek_v3", "deepseek_v3_by_node", "network",
]  # fmt: skip


@dataclass(frozen=True)
class Config(causal.Config):
    """Sizes and options; the defaults fit a laptop."""

    layers: int = 3
    dense_layers: int = 1
    eps: float = 1e-6
    query_latent: int = 24
    latent: int = 16
    d_head: int = 16  # of queries and keys, without the part that rotates
    d_rotary: int = 8
    d_value: int = 16
    d_expert: int = 32
    experts: int = 8
    shared: int = 1  # experts of every token
    chosen: int = 2
    groups: int = 4
    best_groups: int = 2
    scale: float = 2.5  # of the chosen experts' weights
    capacity_factor: float = 0.0  # 0: no token is dropped
    nodes: int = 0  # to each of which a token is sent once, for all its experts there; 0: once for each expert
    dispatch: str = "auto"  # of md.nn.moe_layer; auto: "grouped" if no token is dropped, else "index"
    rotary: Rotary = Rotary()  # noqa: RUF009 - a frozen value


_NODE = "batch:gpu,node; node_batch:gpu; node:node; node_expert:gpu"
NODE_LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows; node_batch:rows; expert_batch:rows"),
    "node": ("node:2 gpu:2", _NODE),
    "node_zero": ("node:2 gpu:2", f"{_NODE}; vocab:gpu,node; heads:gpu,node"),
    "node_model": ("node:2 gpu:2 cols:2", f"{_NODE}; vocab:cols; d_ff:cols; heads:cols"),
}


def network(config: Config) -> tuple[causal.Network, causal.Empty]:
    """The network of models/causal.py, and its empty cache."""
    (_, wide, _, d_ff, _), precision, attention = config.dims(), config.precision, LatentAttention(config)
    factor = config.capacity_factor
    dispatch = ("index" if factor else "grouped") if config.dispatch == "auto" else config.dispatch
    if config.nodes and dispatch == "grouped":
        raise md.ShapeError(f"nodes={config.nodes} sends slots, and dispatch='grouped' has none; set capacity_factor")
    nodes = md.Dim("node", config.nodes) if config.nodes else None
    norm = partial(md.nn.rms_norm, over=wide, eps=config.eps, precision=precision)

    def dense(x: md.Tensor, attend: causal.Attend) -> md.Tensor:
        x = x + attend(norm(x, name="norm_1"))
        return x + causal.gated(norm(x, name="norm_2"), d_ff, precision)

    def sparse(x: md.Tensor, attend: causal.Attend) -> md.Tensor:
        x = x + attend(norm(x, name="norm_1"))
        y = norm(x, name="norm_2")
        routed = mixtral.experts(
            y, md.Dim("expert", config.experts), md.Dim("d_ff", config.d_expert), together=bool(factor),
            router="deepseek_v3", k=config.chosen, groups=config.groups, best_groups=config.best_groups,
            scale=config.scale, capacity_formula="paper" if factor else "all", capacity_factor=factor or 1.0,
            dispatch=dispatch, nodes=nodes, precision=precision,
        )  # fmt: skip
        both = md.Dim("d_ff", config.d_expert * config.shared)
        return x + routed + causal.gated(y, both, precision, name="shared")

    sizes = {"dense": config.dense_layers, "layer": config.layers - config.dense_layers}
    blocks = {"dense": dense, "layer": sparse}
    stacks = [causal.Stack(md.Dim(name, n), [(attention, blocks[name])]) for name, n in sizes.items() if n]
    return causal.network(config, stacks, norm, tied=False)


deepseek = causal.workload(
    "deepseek", Config(), network, layouts=mixtral.LAYOUTS, hugging_face=deepseek_names.HUGGING_FACE
)
deepseek_v3 = deepseek.replace(
    batch=15360, length=4096, vocab=129280, layers=61, dense_layers=3, d_model=7168, heads=128, d_ff=18432,
    query_latent=1536, latent=512, d_head=128, d_rotary=64, d_value=128, d_expert=2048, experts=256, chosen=8, groups=8,
    best_groups=4, rotary=Rotary(10000.0, 40.0, "yarn", 1.0, 32.0, 4096, 1.0), compute_dtype="bfloat16",
    capacity_factor=1.25, remat=True,
)  # fmt: skip
deepseek_by_node = replace(deepseek.replace(nodes=4, capacity_factor=1.25), layouts=NODE_LAYOUTS)
deepseek_v3_by_node = replace(deepseek_v3.replace(nodes=8), layouts=NODE_LAYOUTS)
