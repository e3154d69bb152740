"""The residual network equals plain JAX, under every one of its layouts, and learns to read digits."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl import backend
from meshdsl.models import resnet
from tests.conftest import optimizing
from tests.laws import run

TINY = resnet.digits.replace(batch=6, height=9, width=5, dtype="float64")
VARIANTS: dict[str, dict[str, Any]] = {
    "batch": {},
    "group": {"norm": "group"},
    "large": {
        "stem_size": 7, "stem_stride": 2, "stem_pool": 3, "height": 35, "width": 18, "color": 3, "blocks": (1, 1, 2, 1),
    },
}  # fmt: skip


def batch_of(workload: md.Workload) -> dict[str, md.Tensor]:
    draw = np.random.default_rng(0)
    image, target = workload.inputs(workload.config).values()
    return {
        "image": md.tensor(draw.standard_normal([d.size for d in image.dims]), image.dims),
        "target": md.tensor(
            draw.integers(0, workload.config.classes, target.dims[0].size).astype(np.int32), target.dims
        ),
    }


@cache
def start(name: str) -> tuple[md.Workload, dict[str, md.Tensor], dict[str, Any]]:
    """The workload, parameters of which none is zero, and an optimizer's state."""
    workload = TINY.replace(**VARIANTS[name])
    draw = np.random.default_rng(1)
    specs, _, _ = workload.specs()
    params = {}
    for path, spec in specs.items():
        sizes = [d.size for d in spec.dims]
        fan = math.prod(sizes[-4:-1])
        values = draw.standard_normal(sizes) / math.sqrt(fan) if len(sizes) > 2 else draw.uniform(0.5, 1.5, sizes)
        params[path] = md.tensor(values, spec.dims)
    return workload, params, workload.optimizer(workload.config).init(params)


@cache
def trained(name: str) -> Any:
    """The leaves of the results of one step, whole, by the NumPy kernels; and the step's arguments."""
    workload, params, state = start(name)
    args = params, state, batch_of(workload)
    arrays = [x.numpy() for x in jax.tree.leaves(args)]
    return args, run(md.compile(workload.train_step(), "one:1", "").graph(*args), arrays, backend.NumPy)


def plain_loss(c: resnet.Config, p: dict[str, Any], batch: dict[str, Any]) -> Any:
    """The network on whole arrays [batch, height, width, channels], one block after the other."""

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        pad = (w.shape[0] // 2,) * 2
        return lax.conv_general_dilated(x, w, (stride, stride), [pad, pad], dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x: Any, p: dict[str, Any], name: str) -> Any:
        y = x.reshape(*x.shape[:3], c.groups, -1) if c.norm == "group" else x
        axes = (1, 2, 4) if c.norm == "group" else (0, 1, 2)
        y = (y - y.mean(axes, keepdims=True)) / jnp.sqrt(y.var(axes, keepdims=True) + 1e-5)
        return y.reshape(x.shape) * p[f"{name}/scale"] + p[f"{name}/bias"]

    def block(x: Any, p: dict[str, Any], stride: int = 1) -> Any:
        y = jax.nn.relu(norm(conv(x, p["conv_1"]), p, "norm_1"))
        y = jax.nn.relu(norm(conv(y, p["conv_2"], stride), p, "norm_2"))
        y = norm(conv(y, p["conv_3"]), p, "norm_3")
        x = norm(conv(x, p["project"], stride), p, "norm_project") if "project" in p else x
        return jax.nn.relu(x + y)

    def inside(path: str) -> dict[str, Any]:
        return {name.removeprefix(path): v for name, v in p.items() if name.startswith(path)}

    x = jax.nn.relu(norm(conv(batch["image"], p["stem/conv"], c.stem_stride), inside("stem/"), "norm"))
    if c.stem_pool:
        pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
        x = lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
    for i, depth in enumerate(c.blocks, 1):
        x = block(x, inside(f"stage{i}/first/"), 1 if i == 1 else 2)
        for j in range(depth - 1):
            x = block(x, {name: v[j] for name, v in inside(f"stage{i}/rest/").items()})
    logits = x.mean((1, 2)) @ p["dense/w"] + p["dense/b"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["target"][:, None], 1).mean()


@pytest.mark.parametrize("name", VARIANTS)
def test_resnet_trains_like_unsharded_jax(name: str):
    workload, params, _ = start(name)
    p, batch = ({key: x.array for key, x in d.items()} for d in (params, batch_of(workload)))
    reference = jax.value_and_grad(lambda p: plain_loss(workload.config, p, batch))
    loss, grads = jax.jit(reference, compiler_options={"xla_backend_optimization_level": 0})(p)
    p, grads = ({path: np.asarray(x) for path, x in d.items()} for d in (p, grads))
    expected = [p[path] - workload.config.learning_rate * grads[path] for path in sorted(p)]
    expected += [grads[path] for path in sorted(p)]  # the first of momentum
    _, (*after, _, total) = trained(name)
    np.testing.assert_allclose(total, loss, rtol=1e-12)
    for x, y in zip(after, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


SPLIT = [name for name in resnet.LAYOUTS if name != "empty"]


@pytest.mark.parametrize(("name", "layout"), [(name, SPLIT[i % len(SPLIT)]) for i, name in enumerate(VARIANTS)])
def test_resnet_is_equal_under_every_layout(name: str, layout: str):
    args, expected = trained(name)
    mesh, rules = resnet.LAYOUTS[layout]
    program = md.compile(start(name)[0].train_step(), mesh, rules).program(*args)
    for x, y in zip(md.simulate(program, *jax.tree.leaves(args)), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


def test_resnet_50_number_of_parameters():
    specs, _, _ = resnet.resnet50.specs()
    assert sum(math.prod(d.size for d in spec.dims) for spec in specs.values()) == 25_557_032  # as torchvision's


SENT = {
    "empty": set(),
    "data": {"all_reduce"},
    "channels": {"all_reduce", "reduce_scatter", "all_gather"},
    "spatial": {"all_reduce", "permute"},
}


@pytest.mark.parametrize("layout", resnet.LAYOUTS)
def test_resnet_collectives_of_each_layout(layout: str):
    """Channels: a reduce-scatter for each block, and a gather of its gradient. Space: neighbours' rows, no gather."""
    workload, params, state = start("batch")
    mesh, rules = resnet.LAYOUTS[layout]
    program = md.compile(workload.train_step(), mesh, rules).program(params, state, batch_of(workload))
    assert {record.kind for record in program.collectives} == SENT[layout]
    for kind in ("reduce_scatter", "all_gather"):
        count = sum(record.count for record in program.collectives if record.kind == kind)
        assert count == (sum(workload.config.blocks) if layout == "channels" else 0)


@pytest.mark.slow
def test_resnet_learns_digits():
    workload = resnet.digits
    config = workload.config
    params, state = md.compile(workload.init, "one:1", "")(md.random.key(0))
    step = md.compile(workload.train_step(), "one:1", "", donate=(0, 1))
    losses = []
    with optimizing():  # many runs of one program
        for i in range(150):
            params, state, metrics = step(params, state, resnet.digits_batch(config, seed=0, step=i))
            losses.append(metrics["loss"].item())
    assert abs(losses[0] - math.log(10)) < 0.5
    assert np.mean(losses[-10:]) < 0.5
    held_out = resnet.held_out_digits(config)
    logits = md.compile(workload.model(config), "one:1", "")(params, held_out)
    right = logits.numpy().argmax(1) == held_out["target"].numpy()
    assert len(right) == 297 and right.mean() > 0.8


def test_resnet_digits_batch_depends_on_seed_and_step():
    config = resnet.digits.config
    a, b, other = (resnet.digits_batch(config, 3, step) for step in (5, 5, 6))
    assert {name: x.type for name, x in a.items()} == resnet.inputs(config)
    np.testing.assert_array_equal(a["image"].numpy(), b["image"].numpy())
    assert not np.array_equal(a["target"].numpy(), other["target"].numpy())
    assert a["image"].numpy().min() == 0 and a["image"].numpy().max() == 1
