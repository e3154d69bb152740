"""Exchange by node: the kept tokens and values of the flat exchange, and one copy of a token between two nodes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

import meshdsl as md
from meshdsl.nn import moe
from tests.nn.moe_reference import simulated
from tests.nn.test_moe_layer import close, inputs, layer, value_and_grads

EXPERT = md.Dim("expert", 8)
LAYOUT = "batch:gpu,node; node_batch:gpu; node:node; node_expert:gpu"
TOP2 = {"router": "top2", "capacity_factor": 1.0, "capacity_formula": "switch"}
LIMITED = {"router": "top_k", "k": 3, "groups": 4, "best_groups": 2, "normalize": "after", "capacity_formula": "paper"}


def divided(params: dict[str, md.Tensor]) -> dict[str, md.Tensor]:
    parts = md.dims("node:4 node_expert:2")
    return {k: md.unflatten(v, EXPERT, parts) if EXPERT in v.dims else v for k, v in params.items()}


@pytest.mark.parametrize(
    ("router", "method", "weigh", "mesh"),
    [(TOP2, "index", "output", "node:4 gpu:2"), (LIMITED, "einsum", "output", "node:2 gpu:2"),
     (LIMITED, "index", "hidden", "node:4 gpu:2"), (TOP2, "einsum", "hidden", "node:4 gpu:1")],
)  # fmt: skip
def test_values_and_gradients_are_those_of_the_flat_exchange(router: Any, method: str, weigh: str, mesh: str):
    flat, two = (layer(expert=EXPERT, dispatch=method, weigh=weigh, nodes=n, **router) for n in (None, "node:4"))
    params, x = inputs(flat)
    want = simulated(value_and_grads(flat), params, x)
    loss, (grads, of_x) = simulated(value_and_grads(two), divided(params), x, mesh=mesh, layout=LAYOUT)
    close((loss, ({k: v.reshape(want[1][0][k].shape) for k, v in grads.items()}, of_x)), want, mesh)
    ragged = layer(expert=EXPERT, dispatch=method, weigh=weigh, nodes="node:4", exchange="ragged", **router)
    again = simulated(value_and_grads(ragged), divided(params), x, mesh=mesh, layout=LAYOUT)
    assert again[0] == loss and np.array_equal(again[1][1], of_x)


def test_a_token_is_sent_once_to_a_node():
    """Four choices of at most two nodes: half the bytes between nodes, and no collective over both axes."""
    options = {**LIMITED, "k": 4, "capacity_factor": 1.0, "exchange": "ragged", "dispatch": "index"}
    x = md.spec("batch:8 length:64 model:32")

    def sent(layout: str, nodes: str | None) -> tuple[float, set[tuple[str, ...]]]:
        model = md.model(lambda x: md.nn.moe_layer(x, EXPERT, "expert_hidden:8", nodes=nodes, **options)[0])
        step = md.compile(model, "node:4 gpu:2", layout)
        program = step.program(model.specs(x), x)
        over = [c for c in program.collectives if "node" in c.axes and "ragged" in c.kind]
        return sum(c.bytes * c.op.share for c in over), {c.axes for c in program.collectives}

    flat, _ = sent("batch:node,gpu; expert:node,gpu", None)
    two, axes = sent(LAYOUT, "node:4")
    assert two == flat / 2 and axes == {("node",), ("gpu",)}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"nodes": "node:3"}, "8 experts do not divide into 3 nodes"),
     ({"nodes": "node:4", "router": "expert_choice"}, "experts choose tokens"),
     ({"nodes": "node:4", "dispatch": "grouped", "router": "mixtral"}, "nodes= sends slots")],
)  # fmt: skip
def test_exchange_by_node_refuses(options: dict[str, Any], message: str):
    with pytest.raises(md.ShapeError, match=message):
        layer(expert=EXPERT, **options).specs(md.spec("batch:4 length:8 model:6"))


def test_a_node_has_a_token_once_and_every_kept_choice():
    options = {k: v for k, v in LIMITED.items() if k != "capacity_formula"}

    def f(gates: md.Tensor) -> Any:
        assignment = moe.assign(gates, tokens="token", experts="expert", capacity=md.Dim("slot", 5), **options)
        exchange = moe.by_node(assignment, md.Dim("node", 4))
        by = [[(c.expert, c.kept) for c in cast(Any, each.by)] for each in (assignment, exchange.to_nodes)]
        return *by, exchange.sent[0]

    gates = md.tensor(np.random.default_rng(0).random((16, 8)), "token expert")
    experts, nodes, places = simulated(f, gates)
    kept = [(t, int(expert[t]) // 2) for expert, kept in experts for t in range(16) if kept[t]]
    sent = [(t, int(node[t])) for node, kept in nodes for t in range(16) if kept[t]]
    assert sorted(sent) == sorted(set(kept)) and len(kept) > len(sent)
    assert max(sum(t == each for t, _ in sent) for each in range(16)) <= 2
    assert (places > 0).sum() >= len(kept)
