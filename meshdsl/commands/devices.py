"""Starts JAX for `meshdsl train`, as a single process or as one of several."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from ..errors import LayoutError, MeshdslError

__all__ = ["check", "start"]


def check(options: argparse.Namespace, mesh: Any) -> None:
    """Raises `UsageError` if the device options do not fit together or do not fit the mesh. Does not start JAX."""
    from ..train import UsageError

    process_options = (options.coordinator, options.processes, options.process)
    if any(part is None for part in process_options) and any(part is not None for part in process_options):
        raise UsageError("--coordinator, --processes and --process must be given together")
    if options.processes is not None and not 0 <= options.process < options.processes:
        raise UsageError(f"--process must be from 0 to {options.processes - 1}, got {options.process}")
    count = options.devices
    if options.processes is not None and count is not None and (count % options.processes or count < mesh.size):
        raise UsageError(
            f"the mesh '{mesh}' needs {mesh.size} devices; --devices {count} cannot provide them with "
            f"{options.processes} processes\n  --devices is the total over all processes, divided equally among them"
        )
    if count is not None and count < mesh.size:
        raise UsageError(f"the mesh '{mesh}' needs {mesh.size} devices, and --devices gives {count}")


def start(options: argparse.Namespace, mesh: Any) -> None:
    """Start JAX as a single process or as one of several, with the requested number of CPU devices.

    Call `check` first. Raises `MeshdslError` if the processes cannot connect.
    """
    if options.coordinator is None:
        _start_alone(options.devices, mesh)
        return
    import jax

    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices // options.processes)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM itself
    try:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    except (RuntimeError, ValueError) as error:
        raise MeshdslError(f"the processes could not connect at {options.coordinator}: {error}") from None


def _start_alone(devices: int | None, mesh: Any) -> None:
    """Set the number of CPU devices before JAX starts; raises `LayoutError` if there are fewer devices than needed."""
    import jax

    import meshdsl as md

    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        md.host_devices(devices)
    elif mesh.size > 1:
        if getattr(jax.config, "jax_num_cpu_devices", -1) < mesh.size:
            with contextlib.suppress(RuntimeError):  # JAX has already started
                jax.config.update("jax_num_cpu_devices", mesh.size)
        if jax.default_backend() != "cpu" and jax.device_count() < mesh.size:
            raise LayoutError(
                f"the mesh '{mesh}' needs {mesh.size} devices, and only {jax.device_count()} are available "
                f"({jax.default_backend()})\n  to try it on the CPU: --devices {mesh.size}"
            )
