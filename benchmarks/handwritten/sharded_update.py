"""Adam on three dense layers with 25 million parameters, pure data parallel, hand-written in two forms.

    h1 = relu(x w1)   h2 = relu(h1 w2)   y = h2 w3   loss = mean of (y - target)^2

`replicated`: every gradient is all-reduced, and every device updates all weights. `sharded` (Xu et al., 2020): every
gradient is reduce-scattered over its first dim, and each device stores and updates one eighth of the weights and
moments. A weight is all-gathered where the forward pass reads it, once for both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = Sequence[jax.Device] | None  # None: those of this machine

BATCH = 16
SIZES = {"w1": (2048, 4096), "w2": (4096, 2048), "w3": (2048, 4096)}
DIMS = {"w1": "in first", "w2": "first second", "w3": "second out"}
RATE, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8


def arrays(seed: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The state (weights, moments, step) and a batch, as unsharded host arrays."""
    rng = np.random.default_rng(seed)
    params = {n: (rng.standard_normal(s, np.float32) * s[0] ** -0.5) for n, s in SIZES.items()}
    zeros = {n: np.zeros(s, np.float32) for n, s in SIZES.items()}
    state = {"params": params, "m": zeros, "v": {n: z.copy() for n, z in zeros.items()}, "step": np.int32(0)}
    x, target = (rng.standard_normal((BATCH, n), np.float32) for n in (2048, 4096))
    return state, {"x": x, "target": target}


def _gradients(w: dict[str, Any], x: Any, target: Any) -> tuple[dict[str, Any], Any]:
    """This device's partial gradients and loss."""
    h1 = jax.nn.relu(x @ w["w1"])
    h2 = jax.nn.relu(h1 @ w["w2"])
    error = h2 @ w["w3"] - target
    dy = error * (2 / (BATCH * SIZES["w3"][1]))
    d2 = jnp.where(h2 > 0, _times_transposed(dy, w["w3"]), 0)
    d1 = jnp.where(h1 > 0, _times_transposed(d2, w["w2"]), 0)
    grads = {"w1": _gradient(x, d1), "w2": _gradient(h1, d2), "w3": _gradient(h2, dy)}
    return grads, jnp.sum(error * error)


def _adam(state: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
    step = state["step"] + 1
    count = step.astype(jnp.float32)
    c1, c2 = 1 - B1**count, 1 - B2**count
    m = {n: B1 * state["m"][n] + (1 - B1) * g for n, g in grads.items()}
    v = {n: B2 * state["v"][n] + (1 - B2) * (g * g) for n, g in grads.items()}
    params = {n: p - RATE * (m[n] / c1) / (jnp.sqrt(v[n] / c2) + EPS) for n, p in state["params"].items()}
    return {"params": params, "m": m, "v": v, "step": step}


def replicated(state: dict[str, Any], x: Any, target: Any) -> tuple[dict[str, Any], Any]:
    """One step; the state is replicated."""
    grads, loss = lax.psum(_gradients(state["params"], x, target), "all")
    return _adam(state, grads), loss / (BATCH * SIZES["w3"][1])


def sharded(state: dict[str, Any], x: Any, target: Any) -> tuple[dict[str, Any], Any]:
    """One step; weights and moments are sharded over their first dim."""
    whole = {n: lax.all_gather(p, "all", axis=0, tiled=True, to="invarying") for n, p in state["params"].items()}
    grads, loss = _gradients(whole, x, target)
    grads = {n: lax.psum_scatter(g, "all", scatter_dimension=0, tiled=True) for n, g in grads.items()}
    return _adam(state, grads), lax.psum(loss, "all") / (BATCH * SIZES["w3"][1])


def compiled(
    step: Callable[..., Any], cut: bool, devices: Devices = None
) -> tuple[jax.stages.Compiled, Any, NamedSharding]:
    """The compiled step, the shardings of its state, and those of its batch."""
    mesh = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,), devices=devices)
    weights = {n: P("all") if cut else P() for n in SIZES}
    specs = {"params": weights, "m": weights, "v": weights, "step": P()}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("all"), P("all")), out_specs=(specs, P()))
    at = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    batch = NamedSharding(mesh, P("all"))
    state, batch_arrays = arrays()
    jitted = jax.jit(
        mapped, in_shardings=(at, batch, batch), out_shardings=(at, NamedSharding(mesh, P())), donate_argnums=0
    )
    shapes = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=s), state, at)
    rest = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=batch) for a in batch_arrays.values()]
    return jitted.lower(shapes, *rest).compile(), at, batch


def _gradient(x: Any, ct: Any) -> Any:
    return lax.dot_general(x, ct, (((0,), (0,)), ((), ())))


def _times_transposed(ct: Any, w: Any) -> Any:
    return lax.dot_general(ct, w, (((1,), (1,)), ((), ())))
