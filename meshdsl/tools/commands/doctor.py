"""`meshdsl doctor`: checks versions and devices against those that meshdsl is tested with.

`meshdsl doctor --profile`: measure the kernels of a workload's step, and keep their times in a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import meshdsl as md

from ...errors import MeshdslError, UsageError
from ...errors.installed import TESTED_JAX, check_jax
from .common import FAILURE, OK, answer, command, options_of, out_file, version, workload_options
from .costing import step_of, step_options
from .plans import knob_options, workload_and_plan


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "check versions and devices against those that meshdsl is tested with"
    parser = command(commands, "doctor", run, about, workload=False)
    option = options_of(parser)
    option(
        "--profile WORKLOAD",
        "measure the kernels of a workload's step on this computer's devices instead, and write the file that "
        "--profile of analyze, compare and explain reads",
    )
    measured: Any = parser.add_argument_group("with --profile")
    option = options_of(measured)
    option("--quick", "shorter measurements, in a third of the time")
    workload_options(measured)
    step_options(measured)
    knob_options(measured, several=("overlap",))
    option("--machine NAME", "the machine that overlap plans are made for")
    option(
        "--out FILE",
        "the profile; one of the same device and JAX version is extended (default profile.toml)",
        out_file,
        default=Path("profile.toml"),
    )


def run(options: argparse.Namespace) -> int:
    """Print versions, devices and problems, and return 1 if there are problems; or profile."""
    _check(options)
    if options.profile is not None:
        return profile(options)
    versions, problems = _examine()
    lines = [f"{key:<14}{value if isinstance(value, str) else ', '.join(value)}" for key, value in versions.items()]
    lines += [*(f"problem: {problem}" for problem in problems), "problems found" if problems else "no problems found"]
    answer(options, {"command": "doctor", **versions, "problems": problems, "ok": not problems}, "\n".join(lines))
    return FAILURE if problems else OK


def _check(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that have no effect without `--profile`."""
    names = ("quick", "layout", "mesh", "settings", "overlap", "machine", "forward")
    unused = [f"--{name}" for name in names if getattr(options, name)]
    if unused and options.profile is None:
        raise UsageError(f"{unused[0].replace('settings', 'set')} has no effect without --profile")


def _examine() -> tuple[dict[str, Any], list[str]]:
    """The installed versions and devices, and a list of problems."""
    import importlib.metadata  # imported here because it is slow, and `--help` imports this file
    import platform

    versions: dict[str, Any] = {
        "meshdsl": version(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    problems: list[str] = []
    for name in ("jax", "jaxlib", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
            problems.append(f"{name} is not installed; pip install {name}")
    versions["tested jax"] = TESTED_JAX
    with warnings.catch_warnings(record=True, action="always") as untested:
        try:
            check_jax.__wrapped__()
        except MeshdslError as error:
            problems.append(error.args[0])
    problems += [str(each.message) for each in untested]
    versions["cpu cores"] = str(os.cpu_count())
    try:
        import jax

        versions["devices"] = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    except Exception as error:  # a broken plugin may raise anything; report it
        problems.append(f"JAX finds no device: {type(error).__name__}: {error}")
    return versions, problems


def profile(options: argparse.Namespace) -> int:
    """Measure every kernel of the step, and of the step under each overlap plan; extend or write the profile.

    The file has every kernel that is measured, also where the command is stopped before the last one.
    """
    import jax

    from ...errors.files import write_text
    from ..compilers.profiler import QUICK, BenchPlan, measure

    options.workload, target = options.profile, options.out
    options.profile = None  # plans are made with the machine's own figures
    overlaps, options.overlap = options.overlap, None
    workload, plan = workload_and_plan(options)
    _devices(plan.mesh)
    merged = _existing(target, jax.devices()[0], jax.__version__)
    programs = list(_programs(options, workload, plan, overlaps))
    bench = QUICK if options.quick else BenchPlan()
    target.parent.mkdir(parents=True, exist_ok=True)
    for measured in measure(programs, bench, lambda text: print(text, file=sys.stderr, flush=True)):
        merged = measured if merged is None else merged.merged(measured)
        write_text(target, merged.to_toml())
    if merged is None:
        raise UsageError("no kernel of this step takes long enough to be measured; take larger sizes with --set")
    counts = {"forms": len(merged.kernels), "kernels": sum(map(len, merged.kernels.values()))}
    record = {"command": "doctor", "profile": str(target), "device": merged.device, **counts}
    answer(options, record, f"{merged}\nwritten to {target}")
    return OK


def _devices(mesh: Any) -> None:
    """On CPU, as many devices as the mesh has. Raises `UsageError` if JAX has fewer."""
    import jax

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
