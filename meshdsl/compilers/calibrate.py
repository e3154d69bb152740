"""Measure this computer's CPU and write its machine file: eight JAX devices that share its cores.

Every figure is measured under the conditions of a step: all devices run the same instruction at once. Seconds are the
process's CPU time divided by its cores; on an idle computer this equals wall time, and it does not grow when other
processes compute. Each instruction is repeated in a loop on the devices, so the start of the loop does not count.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..cost.machine import users_folders
from ..cost.machine_file import MachineError
from ..cost.network import KINDS, monotone
from ..report.files import write_text

__all__ = ["QUICK", "Plan", "calibrate", "per_trip"]

Array = Any
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
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


QUICK = Plan((64, 256), (8, 16), 2**21, (2**10, 2**16, 2**20), 0.01, 0.5, 2)


def calibrate(
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    devices: int = 8,
    quick: bool = False,
) -> Path:
    """Measure this computer and write its machine file; takes about a minute, `quick` about a third of that.

    The default path is `cpu.toml` in the first folder of $MESHDSL_MACHINES, or in ~/.config/meshdsl/machines, where
    `machine("cpu")` finds it. The file is written atomically. `progress` is called with a line of text before each
    group of measurements; default: print to stderr. Returns the path.

    JAX must have `devices` CPU devices (`md.host_devices`); raises `MachineError` if it has fewer.
    """
    available = jax.devices("cpu")
    if len(available) < devices:
        raise MachineError(
            f"calibration needs {devices} CPU devices; JAX has {len(available)}\n"
            f"  call md.host_devices({devices}) before the first computation"
        )
    target = users_folders()[0] / "cpu.toml" if path is None else Path(path).expanduser()
    if target.exists() and not target.is_file():
        raise MachineError(f"{target} is not a file; give the path of a .toml file")
    say = progress or (lambda text: print(text, file=sys.stderr, flush=True))
    text = _document(_Bench(available[:devices], QUICK if quick else Plan()), say)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return target


def per_trip(run: Callable[[int], float], plan: Plan) -> float:
    """Seconds of one trip, from a function of the number of trips that returns their seconds and a constant."""
    deadline = time.perf_counter() + plan.limit
    start = run(0)
    trips, elapsed = 1, run(1)
    while elapsed - start < plan.seconds and trips < 2**14 and time.perf_counter() < deadline:
        each = max(elapsed - start, 1e-7) / trips
        trips = min(2**14, max(2 * trips, math.ceil(1.2 * plan.seconds / each)))
        elapsed = run(trips)
    return max(elapsed - start, 1e-9) / trips


class _Bench:
    """Measure instructions on all devices at once."""

    def __init__(self, devices: Sequence[Any], plan: Plan):
        self.devices = devices
        self.plan = plan
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

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

        def run(trips: int) -> float:
            count = jax.device_put(jnp.int32(trips), NamedSharding(mesh, replicated))
            jax.block_until_ready(executable(count, *args))
            times: list[float] = []
            for _ in range(self.plan.rounds):
                start = time.process_time()
                jax.block_until_ready(executable(count, *args))
                times.append((time.process_time() - start) / self.cores)
            return float(np.median(times))

        return run


def _document(bench: _Bench, say: Progress) -> str:
    """The text of the machine file."""
    n = len(bench.devices)
    say(f"launch: the smallest kernel on {n} devices")
    launch = _launch(bench)
    say("matrix products")
    rates = [(2.0 * side**3, _product_rate(bench, side, "float32", launch)) for side in bench.plan.sides]
    largest = bench.plan.sides[-1]
    peak = {"float32": max(rate for _, rate in rates)}
    for dtype in ("float64", "bfloat16") if jnp.zeros(0, float).dtype == np.float64 else ("bfloat16",):
        peak[dtype] = _product_rate(bench, largest, dtype, launch)
    say("convolutions")
    convs = [_conv_rate(bench, channels, launch) for channels in bench.plan.channels]
    say("memory and elementwise operations")
    bandwidth = _copy_rate(bench, bench.plan.copied, launch)
    size = 2**18
    rows = np.random.default_rng(0).normal(size=(size // 128, 128)).astype(np.float32)
    vector = 8 * size / _without(bench.seconds(_normalised, rows), 3 * launch)
    hard = size / _without(bench.seconds(lambda x: (jnp.exp(x) * 0.25,), rows), launch)
    tables: list[tuple[str, int, list[tuple[float, float]]]] = []
    for kind in KINDS:
        for group in (g for g in (2, 4, 8, 16, 32) if n % g == 0):
            say(f"{kind} among {group}")
            tables.append((kind, group, [_collective(bench, kind, group, size) for size in bench.plan.blocks]))
    return _toml(
        title=f"CPU of this computer, {bench.cores} cores as {n} devices: {_processor()}",
        numbers={
            "vector": vector,
            "transcendental": hard,
            "hbm": _memory() / n,
            "hbm_bandwidth": bandwidth,
            "launch": launch,
        },
        curves={
            "efficiency": [(flops, rate / peak["float32"]) for flops, rate in rates],
            "convolution": [(flops, rate / peak["float32"]) for flops, rate in convs],
        },
        peak={**peak, "other": min(peak.values())},
        devices=n,
        tables=tables,
    )


def _launch(bench: _Bench) -> float:
    """Seconds per small product in a chain beside a large kernel; XLA turns a small loop into one kernel."""
    count = 16

    def step(large: Array, small: Array, w: Array, kernels: int) -> tuple[Array, Array, Array]:
        for _ in range(kernels):
            small = small @ w
        return -large, small, w

    blocks = (np.ones(2**14, np.float32), np.ones((4, 4), np.float32), np.eye(4, dtype=np.float32))
    few, many = (bench.seconds(partial(step, kernels=k), *blocks) for k in (1, 1 + count))
    return max(many - few, 0.0) / count


def _product_rate(bench: _Bench, side: int, dtype: str, launch: float) -> float:
    """FLOP/s of square products; each step runs the three products of a layer: forward, and both gradients."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(scale=side**-0.5, size=(side, side)).astype(jnp.dtype(dtype)) for _ in range(2))

    def step(x: Array, w: Array) -> tuple[Array, Array]:
        y = x @ w
        return y @ w.T, x.T @ y

    seconds = bench.seconds(step, x, w)
    return 6 * side**3 / _without(seconds, 3 * launch)


def _conv_rate(bench: _Bench, channels: int, launch: float) -> tuple[float, float]:
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
    return flops, 3 * flops / _without(seconds, 3 * launch)


def _copy_rate(bench: _Bench, size: int, launch: float) -> float:
    """Bytes/s, reads plus writes, of an elementwise operation."""
    seconds = bench.seconds(lambda x: (x * 0.5 + 0.25,), np.ones(size, np.float32))
    return 8 * size / _without(seconds, launch)


def _without(seconds: float, launches: float) -> float:
    """Seconds without launch time; at least a tenth of the seconds remains."""
    return max(seconds - launches, 0.1 * seconds)


def _normalised(x: Array) -> tuple[Array]:
    """Normalise rows to mean 0 and length 1: eight operations per element, two of them reductions."""
    x = x - jnp.mean(x, 1, keepdims=True)
    y = x * lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) + 1.0)
    return (jnp.where(y > 0.5, y, y + 0.25),)


def _collective(bench: _Bench, kind: str, group: int, size: int) -> tuple[float, float]:
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


def _processor() -> str:
    """The processor's model name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int:
    """Memory of this computer, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _toml(
    *,
    title: str,
    numbers: Mapping[str, float],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    peak: Mapping[str, float],
    devices: int,
    tables: Sequence[tuple[str, int, Sequence[tuple[float, float]]]],
) -> str:
    """The text of a machine file, in the format of `machine_file`."""
    gathers = [points for kind, group, points in tables if kind == "all_gather" and group == devices]
    (first, last) = (gathers[0][0], gathers[0][-1]) if gathers else ((0.0, 0.0), (1e9, 1.0))
    bandwidth = (devices - 1) / devices * last[0] / last[1]
    origin = f"measured on {time.strftime('%Y-%m-%d')} by meshdsl doctor --calibrate, JAX {jax.__version__}"
    lines = [f"title = {json.dumps(title)}", 'device = "CPU device"']
    lines += [f"{key} = {value:.4g}" for key, value in numbers.items()]
    lines += [f"{key} = {_pairs(curve)}" for key, curve in curves.items()]
    lines += ["asynchronous = []", "overlap_slowdown = 1.0", "uncertainty = 0.25", "", "[peak]"]
    lines += [f"{dtype} = {rate:.4g}" for dtype, rate in peak.items()]
    lines += ["", "[network]", f"launch = {first[1]:.4g}", "", "[[network.level]]", 'kind = "switch"']
    lines += [f"axes = {{ device = {devices} }}", f"bandwidth = {bandwidth:.4g}"]
    for kind, group, points in tables:
        lines += ["", "[[network.measured]]", f'kind = "{kind}"', f"group = [{group}]"]
        lines += [f"points = {_pairs(monotone(points))}"]
    lines += ["", "[sources]", *(f"{key} = {json.dumps(origin)}" for key in (*numbers, *curves, "peak", "network"))]
    return "\n".join(lines) + "\n"


def _pairs(points: Sequence[tuple[float, float]]) -> str:
    return "[" + ", ".join(f"[{x:.6g}, {y:.4g}]" for x, y in points) + "]"
