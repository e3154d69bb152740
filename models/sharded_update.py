"""Replicated and sharded weight updates compared, as in figures 11 and 12 of Xu et al. (2020): step time, peak memory.

    python -m models.sharded_update                      three models on 8 TPU v3 cores, and the paper's setting
    python -m models.sharded_update --machine tpu-v5e    on another machine
    python -m models.sharded_update --measure            also measure small models on eight CPU devices
    python -m models.sharded_update --groups             the paper's setting, with device groups and bucketing
    python -m models.sharded_update --json               the same, with the peaks, as JSON lines

ResNet-50 uses LARS; the Transformer and neural collaborative filtering use Adam. All are pure data parallel, and only
`weight_update=` differs between the two runs. Times are predictions of `compiled.cost(...)` unless marked as measured;
memory is per device. The paper measured 46.5 ms and 25.6 ms for the Transformer on 2,048 cores with 2,048 sentences,
and a saving of 6 % for ResNet-50.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.models.ncf import ncf
from meshdsl.models.resnet import resnet50
from meshdsl.models.seq2seq import seq2seq

__all__ = ["LARGE", "PAPER", "SMALL", "Setting", "main", "measured", "predicted", "step"]

MODES = ("replicated", "sharded")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A workload with the batch sharded over all devices; `paper` is the paper's measurement, as text."""

    label: str
    workload: md.Workload
    mesh: str
    layout: str
    paper: str = ""


def _resnet(**sizes: Any) -> md.Workload:
    """ResNet-50 with LARS (You et al., 2017), as in the paper."""
    lars: Callable[[Any], md.optim.Optimizer] = lambda config: md.optim.lars(config.learning_rate)  # noqa: E731
    return dataclasses.replace(resnet50, optimizer=lars).replace(**sizes)


def _transformer(**sizes: Any) -> md.Workload:
    """The big Transformer of Vaswani et al. (2017), as in the paper; activations in bfloat16."""
    big = {"source": 96, "length": 96, "vocab": 33_708, "layers": 6, "d_model": 1024, "heads": 16, "d_head": 64}
    return seq2seq.replace(**{**big, "d_ff": 4096, "compute_dtype": "bfloat16", **sizes})


_EIGHT = ("chips:8", "batch:chips")
_POD = ("y:32 x:32 core:2", "batch:y,x,core")  # 2,048 cores of a TPU v3 pod; each torus axis is a mesh axis
LARGE = (
    Setting("ResNet-50, LARS", _resnet(batch=256), *_EIGHT),
    Setting("Transformer, Adam", _transformer(batch=64), *_EIGHT),
    Setting("NCF, Adam", ncf.replace(batch=8192, users=138_496, items=26_752, factors=64, width=128), *_EIGHT),
)
PAPER = (
    Setting("ResNet-50, 2,048 cores", _resnet(batch=32_768), *_POD, "6 % less"),
    Setting("Transformer, 2,048 cores", _transformer(batch=2048), *_POD, "46.5 -> 25.6 ms"),
)
_CLUSTER = ("y:4 x:4 core:2", "batch:y,x,core")  # 32 cores: 16 chips in a 2D mesh
CLUSTER = (  # table 1; a batch of NCF counts four negatives with each call
    Setting("ResNet-50, 32 cores", _resnet(batch=4096), *_CLUSTER),
    Setting("Transformer, 32 cores", _transformer(batch=512), *_CLUSTER, "9 % less"),
    Setting("NCF, 32 cores", ncf.replace(
        batch=98_304 // 5, users=138_496, items=26_752, factors=64, width=128, hidden=(256, 128, 64),
    ), *_CLUSTER),
)  # fmt: skip
ONE_AXIS = tuple(
    dataclasses.replace(setting, label=f"{setting.label}, one axis", mesh="cores:2048", layout="batch:cores")
    for setting in PAPER
)
SMALL = (
    Setting("ResNet, small", _resnet(batch=8, height=16, width=16, stem=16, blocks=(1, 1, 1, 1), classes=16), *_EIGHT),
    Setting("Transformer, small", _transformer(
        batch=8, source=4, length=4, vocab=2048, layers=1, d_model=256, heads=4, d_ff=1024, compute_dtype="float32",
    ), *_EIGHT),
    Setting("NCF, small", ncf.replace(batch=64, factors=32, width=64), *_EIGHT),
)  # fmt: skip


def step(
    setting: Setting, mode: str, machine: str | None = None, bucket_bytes: float | None = None
) -> tuple[md.Compiled, tuple[Any, ...]]:
    """The compiled training step of a setting, and the specs of its arguments."""
    update = md.WeightUpdate(mode, bucket_bytes=bucket_bytes)
    compiled = md.compile(
        setting.workload.train_step(),
        setting.mesh,
        setting.layout,
        donate=(0, 1),
        weight_update=update,
        machine=machine,
    )
    return compiled, setting.workload.specs()


def padded(setting: Setting, machine: str, group: str | None = None) -> tuple[float, float]:
    """Seconds per sharded step, and bytes of padding of the optimizer's state on all devices."""
    update = md.WeightUpdate("sharded", group=group)
    compiled = md.compile(
        setting.workload.train_step(), setting.mesh, setting.layout, donate=(0, 1), weight_update=update
    )
    types = setting.workload.specs()
    program = compiled.program(*types)
    state = [v for v in program.ins if v.name.startswith("state/")]
    stored = sum(math.prod(program.extents.padded(d) for d in v.dims) * v.dtype.itemsize for v in state)
    real = sum(math.prod(d.size for d in v.dims) * v.dtype.itemsize for v in state)
    return compiled.cost(*types, machine=machine).seconds, stored - real


def grouped(setting: Setting, machine: str) -> dict[str, float]:
    """Predicted seconds per step, with and without device groups and bucketing of small tensors."""
    variants: dict[str, dict[str, Any]] = {
        "replicated": {"mode": "replicated"},
        "sharded": {"mode": "sharded"},
        "sharded, bucketed": {"mode": "sharded", "bucket_bytes": 100_000},
        "auto": {"mode": "auto", "machine": machine, "bucket_bytes": 0},
        "auto, bucketed": {"mode": "auto", "machine": machine},
    }
    results: dict[str, float] = {}
    for name, options in variants.items():
        compiled, types = step(setting, **options)
        results[name] = compiled.cost(*types, machine=machine).seconds
    return results


def predicted(setting: Setting, machine: str) -> dict[str, tuple[float, float]]:
    """For each mode: predicted seconds per step, and peak bytes per device.

    >>> small = SMALL[2]
    >>> by_mode = predicted(small, "tpu-v3")
    >>> by_mode["sharded"][1] < by_mode["replicated"][1]
    True
    """
    results: dict[str, tuple[float, float]] = {}
    for mode in MODES:
        compiled, types = step(setting, mode)
        cost = compiled.cost(*types, machine=machine)
        results[mode] = cost.seconds, cost.peak_bytes
    return results


def measured(setting: Setting, rounds: int = 5) -> dict[str, float]:
    """For each mode: CPU seconds per step on this machine, the median of interleaved rounds. Needs eight devices."""
    runs: dict[str, Callable[[], None]] = {mode: _runner(setting, mode) for mode in MODES}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for n in range(rounds + 1):
        for mode, run in runs.items():
            started = time.process_time()
            run()
            if n:  # the first round compiles
                times[mode].append(time.process_time() - started)
    return {mode: float(np.median(values)) for mode, values in times.items()}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart: names to the left, figures to the right."""
    first, *widths = (max(map(len, column)) for column in zip(header, *rows, strict=True))
    lines = ([name.ljust(first), *map(str.rjust, cells, widths)] for name, *cells in (header, *rows))
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _runner(setting: Setting, mode: str) -> Callable[[], None]:
    """A function that trains one step, on zeros."""
    compiled, (_, _, batch) = step(setting, mode)
    tensors = {name: md.tensor(np.zeros([d.size for d in s.dims], s.dtype), s.dims) for name, s in batch.items()}
    params, state = md.compile(setting.workload.init, setting.mesh, setting.layout)(md.random.key(0))

    def run() -> None:
        nonlocal params, state
        params, state, metrics = compiled(params, state, tensors)
        float(metrics["loss"].numpy())

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m models.sharded_update", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--machine", default="tpu-v3", help="machine of the predictions (default tpu-v3)")
    parser.add_argument("--measure", action="store_true", help="also measure small models on eight CPU devices")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps per mode (default 5)")
    parser.add_argument("--groups", action="store_true", help="only device groups and bucketing, on 2,048 cores")
    parser.add_argument("--json", action="store_true", help="all settings of the paper, as JSON lines")
    options = parser.parse_args(arguments)
    if options.json:
        for setting in (*PAPER, *ONE_AXIS, *CLUSTER):
            times = grouped(setting, options.machine)
            row = {"saved": 1 - times["sharded"] / times["replicated"]}
            row |= {f"{name.replace(', ', '_')}_ms": round(s * 1e3, 2) for name, s in times.items()}
            bytes_of = predicted(setting, options.machine)
            if setting in ONE_AXIS:
                (_, less), (seconds, more) = (padded(setting, options.machine, group) for group in (None, "cores"))
                row |= {"whole_axis_ms": round(seconds * 1e3, 2), "whole_axis_padding_mb": more / 1e6}
                row |= {"padding_mb": less / 1e6}
            peaks = {f"{mode}_peak_mb": round(bytes_of[mode][1] / 1e6) for mode in MODES}
            print(json.dumps({"setting": setting.label} | row | peaks | {"paper": setting.paper}), flush=True)
        return 0
    if options.groups:
        results = {setting.label: grouped(setting, options.machine) for setting in (*PAPER, *ONE_AXIS)}
        rows = [[label, *(f"{s * 1e3:.2f} ms" for s in each.values())] for label, each in results.items()]
        print(_table(["predicted", *next(iter(results.values()))], rows))
        return 0
    settings = (*LARGE, *PAPER) if options.machine == "tpu-v3" else LARGE
    if options.measure:
        md.host_devices(8)
    rows = []
    for setting in settings:
        results = predicted(setting, options.machine)
        (before, most), (after, least) = (results[mode] for mode in MODES)
        rows.append([
            setting.label, f"{before * 1e3:.2f} ms", f"{after * 1e3:.2f} ms", f"{before / after:.2f}x",
            f"{most / 1e6:,.0f} MB", f"{least / 1e6:,.0f} MB", setting.paper,
        ])  # fmt: skip
        print(f"{setting.label}: done", file=sys.stderr, flush=True)
    header = ["predicted", "replicated", "sharded", "faster", "peak, replicated", "peak, sharded", "the paper"]
    print(f"one training step on {options.machine}\n{_table(header, rows)}")
    if options.measure:
        rows = []
        for setting in SMALL:
            times = measured(setting, options.rounds)
            peaks = predicted(setting, options.machine)
            before, after = (times[mode] for mode in MODES)
            rows.append([
                setting.label, f"{before * 1e3:.1f} ms", f"{after * 1e3:.1f} ms", f"{before / after:.2f}x",
                *(f"{peaks[mode][1] / 1e6:,.2f} MB" for mode in MODES),
            ])  # fmt: skip
        header = ["measured, CPU time", "replicated", "sharded", "faster", "peak, replicated", "peak, sharded"]
        print(f"\none training step on eight CPU devices of this machine\n{_table(header, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
