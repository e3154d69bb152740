"""Bytes sent by operations along a sharded dim, in meshdsl and in GSPMD: python -m benchmarks.reshards

Prints a JSON line for each operation: the bytes of all collectives in the optimized HLO of one device (for each, the
larger of operand and result), for meshdsl and for `jit` with shardings, on eight CPU devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshdsl as md
from benchmarks import hlo

MESH, SIZE, WIDTH = "m:8", 4096, 64

# Each operation on a tensor [x, y] and on an array; x and the first dim of the result are sharded over m.
CASES: dict[str, tuple[Callable[[md.Tensor], Any], Callable[[jax.Array], jax.Array]]] = {
    "slice": (lambda t: md.slice(t, "x", 100, 2048), lambda a: a[100:2148]),
    "strided slice": (lambda t: md.slice(t, "x", 0, 2048, 2), lambda a: a[::2]),
    "shift": (lambda t: md.shift(t, "x", 1), lambda a: jnp.pad(a, [(1, 0), (0, 0)])[:-1]),
    "roll": (lambda t: md.roll(t, "x", 3), lambda a: jnp.roll(a, 3, 0)),
    "pad": (lambda t: md.pad(t, "x", 8, 8), lambda a: jnp.pad(a, [(8, 8), (0, 0)])),
    "reverse": (lambda t: md.reverse(t, "x"), lambda a: a[::-1]),
    "concat": (lambda t: md.concat([t, t], "x"), lambda a: jnp.concatenate([a, a])),
    "cumsum": (lambda t: md.cumsum(t, "x"), lambda a: jnp.cumsum(a, 0)),
    "top_k": (lambda t: md.top_k(t, "x", md.Dim("k", 8))[0], lambda a: jax.lax.top_k(a.T, 8)[0].T),
    "sort": (lambda t: md.sort(t, "x"), lambda a: jnp.sort(a, 0)),
    "take": (
        lambda t: md.take(t, md.iota(md.Dim("n", 64)) * 7, "x"),
        lambda a: jnp.take(a, jnp.arange(64) * 7, axis=0),
    ),
    "cummax": (lambda t: md.cummax(t, "x"), lambda a: jax.lax.cummax(a, 0)),
    "quantile": (lambda t: md.quantile(t, 0.3, "x"), lambda a: jnp.quantile(a, 0.3, axis=0)),
    "searchsorted": (
        lambda t: md.searchsorted(t["y", 0], md.iota(md.Dim("n", 64), "float32"), "x"),
        lambda a: jnp.searchsorted(a[:, 0], jnp.arange(64.0)),
    ),
    "scatter set": (
        lambda t: md.scatter_set(t, md.iota(md.Dim("n", 64)) * 7, md.zeros([md.Dim("n", 64), md.Dim("y", WIDTH)]), "x"),
        lambda a: a.at[jnp.arange(64) * 7].set(0),
    ),
    "scatter add": (
        lambda t: md.scatter_add(t, md.iota(md.Dim("x", SIZE)) * 7 % SIZE, t, "x"),
        lambda a: a.at[jnp.arange(SIZE) * 7 % SIZE].add(a),
    ),
    "scatter max": (
        lambda t: md.scatter_max(t, md.iota(md.Dim("x", SIZE)) * 7 % SIZE, t, "x"),
        lambda a: a.at[jnp.arange(SIZE) * 7 % SIZE].max(a),
    ),
    "segment sum": (
        lambda t: md.segment_sum(t, md.iota(md.Dim("x", SIZE)) // 64, md.Dim("s", SIZE // 64)),
        lambda a: jax.ops.segment_sum(a, jnp.arange(SIZE) // 64, SIZE // 64),
    ),
    "argmax": (lambda t: md.argmax(t, "x"), lambda a: jnp.argmax(a, 0)),
    "merge": (lambda t: md.flatten(t, "x y", md.Dim("z", SIZE * WIDTH)), lambda a: a.reshape(-1)),
    "split inner": (lambda t: md.reshape(t, f"p:{SIZE // 4} q:{WIDTH * 4}"), lambda a: a.reshape(SIZE // 4, -1)),
    "uneven split": (lambda t: md.reshape(t, f"p:{SIZE // 1024} q:{WIDTH * 1024}"), lambda a: a.reshape(4, -1)),
}
WHOLE = {"top_k", "argmax", "take", "quantile", "searchsorted", "segment sum"}  # results that are replicated


def ours(f: Callable[[md.Tensor], Any]) -> Any:
    """meshdsl's executable of the operation, under a layout that shards x and the dims created from it."""
    layout = dict.fromkeys(("x", "z", "p"), "m")
    x = md.spec([md.Dim("x", SIZE), md.Dim("y", WIDTH)])
    output_dims = {d.name for v in md.compile(f, MESH, "x:m").graph(x).outs for d in v.dims} | {"x"}
    return md.compile(f, MESH, {d: axis for d, axis in layout.items() if d in output_dims}).lower(x).compile()


def theirs(f: Callable[[jax.Array], jax.Array], split: bool) -> Any:
    """GSPMD's executable of the operation."""
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Auto,))
    shape = jax.ShapeDtypeStruct((SIZE, WIDTH), np.float32, sharding=NamedSharding(mesh, PartitionSpec("m")))
    ranks = len(jax.eval_shape(f, shape).shape)
    even = jax.eval_shape(f, shape).shape[0] % 8 == 0
    out = NamedSharding(mesh, PartitionSpec("m") if split and ranks and even else PartitionSpec())
    return jax.jit(f, out_shardings=out).lower(shape).compile()


def reshard() -> dict[str, object]:
    """A reshard from P(b, -, m) to P(-, (m, b), -), which needs two all_to_alls."""
    shape, mesh = "x:64 y:128 z:32", jax.make_mesh((2, 4), ("b", "m"), axis_types=(AxisType.Auto,) * 2)
    source, target = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("b", None, "m"), (None, ("m", "b"), None)))
    array = jax.ShapeDtypeStruct((64, 128, 32), np.float32, sharding=source)
    theirs = jax.jit(lambda a: a, out_shardings=target).lower(array).compile()
    layout = md.Layout("y:m,b", overrides={"t": {"x": "b", "z": "m", "y": ""}})
    program = md.compile(lambda t: t * 1, "b:2 m:4", layout).program(md.spec(shape))
    ours = sum(record.bytes * record.count for record in program.collectives)
    name = "P(b,-,m) to P(-,(m,b),-)"
    return {"figure": "reshard", "operation": name, "bytes": ours, "gspmd_bytes": hlo.collective_bytes(theirs)}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, (f, g) in CASES.items():
        sent, gspmd = (hlo.collective_bytes(x) for x in (ours(f), theirs(g, name not in WHOLE)))
        print(json.dumps({"figure": "reshard", "operation": name, "bytes": sent, "gspmd_bytes": gspmd}), flush=True)
    print(json.dumps(reshard()), flush=True)


if __name__ == "__main__":
    main()
