"""Measure this computer's CPU and write its machine file: eight JAX devices that share its cores.

Every figure is measured under the conditions of a step: all devices run the same instruction at once (`bench`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ...cost.machine import users_folders
from ...cost.machine_file import MachineError
from ...cost.network import KINDS, monotone
from ...errors.files import write_text
from .bench import (
    QUICK,
    Bench,
    BenchPlan,
    collective_seconds,
    conv_rate,
    copy_rate,
    launch_seconds,
    normalised,
    product_rate,
    without_launches,
)

Progress = Callable[[str], None]


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
    text = _document(Bench(available[:devices], QUICK if quick else BenchPlan()), say)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return target


def _document(bench: Bench, say: Progress) -> str:
    """The text of the machine file."""
    n = len(bench.devices)
    say(f"launch: the smallest kernel on {n} devices")
    launch = launch_seconds(bench)
    say("matrix products")
    rates = [(2.0 * side**3, product_rate(bench, side, "float32", launch)) for side in bench.plan.sides]
    largest = bench.plan.sides[-1]
    say("convolutions")
    convs = [conv_rate(bench, channels, launch) for channels in bench.plan.channels]
    peak = {"float32": max(rate for _, rate in (*rates, *convs))}  # beside other work, a convolution may be the fastest
    for dtype in ("float64", "bfloat16") if jnp.zeros(0, float).dtype == np.float64 else ("bfloat16",):
        peak[dtype] = product_rate(bench, largest, dtype, launch)
    say("memory and elementwise operations")
    bandwidth = copy_rate(bench, bench.plan.copied, launch)
    size = 2**18
    rows = np.random.default_rng(0).normal(size=(size // 128, 128)).astype(np.float32)
    vector = 8 * size / without_launches(bench.seconds(normalised, rows), 3 * launch)
    hard = size / without_launches(bench.seconds(lambda x: (jnp.exp(x) * 0.25,), rows), launch)
    tables: list[tuple[str, int, list[tuple[float, float]]]] = []
    for kind in KINDS:
        for group in (g for g in (2, 4, 8, 16, 32) if n % g == 0):
            say(f"{kind} among {group}")
            tables.append((kind, group, [collective_seconds(bench, kind, group, size) for size in bench.plan.blocks]))
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
