"""The two-layer step of the Mesh-TensorFlow paper, one hand-written program per layout.

    a = x w + bias      x [batch, io]   w [io, hidden]   bias [hidden]
    h = relu(a)
    y = h v             v [hidden, io]
    loss = mean over batch and io of (y - target)^2
    parameter -= learning rate * gradient

The backward pass is derived by hand; each weight gradient is one product in the parameter's dim order:

    dy = 2 (y - target) / (batch io)    dv = h' dy
    da = [h > 0] (dy v')                dw = x' da    dbias = sum over batch of da

All-reduce per device and step: 33.57 MB under data (dw, dv, dbias, loss), 2.10 MB under model (y),
9.44 MB under 2 x 4 (y, and a quarter of dw, dv and dbias).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = Sequence[jax.Device] | None  # None: those of this machine

BATCH, IO, HIDDEN = 512, 1024, 4096
LEARNING_RATE = 0.1

DIMS = {
    "w": ("io", "hidden"),
    "bias": ("hidden",),
    "v": ("hidden", "io"),
    "x": ("batch", "io"),
    "target": ("batch", "io"),
}
PARAMETERS = ("w", "bias", "v")


@dataclass(frozen=True)
class Layout:
    """A mesh, and the axis over which each dim is sharded."""

    mesh: dict[str, int]
    rules: dict[str, str]

    def make_mesh(self, devices: Devices = None) -> jax.sharding.Mesh:
        sizes = tuple(self.mesh.values())
        return jax.make_mesh(sizes, tuple(self.mesh), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)

    def spec(self, name: str) -> P:
        return P(*(self.rules.get(dim) for dim in DIMS[name]))


LAYOUTS = {
    "data": Layout({"all": 8}, {"batch": "all"}),
    "model": Layout({"all": 8}, {"hidden": "all"}),
    "data_model": Layout({"rows": 2, "cols": 4}, {"batch": "rows", "hidden": "cols"}),
    "three_d": Layout({"rows": 2, "cols": 2, "planes": 2}, {"batch": "rows", "hidden": "cols", "io": "planes"}),
}


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters and batch as unsharded float32 host arrays, equal for every candidate."""
    rng = np.random.default_rng(seed)

    def normal(*sizes: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(sizes)).astype(np.float32)

    return {
        "w": normal(IO, HIDDEN, scale=IO**-0.5),
        "bias": np.zeros(HIDDEN, np.float32),
        "v": normal(HIDDEN, IO, scale=HIDDEN**-0.5),
        "x": normal(BATCH, IO),
        "target": normal(BATCH, IO),
    }


def update(params: dict, grads: dict) -> dict:
    return {name: params[name] - LEARNING_RATE * grads[name] for name in PARAMETERS}


def data(params: dict, x: jax.Array, target: jax.Array) -> tuple[dict, jax.Array]:
    """batch sharded over all: every gradient is all-reduced."""
    w, bias, v = (params[name] for name in PARAMETERS)
    h = jax.nn.relu(x @ w + bias)
    error = h @ v - target
    dy = error * (2 / (BATCH * IO))
    dv = _gradient(h, dy)
    da = jnp.where(h > 0, _times_transposed(dy, v), 0)
    grads = {"w": _gradient(x, da), "bias": da.sum(0), "v": dv}
    grads, loss = lax.psum((grads, jnp.sum(error * error)), "all")
    return update(params, grads), loss / (BATCH * IO)


def model(params: dict, x: jax.Array, target: jax.Array) -> tuple[dict, jax.Array]:
    """hidden sharded over all: only y is all-reduced."""
    w, bias, v = (params[name] for name in PARAMETERS)
    h = jax.nn.relu(x @ w + bias)
    error = lax.psum(h @ v, "all") - target
    dy = error * (2 / (BATCH * IO))
    dv = _gradient(h, dy)
    da = jnp.where(h > 0, _times_transposed(dy, v), 0)
    grads = {"w": _gradient(x, da), "bias": da.sum(0), "v": dv}
    return update(params, grads), jnp.sum(error * error) / (BATCH * IO)


def data_model(params: dict, x: jax.Array, target: jax.Array) -> tuple[dict, jax.Array]:
    """batch sharded over rows, hidden over cols: y is all-reduced over cols, gradients over rows."""
    w, bias, v = (params[name] for name in PARAMETERS)
    h = jax.nn.relu(x @ w + bias)
    error = lax.psum(h @ v, "cols") - target
    dy = error * (2 / (BATCH * IO))
    dv = _gradient(h, dy)
    da = jnp.where(h > 0, _times_transposed(dy, v), 0)
    grads = {"w": _gradient(x, da), "bias": da.sum(0), "v": dv}
    grads, loss = lax.psum((grads, jnp.sum(error * error)), "rows")
    return update(params, grads), loss / (BATCH * IO)


def three_d(params: dict, x: jax.Array, target: jax.Array) -> tuple[dict, jax.Array]:
    """batch sharded over rows, hidden over cols, io over planes: x w and dy v' are also all-reduced over planes."""
    w, bias, v = (params[name] for name in PARAMETERS)
    h = jax.nn.relu(lax.psum(x @ w, "planes") + bias)
    error = lax.psum(h @ v, "cols") - target
    dy = error * (2 / (BATCH * IO))
    dv = _gradient(h, dy)
    da = jnp.where(h > 0, lax.psum(_times_transposed(dy, v), "planes"), 0)
    grads = lax.psum({"w": _gradient(x, da), "bias": da.sum(0), "v": dv}, "rows")
    loss = lax.psum(jnp.sum(error * error), ("rows", "planes"))
    return update(params, grads), loss / (BATCH * IO)


STEPS = {"data": data, "model": model, "data_model": data_model, "three_d": three_d}


def _gradient(x: jax.Array, ct: jax.Array) -> jax.Array:
    """x' ct, without a transpose."""
    return lax.dot_general(x, ct, (((0,), (0,)), ((), ())))


def _times_transposed(ct: jax.Array, w: jax.Array) -> jax.Array:
    """ct w', without a transpose."""
    return lax.dot_general(ct, w, (((1,), (1,)), ((), ())))


def whole(params: dict, x: jax.Array, target: jax.Array) -> tuple[dict, jax.Array]:
    """The step on unsharded arrays, differentiated by JAX, for GSPMD to partition."""

    def loss_of(params: dict) -> jax.Array:
        y = jax.nn.relu(x @ params["w"] + params["bias"]) @ params["v"]
        return jnp.mean(jnp.square(y - target))

    loss, grads = jax.value_and_grad(loss_of)(params)
    return update(params, grads), loss


def handwritten(name: str, devices: Devices = None) -> tuple[jax.stages.Compiled, dict]:
    """The compiled step of one layout, and the sharding of each array by name."""
    layout, mesh = LAYOUTS[name], LAYOUTS[name].make_mesh(devices)
    inputs = ({n: layout.spec(n) for n in PARAMETERS}, layout.spec("x"), layout.spec("target"))
    step = jax.shard_map(STEPS[name], mesh=mesh, in_specs=inputs, out_specs=(inputs[0], P()), check_vma=True)
    return _compile(step, layout, mesh)


def gspmd(name: str, devices: Devices = None) -> tuple[jax.stages.Compiled, dict]:
    """The same, partitioned by GSPMD."""
    return _compile(whole, LAYOUTS[name], LAYOUTS[name].make_mesh(devices))


def _compile(step: Callable, layout: Layout, mesh: jax.sharding.Mesh) -> tuple[jax.stages.Compiled, dict]:
    at = {name: NamedSharding(mesh, layout.spec(name)) for name in DIMS}
    params = {name: at[name] for name in PARAMETERS}
    jitted = jax.jit(
        step,
        in_shardings=(params, at["x"], at["target"]),
        out_shardings=(params, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    specs = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at[n]) for n, a in arrays().items()}
    lowered = jitted.lower({name: specs[name] for name in PARAMETERS}, specs["x"], specs["target"])
    return lowered.compile(), at
