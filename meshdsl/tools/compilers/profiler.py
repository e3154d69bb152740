"""Measure the kernels of programs on the devices of this computer, for a `KernelProfile`.

A kernel is measured as the cost model launches it: its operations as one compiled function, on the block of one device,
in a loop on the device in which every trip depends on the one before. On CPU devices, which share the cores, all
devices of the mesh run the kernel at once, and seconds are the process's CPU time divided by its cores; on an idle
computer this equals wall time, and it does not grow when other processes compute. Elsewhere one device runs it, and
seconds are wall time.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (jax is only partly typed)

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ...cost.fusion import Kernel
from ...cost.kernel_form import form_of, work_of
from ...cost.ledger import ledger
from ...cost.profile import Form, KernelProfile, Point
from ...cost.scores import kind
from ...ir import Eqn, Fuses, Var, walk
from ...lowering.emit import run_equations
from ...lowering.program import Program
from ...targets import target_of

SHORTEST = 1e-8  # seconds; shorter runs are below the resolution of a loop, and are left out


@dataclass(frozen=True)
class BenchPlan:
    """How long one measurement takes."""

    seconds: float = 0.03  # CPU time of one measurement
    limit: float = 1.5  # wall time limit of one measurement, if others use the cores
    rounds: int = 3


QUICK = BenchPlan(0.01, 0.5, 2)


def measure(programs: Iterable[Program], plan: BenchPlan, say: Callable[[str], None]) -> Iterator[KernelProfile]:
    """The profile of each kernel of these programs that reads something, as soon as it is measured.

    `say` is called with a line of text before each kernel. Requires as many CPU devices as the mesh has, or any other
    device.
    """
    kernels: dict[Form, tuple[Kernel, Program, float]] = {}
    for program in programs:
        for kernel, work in _kernels(program):
            kernels.setdefault(form_of(kernel, program), (kernel, program, work))
    device = jax.devices()[0]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for number, (form, (kernel, program, work)) in enumerate(kernels.items(), 1):
        say(f"{number} of {len(kernels)}: {form.text[:100]} {form.sizes[:8]}")
        seconds = _per_trip(_loop(*_runnable(kernel, program), plan.rounds), plan)
        if seconds >= SHORTEST:
            points = {form.text: (Point(form.sizes, work, seconds),)}
            yield KernelProfile(device.device_kind, device.platform, jax.__version__, today, plan.rounds, points)


def _kernels(program: Program) -> Iterator[tuple[Kernel, float]]:
    """The kernels of a program that read something, with their work."""
    costs = ledger(program)
    for step in dict.fromkeys(line.step for line in costs.lines):
        if isinstance(step, Kernel) and step.reads:
            yield step, work_of(costs.of(step))


def _runnable(kernel: Kernel, program: Program) -> tuple[Program, tuple[Var, ...]]:
    """The program of one kernel, and the values that it reads. Views of values inside the kernel run inside it."""
    order = {eqn: i for i, (eqn, _) in enumerate(walk(program))}
    made_by = {v: eqn for eqn in order for v in eqn.outs}
    inside = {v for eqn in kernel.eqns for v in eqn.outs}
    eqns: list[Eqn] = []
    for eqn in sorted(kernel.eqns, key=order.__getitem__):
        for v in eqn.ins:
            _add_views(v, made_by, inside, eqns)
        eqns.append(eqn)
    reads = tuple(dict.fromkeys(v for eqn in eqns for v in eqn.ins if v not in inside))
    return program.replace(ins=reads, eqns=tuple(eqns), outs=kernel.writes), reads


def _add_views(v: Var, made_by: Mapping[Var, Eqn], inside: set[Var], eqns: list[Eqn]) -> bool:
    """True if a value depends on one inside a kernel through views; adds these views to the kernel's equations."""
    if v in inside:
        return True
    eqn = made_by.get(v)
    if eqn is None or kind(eqn) is not Fuses.VIEW or eqn.operation.effects:
        return False
    if not any(_add_views(x, made_by, inside, eqns) for x in eqn.ins):
        return False
    eqns.append(eqn)
    inside.update(eqn.outs)
    return True


def _loop(program: Program, reads: Sequence[Var], rounds: int) -> Callable[[int], float]:
    """A function from the number of runs of a program to their seconds, the median of several rounds."""
    on_cpu = jax.devices()[0].platform == "cpu"
    axes, emission = program.mesh.axes, target_of(jax.devices()).emission
    sizes = tuple(axes.values()) if on_cpu else (1,) * len(axes)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh, everywhere = jax.sharding.Mesh(devices, tuple(axes)), PartitionSpec()

    def on_device(trips: Any, *xs: Any) -> Any:
        def trip(_: Any, carry: Any) -> Any:
            # a trip's operands depend on the results before it, so that no compiler runs it once for all trips
            xs, _ = lax.optimization_barrier(carry)
            return xs, tuple(run_equations(program, xs, emission))

        outs = tuple(jnp.zeros(program.local_shape(v), v.dtype) for v in program.outs)
        return lax.fori_loop(0, trips, trip, (tuple(xs), outs))[1]

    replicated = NamedSharding(mesh, everywhere)
    specs = (everywhere,) * (1 + len(reads))
    f = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False))
    args = [jax.device_put(_values(program.local_shape(v), v.dtype), replicated) for v in reads]
    executable = f.lower(jnp.int32(0), *args).compile()
    return _median_of_runs(executable, args, replicated, rounds, on_cpu=on_cpu)


def _values(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Numbers near 1 with different bits, or small integers: times must not depend on subnormals or infinities."""
    numbers = jnp.arange(int(np.prod(shape)), dtype=jnp.int32) % 7
    return (numbers if dtype.kind in "iub" else 0.5 + numbers / 7).astype(dtype).reshape(shape)


def _per_trip(run: Callable[[int], float], plan: BenchPlan) -> float:
    """Seconds of one trip, from a function of the number of trips that returns their seconds and a constant."""
    deadline = time.perf_counter() + plan.limit
    start = run(0)
    trips, elapsed = 1, run(1)
    while elapsed - start < plan.seconds and trips < 2**14 and time.perf_counter() < deadline:
        each = max(elapsed - start, 1e-7) / trips
        trips = min(2**14, max(2 * trips, math.ceil(1.2 * plan.seconds / each)))
        elapsed = run(trips)
    return max(elapsed - start, 1e-9) / trips


def _median_of_runs(
    executable: Callable[..., Any], args: Sequence[Any], sharding: NamedSharding, rounds: int, *, on_cpu: bool = True
) -> Callable[[int], float]:
    """A function from a number of trips to the seconds of `executable(trips, *args)`, the median of several rounds.

    Of CPU devices, which share the cores, it is the process's CPU time divided by the cores; of others, wall time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    clock, share = (time.process_time, cores) if on_cpu else (time.perf_counter, 1)

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
