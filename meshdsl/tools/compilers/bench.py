"""Measured instructions on this computer's devices: seconds of launches, products, copies and collectives.

Seconds are the process's CPU time divided by its cores; on an idle computer this equals wall time, and it does not grow
when other processes compute. Each instruction is repeated in a loop on the devices, so the start of the loop does not
count.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Array = Any


@dataclass(frozen=True)
class BenchPlan:
    """Measured sizes: sides of square products, channels of convolutions, elements of a copy, bytes of a collective.

    All are large enough that launch time is negligible; below them the rates are constant.
    """

    sides: tuple[int, ...] = (64, 128, 256, 512)
    channels: tuple[int, ...] = (8, 16, 32)
    copied: int = 2**22  # more than the caches of all devices hold: a step, too, reads values made long before
    blocks: tuple[int, ...] = (2**10, 2**14, 2**17, 2**20, 2**24)
    seconds: float = 0.03  # CPU time of one measurement
    limit: float = 1.5  # wall time limit of one measurement, if others use the cores
    rounds: int = 3


QUICK = BenchPlan((64, 256), (8, 16), 2**21, (2**10, 2**16, 2**20), 0.01, 0.5, 2)


def per_trip(run: Callable[[int], float], plan: BenchPlan) -> float:
    """Seconds of one trip, from a function of the number of trips that returns their seconds and a constant."""
    deadline = time.perf_counter() + plan.limit
    start = run(0)
    trips, elapsed = 1, run(1)
    while elapsed - start < plan.seconds and trips < 2**14 and time.perf_counter() < deadline:
        each = max(elapsed - start, 1e-7) / trips
        trips = min(2**14, max(2 * trips, math.ceil(1.2 * plan.seconds / each)))
        elapsed = run(trips)
    return max(elapsed - start, 1e-9) / trips


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def median_of_runs(
    executable: Callable[..., Any], args: Sequence[Array], sharding: NamedSharding, rounds: int, *, on_cpu: bool = True
) -> Callable[[int], float]:
    """A function from a number of trips to the seconds of `executable(trips, *args)`, the median of several rounds.

    Of CPU devices, which share the cores, it is the process's CPU time divided by the cores; of others, wall time.
    """
    clock, share = (time.process_time, cores()) if on_cpu else (time.perf_counter, 1)

    def run(trips: int) -> float:
        count = jax.device_put(jnp.int32(trips), sharding)
        jax.block_until_ready(executable(count, *args))
        times: list[float] = []
        for _ in range(rounds):
            start = clock()
            jax.block_until_ready(executable(count, *args))
            times.append((clock() - start) / share)
        return float(np.median(times))

    return run


class Bench:
    """Measure instructions on all devices at once."""

    def __init__(self, devices: Sequence[Any], plan: BenchPlan):
        self.devices = devices
        self.plan = plan
        self.cores = cores()

    def seconds(self, step: Callable[..., Any], *blocks: Array, group: int = 1) -> float:
        """Seconds of one `step`, a function from blocks to blocks of the same types, on every device.

        Devices along the mesh axis "group" may communicate.
        """
        return per_trip(self.loop(step, blocks, group), self.plan)

    def loop(self, step: Callable[..., Any], blocks: Sequence[Array], group: int) -> Callable[[int], float]:
        """A function from the number of repeats of `step` to their total seconds, the median of several rounds."""
        mesh = jax.sharding.Mesh(np.array(self.devices).reshape(-1, group), ("apart", "group"))
        sharded, replicated = PartitionSpec(("apart", "group")), PartitionSpec()

        def on_device(trips: Array, *xs: Array) -> Any:
            return lax.fori_loop(0, trips, lambda _, xs: step(*xs), xs)

        specs = (replicated, *[sharded] * len(blocks))
        f = jax.jit(
            jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(sharded,) * len(blocks), check_vma=False)
        )
        args = [jax.device_put(np.concatenate([x] * len(self.devices)), NamedSharding(mesh, sharded)) for x in blocks]
        executable = f.lower(jnp.int32(0), *args).compile()
        return median_of_runs(executable, args, NamedSharding(mesh, replicated), self.plan.rounds)


def launch_seconds(bench: Bench) -> float:
    """Seconds per small product in a chain beside a large kernel; XLA turns a small loop into one kernel."""
    count = 16

    def step(large: Array, small: Array, w: Array, kernels: int) -> tuple[Array, Array, Array]:
        for _ in range(kernels):
            small = small @ w
        return -large, small, w

    blocks = (np.ones(2**14, np.float32), np.ones((4, 4), np.float32), np.eye(4, dtype=np.float32))
    few, many = (bench.seconds(partial(step, kernels=k), *blocks) for k in (1, 1 + count))
    return max(many - few, 0.0) / count


def product_rate(bench: Bench, side: int, dtype: str, launch: float) -> float:
    """FLOP/s of square products; each step runs the three products of a layer: forward, and both gradients."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(scale=side**-0.5, size=(side, side)).astype(jnp.dtype(dtype)) for _ in range(2))

    def step(x: Array, w: Array) -> tuple[Array, Array]:
        y = x @ w
        return y @ w.T, x.T @ y

    seconds = bench.seconds(step, x, w)
    return 6 * side**3 / without_launches(seconds, 3 * launch)


def conv_rate(bench: Bench, channels: int, launch: float) -> tuple[float, float]:
    """FLOPs and FLOP/s of a 3 x 3 convolution of eight images of 8 x 8, forward and both gradients."""
    rng = np.random.default_rng(0)
    x, w = (
        rng.normal(scale=0.1, size=(*sizes, channels)).astype(np.float32) for sizes in ((8, 8, 8), (3, 3, channels))
    )

    def conv(x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def step(x: Array, w: Array) -> tuple[Array, Array]:
        y, gradients = jax.vjp(conv, x, w)
        return gradients(y)

    flops = 2.0 * x.size * w.size / channels
    seconds = bench.seconds(step, x, w)
    return flops, 3 * flops / without_launches(seconds, 3 * launch)


def copy_rate(bench: Bench, size: int, launch: float) -> float:
    """Bytes/s, reads plus writes, of an elementwise operation."""
    seconds = bench.seconds(lambda x: (x * 0.5 + 0.25,), np.ones(size, np.float32))
    return 8 * size / without_launches(seconds, launch)


def without_launches(seconds: float, launches: float) -> float:
    """Seconds without launch time; at least a tenth of the seconds remains."""
    return max(seconds - launches, 0.1 * seconds)


def normalised(x: Array) -> tuple[Array]:
    """Normalise rows to mean 0 and length 1: eight operations per element, two of them reductions."""
    x = x - jnp.mean(x, 1, keepdims=True)
    y = x * lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) + 1.0)
    return (jnp.where(y > 0.5, y, y + 0.25),)


def collective_seconds(bench: Bench, kind: str, group: int, size: int) -> tuple[float, float]:
    """V as in `network.full_bytes`, and the seconds of a collective whose larger block has `size` bytes on a device."""
    axis = "group"
    x = np.zeros(size // 4, np.float32)
    part = len(x) // group
    steps: dict[str, tuple[Callable[[Array], Array], int]] = {
        "all_reduce": (lambda x: lax.psum(x, axis), size),
        "all_gather": (lambda x: _cut(lax.all_gather(_cut(x, part), axis, tiled=True), len(x)), size),
        "reduce_scatter": (lambda x: lax.dynamic_update_slice(x, lax.psum_scatter(x, axis, tiled=True), (0,)), size),
        "all_to_all": (
            lambda x: lax.all_to_all(x.reshape(group, part), axis, 0, 0, tiled=True).reshape(-1),
            size * group,
        ),
        "permute": (lambda x: lax.ppermute(x, axis, [(i, (i + 1) % group) for i in range(group)]), size),
    }
    step, v = steps[kind]
    return float(v), bench.seconds(lambda x: (step(x),), x, group=group)


def _cut(x: Array, size: int) -> Array:
    return lax.slice_in_dim(x, 0, size)
