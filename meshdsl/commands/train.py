"""`meshdsl train`: a workload on text that every Python carries."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from typing import Any

from ..errors import LayoutError
from .common import OK, command, count, placed, say, workload_options

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "train", run, "train a workload on text that every Python carries")
    workload_options(parser)
    parser.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help="run on N CPU devices (default: accelerators if there are any, otherwise as many as needed)",
    )
    parser.add_argument("--steps", type=count, default=100, metavar="N", help="steps to take (default 100)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="draws the parameters and the batches (default 0)"
    )
    parser.add_argument(
        "--eval-every",
        type=count,
        default=0,
        metavar="N",
        help="evaluate on held-out text every N steps, and always after the last (default: only then)",
    )
    parser.add_argument(
        "--eval-batches", type=count, default=8, metavar="N", help="batches of an evaluation; 0 for none (default 8)"
    )
    parser.add_argument(
        "--log-every",
        type=count,
        default=0,
        metavar="N",
        help="print every Nth step (default: 20 lines in all; every step with --json)",
    )


def run(options: argparse.Namespace) -> int:
    """Train, saying one line for each record."""
    workload, mesh, layout = placed(options)
    _start(options.devices, mesh)
    from ..train import Progress, train

    records = train(
        workload,
        mesh,
        layout,
        steps=options.steps,
        seed=options.seed,
        eval_every=options.eval_every,
        eval_batches=options.eval_batches,
    )
    every = options.log_every or (1 if options.json else max(1, options.steps // 20))
    progress = Progress(options.steps, "train")
    with progress:
        for record in records:
            if record["event"] == "step":
                progress.update(record["step"], f"loss {record['loss']:.4f}")
            if record["event"] == "step" and record["step"] % every and record["step"] not in (1, options.steps):
                continue
            progress.clear()
            if options.json:
                say({"command": "train", **record})
            else:
                print(_line(record), flush=True)
    return OK


def _start(devices: int | None, mesh: Any) -> None:
    """Fix how many CPU devices there are, before JAX looks."""
    import jax

    import meshdsl as md

    from ..train import UsageError

    if devices is not None and devices < mesh.size:
        raise UsageError(f"the mesh '{mesh}' has {mesh.size} places, and --devices gives {devices}")
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        md.host_devices(devices)
    elif mesh.size > 1:
        if getattr(jax.config, "jax_num_cpu_devices", -1) < mesh.size:
            with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices that it has
                jax.config.update("jax_num_cpu_devices", mesh.size)
        if jax.default_backend() != "cpu" and jax.device_count() < mesh.size:
            raise LayoutError(
                f"the mesh '{mesh}' needs {mesh.size} devices, and there are {jax.device_count()} "
                f"({jax.default_backend()})\n  to try it on the CPU: --devices {mesh.size}"
            )


def _line(record: Mapping[str, Any]) -> str:
    """What a person reads of one record."""
    if record["event"] == "step":
        return f"step {record['step']:>6}  loss {record['loss']:.4f}  {record['seconds'] * 1e3:.0f} ms"
    if record["event"] == "eval":
        bits = f", {record['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in record else ""
        return f"step {record['step']:>6}  held out: loss {record['loss']:.4f}{bits}"
    if record["event"] == "start":
        split = f"layout {record['layout']}" if record["layout"] else "nothing split"
        return (
            f"{record['workload']}: {record['parameters']:,} parameters on mesh {record['mesh']}, {split}\n"
            f"data: {_data(record['data'])}"
        )
    rate = f"; {record['bytes_per_second']:,.0f} bytes a second" if "bytes_per_second" in record else ""
    return f"{record['steps']} steps in {record['seconds']:.1f} s{rate}"


def _data(data: Mapping[str, Any]) -> str:
    if data["kind"] == "text":
        size, held_out = data["bytes"] / 1e6, sum(kind["bytes"] for kind in data["held_out"].values()) / 1e6
        return (
            f"{size:.2f} MB of English prose and Python source that this Python carries, {held_out:.2f} MB of it "
            f"held out (sha256 {data['sha256'][:16]})"
        )
    return "random numbers, since the batch is not text" if data["kind"] == "noise" else data["kind"]
