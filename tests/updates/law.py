"""Sharded updates against replicated ones, at length: `python -m tests.updates.law --layouts 30 --steps 10`.

With `--groups` each is shared by a random group of devices, and tensors below a random limit travel together.

Every optimizer, on a model whose weights are uneven and tiny, under random meshes and layouts, in float64: parameters,
state and gradient norm after some steps; and exactly the parameters have decisions. The last line is JSON; the exit
status is 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from tests.optim.simulated import Simulated

TOLERANCE = 1e-12
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: md.optim.sgd(0.1),
    "momentum": lambda: md.optim.momentum(0.05),
    "adam": lambda: md.optim.adam(1e-2),
    "adamw": lambda: md.optim.adamw(1e-2),
    "clipped": lambda: md.optim.with_clipping(md.optim.adam(1e-2), 0.05),
    "lars": lambda: md.optim.lars(0.1),
    "lamb": lambda: md.optim.lamb(0.05),
    "adafactor": lambda: md.optim.adafactor(0.05, min_dim_to_factor=2),
    "muon": lambda: md.optim.muon(0.05),
    "accumulated": lambda: md.optim.with_accumulation(md.optim.adam(1e-2), 2),
}
MESHES = ("x:8", "x:2 y:4", "x:4 y:2", "x:3 y:2", "x:2 y:2 z:2", "x:5", "x:7")
SIZES = {"batch": 16, "io": 5, "hidden": 12, "next": 12, "layer": 3, "three": 3}


def loss(params: Any, batch: Any) -> md.Tensor:
    """A network of two layers and a loop, with weights of three elements and of sizes that nothing divides."""

    def layer(h: md.Tensor, row: Any) -> tuple[md.Tensor, None]:
        y = md.tanh(md.einsum(h, row["w"], out="batch next") + row["b"])
        return md.rename(y, next="hidden"), None

    h = md.tanh(md.einsum(batch["x"], params["in"], out="batch hidden"))
    h, _ = md.scan(layer, h, params["layers"], over=md.Dim("layer", SIZES["layer"]))
    y = md.einsum(h, params["out"], out="batch three") * params["scale"]
    return md.mean(md.square(y - batch["y"]))


def start() -> tuple[Any, Any]:
    """Parameters and a batch, of fixed random numbers."""
    rng = np.random.default_rng(3)

    def draw(dims: str) -> md.Tensor:
        shape = [md.Dim(name, SIZES[name]) for name in dims.split()]
        return md.tensor(rng.normal(size=[d.size for d in shape]), shape)

    params = {
        "in": draw("io hidden"),
        "layers": {"w": draw("layer hidden next"), "b": draw("layer next")},
        "out": draw("hidden three"),
        "scale": draw("three"),
    }
    return params, {"x": draw("batch io"), "y": draw("batch three")}


def compiled_with(
    step: Any,
    mesh: str,
    layout: str,
    *,
    weight_update: str = "replicated",
    machine: Any = None,
    donate: Any = (),
    **options: Any,
) -> md.Compiled:
    """`md.compile` with the options of `md.WeightUpdate` spelled out."""
    update = md.WeightUpdate(weight_update, **options)
    return md.compile(step, mesh, layout, weight_update=update, machine=machine, donate=donate)


def run(optimizer: Any, mesh: str, layout: str, mode: str, steps: int, **options: Any) -> tuple[Any, md.Compiled]:
    """The state after some steps as NumPy arrays, and the step; devices run a sharded one, NumPy a replicated one."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = md.value_and_grad(loss)(params, batch)
        norm = md.optim.global_norm(grads)
        return *optimizer.update(grads, state, params), {"loss": value, "norm": norm}

    compiled = compiled_with(step, mesh, layout, weight_update=mode, **options)
    params, batch = start()
    state, metrics = optimizer.init(params), None
    ran = Simulated(compiled) if mode == "replicated" else compiled
    for _ in range(steps):
        params, state, metrics = ran(params, state, batch)
    return jax.tree.map(lambda x: x.numpy(), (params, state, metrics)), compiled


def difference(one: Any, other: Any) -> float:
    """The largest, relative to numbers above 1."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(a - b) / np.maximum(1, np.abs(a)), initial=0)) for a, b in pairs)


def undecided(compiled: md.Compiled, params: Any) -> set[str]:
    """Parameters without a decision, and decisions about anything else."""
    paths = {
        "/".join(["params", *(str(key.key) for key in path)]) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    return paths ^ {d.weight for d in compiled.weight_update.decisions}


def layouts(seed: int) -> Iterator[tuple[str, str]]:
    """Random ones that split the batch; some are illegal."""
    rng = random.Random(seed)
    while True:
        mesh = rng.choice(MESHES)
        axes = list(md.Mesh(mesh).axes)
        rng.shuffle(axes)
        batch = axes[: rng.choice([1, 1, 2])]
        dims = rng.sample(["hidden", "io", "three", "next"], len(axes))
        rest = [
            f"{d}:{a}" for d, a in zip(dims, [a for a in axes if a not in batch], strict=False) if rng.random() < 0.8
        ]
        yield mesh, " ".join([f"batch:{','.join(batch)}", *rest])


def wishes(mesh: str, layout: str, seed: int) -> dict[str, Any]:
    """A random group along the axes of the batch, and a limit below which tensors travel together; some join none."""
    rng = random.Random(seed)
    axes = layout.split()[0].removeprefix("batch:").split(",")
    sizes = {axis: md.Mesh(mesh).axes[axis] for axis in rng.sample(axes, rng.randint(1, len(axes)))}
    group = {axis: rng.choice([d for d in range(1, n + 1) if n % d == 0]) for axis, n in sizes.items()}
    return {"group": group, "bucket_bytes": rng.choice([0, 300, 1e9])}


def main() -> int:
    """One line of JSON for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append")
    parser.add_argument("--groups", action="store_true")
    options = parser.parse_args()
    wrong = 0
    for name in options.optimizer or OPTIMIZERS:
        worst, done, sharded, illegal = 0.0, 0, 0, 0
        for mesh, layout in layouts(7):
            if done == options.layouts:
                break
            wanted = wishes(mesh, layout, done + illegal) if options.groups else {}
            try:
                right, _ = run(OPTIMIZERS[name](), mesh, layout, "replicated", options.steps)
                got, compiled = run(OPTIMIZERS[name](), mesh, layout, "sharded", options.steps, **wanted)
            except md.LayoutError:
                illegal += 1
                continue
            done += 1
            sharded += sum(d.sharded for d in compiled.weight_update.decisions)
            wrong += bool(undecided(compiled, start()[0]))
            worst = max(worst, difference(right, got))
        wrong += worst > TOLERANCE
        line = {"optimizer": name, "layouts": done, "illegal": illegal, "weights_sharded": sharded, "worst": worst}
        print(json.dumps(line), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
