"""The devices of `meshdsl train`: JAX is started as one of several processes, or alone, before anything asks it."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from ..errors import LayoutError, MeshdslError

__all__ = ["check", "start"]


def check(options: argparse.Namespace, mesh: Any) -> None:
    """Raises `UsageError` for options that do not go together, or not with the mesh. JAX need not run."""
    from ..train import UsageError

    several = (options.coordinator, options.processes, options.process)
    if any(part is None for part in several) and any(part is not None for part in several):
        raise UsageError("--coordinator, --processes and --process go together")
    if options.processes is not None and not 0 <= options.process < options.processes:
        raise UsageError(f"--process is from 0 to {options.processes - 1}, got {options.process}")
    count = options.devices
    if options.processes is not None and count is not None and (count % options.processes or count < mesh.size):
        raise UsageError(
            f"the mesh '{mesh}' has {mesh.size} places, and --devices {count} over {options.processes} "
            "processes does not give them: it is the number over all processes, the same on each"
        )
    if count is not None and count < mesh.size:
        raise UsageError(f"the mesh '{mesh}' has {mesh.size} places, and --devices gives {count}")


def start(options: argparse.Namespace, mesh: Any) -> None:
    """Start JAX: as one of several processes, or alone, with the CPU devices that are asked for; see `check`."""
    if options.coordinator is None:
        _alone(options.devices, mesh)
        return
    import jax

    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices // options.processes)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    except (RuntimeError, ValueError) as error:
        raise MeshdslError(f"the processes did not find each other at {options.coordinator}: {error}") from None


def _alone(devices: int | None, mesh: Any) -> None:
    """Fix how many CPU devices there are, before JAX looks."""
    import jax

    import meshdsl as md

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
