"""Starts JAX for `meshdsl train`, as a single process or as one of several."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import meshdsl as md

from ...errors import LayoutError, MeshdslError, UsageError
from .common import MOST_DEVICES


def check(options: argparse.Namespace, mesh: Any) -> None:
    """Raises `UsageError` if the device options do not fit together or do not fit the mesh. Does not start JAX."""
    process_options = (options.coordinator, options.processes, options.process)
    if any(part is None for part in process_options) and any(part is not None for part in process_options):
        raise UsageError("--coordinator, --processes and --process must be given together")
    if options.processes is not None and not 0 <= options.process < options.processes:
        raise UsageError(f"--process must be from 0 to {options.processes - 1}, got {options.process}")
    _check_given(options, mesh)
    count = options.devices
    if options.processes is not None and count is not None and (count % options.processes or count < mesh.size):
        raise UsageError(
            f"the mesh '{mesh}' needs {mesh.size} devices; --devices {count} cannot provide them with "
            f"{options.processes} processes\n  --devices is the total over all processes, divided equally among them"
        )
    if count is not None and count < mesh.size:
        raise UsageError(f"the mesh '{mesh}' needs {mesh.size} devices, and --devices gives {count}")


def _check_given(options: argparse.Namespace, mesh: Any) -> None:
    """Raises `UsageError` for processes on CPUs that have too few devices without --devices."""
    alone = os.environ.get("JAX_PLATFORMS") == "cpu" and "device_count" not in os.environ.get("XLA_FLAGS", "")
    if alone and options.devices is None and (options.processes or mesh.size) < mesh.size:
        raise UsageError(f"several processes on CPUs need --devices, in total over all: --devices {mesh.size}")


def start(options: argparse.Namespace, mesh: Any) -> None:
    """Start JAX as a single process or as one of several, with the requested number of CPU devices.

    Call `check` first. Raises `MeshdslError` if the processes cannot connect.
    """
    cluster = cluster_of(os.environ) if options.coordinator is None and options.cluster == "auto" else None
    if options.coordinator is None and cluster is None:
        _start_alone(options.devices, mesh)
        return
    import jax

    processes = options.processes if cluster is None else cluster.processes
    if options.devices is not None:
        _cpu_devices_of(options.devices, processes, mesh)
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM itself
    try:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)  # None: by the environment
    except (RuntimeError, ValueError) as error:
        where = f"at {options.coordinator}" if cluster is None else f"under {cluster.name}"
        way_out = "" if cluster is None else "\n  to run as a single process: --cluster none"
        raise MeshdslError(f"the processes could not connect {where}: {error}{way_out}") from None


def is_one_of_several() -> bool:
    """True once this process is connected to others of its run."""
    import sys

    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def host_of(coordinator: str | None) -> str | None:
    """The host of `--coordinator`, where process 0 runs; None without the option."""
    return None if coordinator is None else coordinator.rpartition(":")[0].strip("[]")


class Cluster(NamedTuple):
    """A job of several processes that the environment describes, and how many there are, if it says so."""

    name: str
    processes: int | None


def cluster_of(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that `jax.distributed.initialize()` finds by itself, if its job has several processes.

    >>> cluster_of({"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    Cluster(name='SLURM', processes=2)
    >>> cluster_of({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})  # the batch script itself, outside of srun

    JAX reads the rest, such as the address of process 0, from the same variables.
    """
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        return _cluster("SLURM", environment.get("SLURM_NTASKS"))
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return _cluster("Open MPI", environment.get("OMPI_COMM_WORLD_SIZE"))
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return Cluster("Kubernetes", None)
    return _tpu_pod(environment)


def _tpu_pod(environment: Mapping[str, str]) -> Cluster | None:
    """The hosts of a slice of TPUs, or of several slices; None for one host."""
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    slices = environment.get("MEGASCALE_NUM_SLICES", "1")
    if hosts and slices.isascii() and slices.isdigit():
        processes = len(hosts.split(",")) * int(slices)
        return Cluster("a TPU pod", processes) if processes > 1 else None
    return Cluster("a TPU pod", None) if "MEGASCALE_COORDINATOR_ADDRESS" in environment else None


def _cluster(name: str, count: str | None) -> Cluster | None:
    processes = int(count) if count is not None and count.isascii() and count.isdigit() else None
    return None if processes == 1 else Cluster(name, processes)


def _cpu_devices_of(devices: int, processes: int | None, mesh: Any) -> None:
    """Give each process its share of CPU devices. Raises `UsageError` if they cannot be divided."""
    import jax

    if processes is None or devices % processes or devices < mesh.size:
        among = f"{processes} processes" if processes else "an unknown number of processes"
        raise UsageError(f"--devices {devices} cannot be divided among {among} for the mesh '{mesh}'")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _start_alone(devices: int | None, mesh: Any) -> None:
    """Set the number of CPU devices before JAX starts; raises `LayoutError` if there are fewer devices than needed."""
    import jax

    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        md.host_devices(devices)
    elif mesh.size > 1:
        if getattr(jax.config, "jax_num_cpu_devices", -1) < mesh.size <= MOST_DEVICES:
            with contextlib.suppress(RuntimeError):  # JAX has already started
                jax.config.update("jax_num_cpu_devices", mesh.size)
        if jax.default_backend() != "cpu" and jax.device_count() < mesh.size:
            raise LayoutError(
                f"the mesh '{mesh}' needs {mesh.size} devices, and only {jax.device_count()} are available "
                f"({jax.default_backend()})\n  to try it on the CPU: --devices {mesh.size}"
            )
