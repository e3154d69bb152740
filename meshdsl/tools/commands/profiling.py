"""`meshdsl doctor --profile`: measure the kernels of a workload's step, and keep their times in a file."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .common import OK, print_json
from .costing import step_of
from .plans import workload_and_plan

__all__ = ["profile"]


def profile(options: argparse.Namespace) -> int:
    """Measure every kernel of the step, and of the step under each overlap plan; extend or write the profile."""
    import jax

    from ...cost.report.files import write_text
    from ..compilers.bench import QUICK, BenchPlan
    from ..compilers.profiler import measure

    options.workload, target = options.profile, Path(options.out)
    options.profile = None  # plans are made with the machine's own figures
    overlaps, options.overlap = options.overlap, None
    workload, plan = workload_and_plan(options)
    _devices(plan.mesh)
    before = _existing(target, jax.devices()[0], jax.__version__)
    programs = list(_programs(options, workload, plan, overlaps))
    measured = measure(
        programs, QUICK if options.quick else BenchPlan(), lambda text: print(text, file=sys.stderr, flush=True)
    )
    merged = measured if before is None else before.merged(measured)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, merged.to_toml())
    if options.json:
        print_json({"command": "doctor", "profile": str(target), "device": merged.device, "forms": len(merged.kernels),
                    "kernels": sum(map(len, merged.kernels.values()))})  # fmt: skip
    else:
        print(f"{merged}\nwritten to {target}")
    return OK


def _devices(mesh: Any) -> None:
    """On CPU, as many devices as the mesh has. Raises `UsageError` if JAX has fewer."""
    import jax

    import meshdsl as md

    from ...train import UsageError

    if mesh.size > 1:
        md.host_devices(mesh.size)  # has no effect on other devices
    if jax.devices()[0].platform == "cpu" and len(jax.devices()) < mesh.size:
        raise UsageError(
            f"the mesh has {mesh.size} devices; JAX has {len(jax.devices())} CPU devices, which measure at once\n"
            f"  set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
        )


def _existing(target: Path, device: Any, version: str) -> Any:
    """The profile that the file has, or None; raises `UsageError` if it is of another device or JAX version."""
    from ...cost.machine import MachineError
    from ...cost.profile import load_profile
    from ...train import UsageError

    if not target.exists():
        return None
    try:
        before = load_profile(target)
    except MachineError as error:
        raise UsageError(f"{error}\n  or give another file with --out") from None
    if (before.device, before.jax) != (device.device_kind, version):
        raise UsageError(
            f"{target} was measured on {before.device} with JAX {before.jax}; here are {device.device_kind} and JAX "
            f"{version}\n  give another file with --out"
        )
    return dataclasses.replace(before, file=str(target))


def _programs(options: argparse.Namespace, workload: Any, plan: Any, overlaps: Sequence[str]) -> Iterator[Any]:
    """The program of the step, and its programs under the overlap plans of the options."""
    for overlap in dict.fromkeys(("none", *overlaps)):
        compiled, arguments = step_of(options, workload, plan.replace(overlap=overlap))
        yield compiled.program(*arguments)
