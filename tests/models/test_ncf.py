"""Collaborative filtering: the call graph, its batches, and the model against jax.numpy under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.models import call_graph, ncf
from meshdsl.models.call_graph import CallGraph, callees
from meshdsl.train import train

TINY = ncf.ncf.replace(
    batch=6, negatives=3, users=5, items=9, factors=3, width=5, hidden=(7, 3), learning_rate=0.01, dtype="float64"
)


def two_kinds(people: int = 30) -> dict[str, tuple[str, ...]]:
    """Functions of two kinds, each with callees of its own; which of its ten a function calls is drawn."""
    rng = np.random.default_rng(0)
    return {
        f"f{i:02d}": tuple(f"{'ab'[i % 2]}{j}" for j in rng.permutation(10)[:6]) for i in range(people)
    }  # fmt: skip


def batch_of(workload: md.Workload, seed: int) -> dict[str, md.Tensor]:
    rng = np.random.default_rng(seed)
    c, specs = workload.config, workload.inputs(workload.config)
    values = {
        "user": rng.integers(0, c.users, (c.batch,)),
        "item": rng.integers(0, c.items, (c.batch, 1 + c.negatives)),
    }
    return {name: md.tensor(x.astype(np.int32), specs[name].dims) for name, x in values.items()}


def reference(p: dict[str, Any], batch: dict[str, Any]) -> Any:
    """NeuMF as the paper writes it: one matrix for [user, item]."""
    user, item = batch["user"][:, None], batch["item"]
    gmf = p["gmf/user"][user] * p["gmf/item"][item]
    rows = jnp.broadcast_arrays(p["mlp/user"][user], p["mlp/item"][item])
    x = jnp.concatenate(rows, -1) @ jnp.concatenate([p["mlp/w1_user"], p["mlp/w1_item"]])
    x = jax.nn.relu(x + p["mlp/b1"])
    x = jax.nn.relu(x @ p["mlp/hidden2/w"] + p["mlp/hidden2/b"])
    chance = jax.nn.sigmoid(jnp.concatenate([gmf, x], -1) @ jnp.concatenate([p["h_gmf"], p["h_mlp"]]))
    called = jnp.zeros(item.shape).at[:, 0].set(1)
    return -(called * jnp.log(chance) + (1 - called) * jnp.log(1 - chance)).mean()


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, md.Tensor], list[float], dict[str, Any]]:
    """First parameters, and the losses and parameters of two steps of the reference with optax's Adam."""
    rng = np.random.default_rng(0)
    types = TINY.specs()[0]
    first = {path: md.tensor(0.5 * rng.standard_normal([d.size for d in t.dims]), t.dims) for path, t in types.items()}
    adam = optax.adam(0.01)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(reference)(params, batch)
        changes, state = adam.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss

    params: Any = {path: p.array for path, p in first.items()}
    state, losses = adam.init(params), []
    for seed in range(2):
        params, state, loss = step(params, state, {name: x.array for name, x in batch_of(TINY, seed).items()})
        losses.append(float(loss))
    return first, losses, params


@pytest.mark.parametrize("layout", ncf.LAYOUTS)
def test_ncf_trains_like_unsharded_jax(trained: Any, layout: str):
    first, losses, expected = trained
    mesh, rules = ncf.LAYOUTS[layout]
    types = TINY.specs()
    program = md.compile(TINY.train_step(), md.Mesh(mesh), md.Layout(rules)).program(*types)
    structure = jax.tree.structure(md.eval_shape(TINY.train_step(), *types))
    state: Any = TINY.optimizer(TINY.config).init(first)
    params: Any = first
    for seed, loss in enumerate(losses):
        outs = md.simulate(program, *jax.tree.leaves((params, state, batch_of(TINY, seed))))
        params, state, metrics = structure.unflatten(outs)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
    for path, p in expected.items():
        np.testing.assert_allclose(params[path], p, rtol=1e-8, atol=1e-10, err_msg=path)


def test_ncf_sharded_tables_are_not_gathered():
    mesh, rules = ncf.LAYOUTS["data_tables"]
    big = ncf.ncf.replace(batch=8)
    program = md.compile(big.train_step(), md.Mesh(mesh), md.Layout(rules)).program(*big.specs())
    table = big.config.items // 4 * big.config.factors * 4  # bytes of a shard of the smallest table
    assert not [c for c in program.collectives if c.kind == "all_gather" and c.bytes >= table]


def test_call_graph_callees_of_a_module():
    source = (
        "import os\nif os:\n  def f(x):\n    g(len(x)); x.append(len(x))\n    def inner(): print()\n"
        "class A:\n  async def m(self): f()(1)\n  class B:\n    def m(self): pass\n"
    )
    assert callees(source) == {"f": ("g", "len", ".append", "print"), "A.m": ("f",), "A.B.m": ()}


def test_call_graph_callees_of_a_standard_module():
    found = callees(Path(json.__file__).with_name("decoder.py").read_bytes())
    assert found["JSONDecoder.decode"] == (".raw_decode", ".end", "_w", "len", "JSONDecodeError")


def test_call_graph_selects_users_and_items():
    graph = CallGraph({"f": "abc", "g": "bad", "h": "abdc", "e": "a"}, users=2, items=3)
    assert (graph.users, graph.items) == (("f", "h"), ("a", "b", "c"))  # c and d tie; g and f would too, without c
    assert graph.held_out.tolist() == [2, 2]
    assert graph.pairs.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    same = CallGraph({"h": "abdc", "e": "a", "g": "bad", "f": "abc"}, users=2, items=3)
    assert same.users == graph.users and (same.pairs == graph.pairs).all()
    with pytest.raises(md.MeshdslError, match="no function calls 3 of the 2 callees"):
        CallGraph({"f": "ab"}, users=2, items=3)


def test_call_graph_batches():
    graph = CallGraph(two_kinds(), users=30, items=20)
    again = CallGraph(two_kinds(), users=30, items=20).batch("train", 1, 7, 64, 4)
    batch = graph.batch("train", 1, 7, 64, 4)
    assert all((batch[name] == again[name]).all() and batch[name].dtype == np.int32 for name in batch)
    assert (batch["item"] != graph.batch("train", 1, 8, 64, 4)["item"]).any()
    assert (batch["item"] != graph.batch("train", 2, 7, 64, 4)["item"]).any()
    known = graph.known[batch["user"][:, None], batch["item"]]
    assert known[:, 0].all() and not known[:, 1:].any()
    held = graph.batch("held_out", 0, 0, 30, 10)
    assert (held["user"] == np.arange(30)).all() and (held["item"][:, 0] == graph.held_out).all()
    assert not graph.known[held["user"][:, None], held["item"]].any()
    assert not (held["item"][:, 1:] == held["item"][:, :1]).any()
    with pytest.raises(md.MeshdslError, match="the split must be one of train, held_out, got 'test'"):
        graph.batch("test", 0, 0, 1, 1)


def test_call_graph_error_without_negatives():
    with pytest.raises(md.MeshdslError, match="f calls all 3 callees"):
        CallGraph({"f": "abc"}, users=1, items=3).batch("held_out", 0, 0, 1, 1)


def test_ncf_hit_rate_counts_the_top_ten():
    """Scores of a table set by hand: the callee has 9 better ones, then 10, then ties with all."""
    score = np.zeros((3, 12))
    score[0, 1:10], score[1, 1:11] = 1, 1
    score[:2, 0] = 0.5
    assert ncf._hits(md.tensor(score, "batch candidate")).item() == pytest.approx(1 / 3)


def test_ncf_learns_in_the_training_loop(monkeypatch: pytest.MonkeyPatch):
    """Two kinds of functions: whoever calls some of a kind is likelier to call the rest of it, out of 130 callees."""
    rare = {f"z{i:03d}": tuple(f"c{(3 * i + j) % 110:03d}" for j in range(3)) for i in range(37)}
    monkeypatch.setattr(call_graph, "_standard_library", lambda: {**two_kinds(), **rare})
    call_graph.call_graph.cache_clear()
    workload = ncf.ncf.replace(batch=64, users=80, items=130, factors=4, width=4, hidden=(8,), learning_rate=0.02)
    layout = md.Layout("batch:rows; user:rows; item:rows")
    records = list(train(workload, md.Plan("rows:2", layout), steps=30, eval_batches=1))
    call_graph.call_graph.cache_clear()
    assert records[0]["data"]["users"] == 67
    steps = [record["loss"] for record in records if record["event"] == "step"]
    assert steps[-1] < 0.75 * steps[0]


@pytest.mark.slow
def test_ncf_beats_popularity():
    graph = call_graph.call_graph(4096, 1024)
    assert len(graph.users) > 1000 and len(graph.pairs) > 5000
    held = graph.batch("held_out", 0, 0, len(graph.users), 99)
    popularity = graph.known.sum(0)[held["item"]]
    baseline = ((popularity >= popularity[:, :1]).sum(1) - 1 < ncf.TOP).mean()
    workload, one = ncf.ncf, (md.Mesh("one:1"), md.Layout(""))
    params, state = workload.init(md.random.key(0))
    step = md.compile(workload.train_step(), *one, donate=(0, 1))
    assert workload.data is not None
    batches, specs = workload.data(workload.config, 0), workload.inputs(workload.config)
    for i in range(400):
        batch = {name: md.tensor(x, specs[name].dims) for name, x in batches("train", i).items()}
        params, state, _ = step(params, state, batch)
    assert ncf.hit_rate(params, workload.config, *one) > baseline + 0.03
