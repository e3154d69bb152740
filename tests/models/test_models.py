"""The models equal plain jax.numpy, under every one of their layouts; the illegal layout says why it is."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.models import mlp, resnet, transformer

TINY_MLP = mlp.mlp.replace(batch=6, io=5, hidden=7)  # no size divides
TINY_LM = transformer.lm.replace(
    batch=3, length=6, vocab=11, layers=2, d_model=8, heads=4, d_head=4, d_ff=10, param_dtype="float64",
    compute_dtype="float64", reduce_dtype="float64",
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "modern": {
        "queries_per_key": 2, "positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "tied": True,
        "clip_norm": 0.1, "remat": "collectives",
    },
    "smoothed": {"z_loss": 0.01, "label_smoothing": 0.1, "remat": True},
}  # fmt: skip


def batch_of(workload: md.Workload, seed: int = 0) -> dict[str, md.Tensor]:
    rng = np.random.default_rng(seed)
    batch = {}
    for name, spec in workload.inputs(workload.config).items():
        sizes = [d.size for d in spec.dims]
        integers = spec.dtype == np.int32
        values = rng.integers(0, workload.config.vocab, sizes) if integers else rng.standard_normal(sizes)
        batch[name] = md.tensor(values.astype(spec.dtype), spec.dims)
    return batch


def run(
    workload: md.Workload, mesh: str, layout: str, params: dict[str, md.Tensor], steps: int = 2, devices: bool = True
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and the last parameters of training under a layout, on devices or simulated."""
    state = workload.optimizer(workload.config).init(params)
    step = md.compile(workload.train_step(), md.Mesh(mesh), md.Layout(layout), donate=(0, 1))
    losses = []
    for i in range(steps):
        params, state, metrics = (step if devices else simulated(step))(params, state, batch_of(workload, i))
        losses.append(metrics["loss"].item())
    return losses, {path: p.numpy() for path, p in params.items()}


def simulated(step: md.Compiled) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        results, structure = jax.tree.flatten(md.eval_shape(step.function, *args))
        arrays = md.simulate(step.program(*args), *jax.tree.leaves(args))
        return structure.unflatten([md.tensor(x, spec.dims) for x, spec in zip(arrays, results, strict=True)])

    return call


def arrays(params: dict[str, md.Tensor]) -> dict[str, Any]:
    return {path: p.array for path, p in params.items()}


def norm(x: Any, p: dict[str, Any], name: str, kind: str) -> Any:
    if kind == "rms":
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}/scale"] + p[f"{name}/bias"]


def turned(q: Any) -> Any:
    """Rotary positions of [batch, length, ..., head]."""
    half = q.shape[-1] // 2
    angle = jnp.arange(q.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    angle = angle.reshape(angle.shape[0], *[1] * (q.ndim - 3), half)
    a, b = q[..., :half], q[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def lm_loss(c: transformer.Config, p: dict[str, Any], batch: dict[str, Any]) -> Any:
    """The language model on whole arrays, one layer after the other."""
    x = p["embed"][batch["tokens"]]
    x = x + p["positions"] if c.positions == "learned" else x
    turn = turned if c.positions == "rotary" else lambda q: q
    allowed = jnp.tril(jnp.ones((c.length, c.length), bool))
    for i in range(c.layers):
        w = {path.removeprefix("layer/"): v[i] for path, v in p.items() if path.startswith("layer/")}
        h = norm(x, w, "norm_1", c.norm)
        q = jnp.tensordot(h, w["attention/wq"], 1)  # with a dim of the group, or without
        q = turn(q if q.ndim == 5 else q[:, :, :, None])
        k, v = turn(jnp.tensordot(h, w["attention/wk"], 1)), jnp.tensordot(h, w["attention/wv"], 1)
        scores = jnp.einsum("blhgd,bmhd->bhglm", q, k) / math.sqrt(c.d_head)
        mixed = jnp.einsum("bhglm,bmhd->blhgd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v)
        x = x + jnp.einsum("blhgd,hgdm->blm", mixed, w["attention/wo"].reshape(*q.shape[2:], c.d_model))
        h = norm(x, w, "norm_2", c.norm)
        up = h @ w["feed_forward/w_in"]
        up = jax.nn.silu(h @ w["feed_forward/w_gate"]) * up if c.gated else jax.nn.relu(up)
        x = x + up @ w["feed_forward/w_out"]
    logits = norm(x, p, "norm", c.norm) @ (p["embed"].T if c.tied else p["unembed"])
    aim = (1 - c.label_smoothing) * jax.nn.one_hot(batch["targets"], c.vocab) + c.label_smoothing / c.vocab
    each = -(aim * jax.nn.log_softmax(logits)).sum(-1) + c.z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return each.mean()


@functools.cache
def trained(name: str) -> tuple[dict[str, md.Tensor], list[float], dict[str, Any]]:
    """First parameters, and the losses and parameters of two steps of the reference with optax's Adam."""
    c = TINY_LM.replace(**VARIANTS[name]).config
    first, _ = TINY_LM.replace(**VARIANTS[name]).init(md.random.key(0))
    adam = optax.adam(c.learning_rate)
    optimizer = optax.chain(optax.clip_by_global_norm(c.clip_norm), adam) if c.clip_norm else adam

    @jax.jit
    def step(params: dict[str, Any], state: Any, batch: dict[str, Any]) -> Any:
        loss, grads = jax.value_and_grad(lambda p: lm_loss(c, p, batch))(params)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss

    params, losses = arrays(first), []
    state = optimizer.init(params)
    for i in range(2):
        params, state, loss = step(params, state, arrays(batch_of(TINY_LM, i)))
        losses.append(float(loss))
    return first, losses, params


VARIANT_OF = {"data_model": "modern", "sequence": "smoothed"}


@pytest.mark.parametrize(("name", "layout"), [(VARIANT_OF.get(each, "plain"), each) for each in transformer.LAYOUTS])
def test_transformer_trains_like_unsharded_jax(name: str, layout: str):
    first, expected_losses, expected = trained(name)
    workload = TINY_LM.replace(**VARIANTS[name])
    losses, found = run(workload, *transformer.LAYOUTS[layout], first, devices=name == "modern")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    for path, p in expected.items():  # Adam divides by the gradient's size, so 1e-3 may hang on a rounding error
        np.testing.assert_allclose(found[path], p, rtol=1e-7, atol=1e-9)


def test_transformer_dropout_is_equal_under_every_layout():
    workload = TINY_LM.replace(dropout=0.3)
    params, _ = workload.init(md.random.key(0))

    def loss(layout: str) -> float:
        f = md.compile(workload.loss(workload.config), md.Mesh("rows:2 cols:4"), md.Layout(layout))
        return f(params, batch_of(workload), md.random.key(5)).item()

    dropped = loss("")
    np.testing.assert_allclose(loss(transformer.LAYOUTS["sequence"][1]), dropped, rtol=1e-12)
    evaluated = md.compile(workload.loss(workload.config), "", "")(params, batch_of(workload)).item()
    assert abs(evaluated - dropped) > 1e-6


def test_transformer_graph_size_does_not_depend_on_depth():
    def count(layers: int) -> int:
        step = md.compile(
            TINY_LM.replace(layers=layers).train_step(), md.Mesh("rows:2 cols:4"), md.Layout("batch:rows")
        )
        return str(step.graph(*TINY_LM.replace(layers=layers).specs())).count("\n")

    assert count(2) == count(32)


@pytest.mark.parametrize("layout", mlp.LAYOUTS)
def test_mlp_trains_like_unsharded_jax(layout: str):
    first, _ = TINY_MLP.init(md.random.key(0))
    losses, found = run(TINY_MLP, *mlp.LAYOUTS[layout], first, steps=3)
    p = arrays(first)

    def loss(p: dict[str, Any], batch: dict[str, Any]) -> Any:
        y = jax.nn.relu(batch["x"] @ p["w"] + p["bias"]) @ p["v"]
        return jnp.mean(jnp.square(y - batch["target"]))

    expected, step = [], jax.jit(jax.value_and_grad(loss))
    for i in range(3):
        value, grads = step(p, arrays(batch_of(TINY_MLP, i)))
        expected.append(float(value))
        p = {path: p[path] - 0.1 * grads[path] for path in p}
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path in p:
        np.testing.assert_allclose(found[path], p[path], rtol=1e-4, atol=1e-5)


def test_mlp_illegal_layout_matches_golden_text(golden: Callable[[str, str], None]):
    mesh, layout = mlp.ILLEGAL
    step = md.compile(mlp.mlp.train_step(), md.Mesh(mesh), md.Layout(layout))
    with pytest.raises(md.LayoutError) as caught:
        step.program(*mlp.mlp.specs())
    golden("mlp_illegal", str(caught.value))


def test_models_mention_mesh_axes_only_in_layout_tables():
    for module in (mlp, resnet, transformer):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        tree = ast.parse(source)
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("LAYOUTS", "ILLEGAL", "_MODEL"))
        ]
        axes = {axis for mesh, _ in module.LAYOUTS.values() for axis in md.Mesh(mesh).axes} - {"all"}  # also a word
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} - {ast.get_docstring(tree)}
        assert not [w for w in words if isinstance(w, str) and axes & set(w.replace(":", " ").split())]


def test_workload_replace_refuses_unknown_settings():
    assert transformer.lm.replace(d_model=512).config.d_model == 512
    with pytest.raises(md.ShapeError, match="the config of lm has no 'dmodel'; did you mean 'd_model'"):
        transformer.lm.replace(dmodel=512)


def test_workload_specs_are_the_types_of_its_step():
    for workload in (TINY_MLP, TINY_LM):
        params, state, batch = workload.specs()
        after = md.eval_shape(workload.train_step(), params, state, batch)
        assert after[:2] == (params, state)
        assert after[2]["loss"].shape == ()
        assert md.eval_shape(workload.eval_step(), params, batch) == after[2]
