"""Roofline time of one kernel on one device, with an efficiency that depends on size.

    seconds = max(products / (peak x efficiency) + other FLOPs / vector rate, bytes / bandwidth) + launch

The peak is that of the operands' dtype. Where the host launches one operation at a time, a kernel takes at least
`machine.operation` for each of its operations.

`md.attention` takes the time of the kernel that a compilation for the machine chooses: a fused one reaches
`machine.fused_attention` of the peak; blockwise, whole blocks are computed, and scores pass through memory. In a mode
in which the plain formula is fused too (`machine.attention`), kernels that read or write scores move none of their
bytes, and 7/12 of the formula's products take the time of the fused kernel (see `attention.PLAIN`).

The lower bound is the same formula without launch and host, at full efficiency, with products and other FLOPs in
parallel. A kernel in the machine's profile takes its measured time instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir import Fuses, Op, Product
from ..lowering import Program
from ..ops.dtypes import CAST, CAST_PARTS
from .attention import PLAIN
from .fusion import Kernel
from .kernel_form import form_of, work_of
from .ledger import Ledger, Line
from .machine import Machine
from .profile import Coverage
from .scores import kind


@dataclass(frozen=True)
class Roofline:
    """Seconds of one kernel by resource; `weights` divides them among the kernel's lines."""

    products: float  # matrix units, at the efficiency for this size
    vector: float
    memory: float
    launch: float
    least: float  # lower bound: full efficiency, everything overlaps
    weights: tuple[float, ...]  # one per line; they sum to 1
    host: float = 0.0  # in which the host launches the kernel's operations, one at a time
    peak: str = ""  # the dtype whose peak the products are measured against; "" without products
    measured: float | None = None  # from the machine's profile
    source: str = "missing"  # "exact" or "interpolated" if measured

    @property
    def seconds(self) -> float:
        """The measured or estimated time."""
        if self.measured is not None:
            return self.measured
        return max(max(self.products + self.vector, self.memory) + self.launch, self.host)

    @property
    def bound(self) -> str:
        """The resource that limits the kernel: "compute", "memory" or "launch"."""
        compute = self.products + self.vector
        if max(self.launch, self.host - self.launch) > max(compute, self.memory):
            return "launch"
        return "compute" if compute >= self.memory else "memory"


def kernel_time(kernel: Kernel, lines: Sequence[Line], program: Program, machine: Machine) -> Roofline:
    """The time of one kernel: from the machine's profile if that has the kernel, otherwise its roofline."""
    estimate = roofline(lines, machine)
    if machine.profile is None:
        return estimate
    form = form_of(kernel, program)
    measured = machine.profile.seconds(form, work_of(lines))
    if measured is None:
        return estimate
    measured = max(measured, machine.launch, estimate.host)  # in the loop of a measurement, small kernels may have none
    source = "interpolated" if machine.profile.exact(form) is None else "exact"
    return replace(estimate, measured=measured, source=source, least=min(estimate.least, measured))


def coverage(ledger: Ledger, machine: Machine) -> Coverage:
    """The kernels of a program and their seconds, counted by the source of their times."""
    total = Coverage()
    for step in dict.fromkeys(line.step for line in ledger.lines):
        if isinstance(step, Kernel):
            lines = ledger.of(step)
            time = kernel_time(step, lines, ledger.program, machine)
            total.add(time.source, time.seconds * lines[0].trips)
    return total


def roofline(lines: Sequence[Line], machine: Machine) -> Roofline:
    """The time of one kernel, from the ledger lines that run in it."""
    if lines[0].kind == "host":
        seconds = machine.host_seconds(lines[0].hbm_bytes)
        return Roofline(0.0, 0.0, seconds, 0.0, seconds, (1.0,))
    products = vector = full = 0.0
    fused = is_fused(lines, machine)
    moved = [_moved(line, machine, fused) for line in lines]
    total_bytes = sum(moved)
    memory = machine.memory_seconds(total_bytes)
    alone: list[float] = []
    for line, size in zip(lines, moved, strict=True):
        computing = 0.0
        if line.kind in ("matmul", "conv"):
            computing, at_peak = _product_seconds(line, machine, fused)
            products += computing
            full += at_peak
        elif not fused or _multiplies(line):
            computing = _vector_seconds(line, machine)
            vector += computing
        alone.append(max(computing, memory * size / total_bytes if total_bytes else 0.0))
    total = sum(alone)
    weights = tuple(t / total for t in alone) if total else tuple(1 / len(lines) for _ in lines)
    least = max(full, vector, total_bytes / machine.hbm_bandwidth)
    host = machine.operation * sum(line.kind != "move" and not _converts_sum(line, lines) for line in lines)
    peak = next((line.dtype.name for line in lines if line.kind in ("matmul", "conv")), "")
    return Roofline(products, vector, memory, machine.launch, least, weights, host, peak)


def _converts_sum(line: Line, lines: Sequence[Line]) -> bool:
    """True for a cast of what a reduction of the kernel reads or makes: libraries convert inside the reduction."""
    if line.eqn.op is not CAST:
        return line.eqn.op is CAST_PARTS
    sums = [each.eqn for each in lines if kind(each.eqn) is Fuses.REDUCE]
    (x,), (y,) = line.eqn.ins, line.eqn.outs
    return any(y in eqn.ins or x in eqn.outs for eqn in sums)


def is_fused(lines: Sequence[Line], machine: Machine) -> bool:
    """True if these lines of one kernel are part of a fused attention kernel."""
    whole = [line.attention for line in lines if line.attention is not None]
    if whole:
        return all(work.is_fused(machine.target) for work in whole)
    return machine.attention > 0 and any(line.score_bytes for line in lines)


def _moved(line: Line, machine: Machine, fused: bool) -> float:
    """Bytes that a line reads and writes on this machine."""
    if line.attention is not None:
        return line.hbm_bytes + (0 if fused else line.attention.score_bytes)
    return line.hbm_bytes - line.score_bytes * fused


def peak_seconds(line: Line, machine: Machine, fused: bool) -> float:
    """Seconds of one product at the peak; a fused attention kernel computes a part of the plain formula's products."""
    part = PLAIN if fused and line.attention is None else 1.0
    flops = line.flops if line.attention is None or fused else line.attention.flops
    return part * flops / machine.peak_of(line.dtype)


def _product_seconds(line: Line, machine: Machine, fused: bool) -> tuple[float, float]:
    """Compute seconds of one product, whose sizes are padded to whole tiles; and its seconds at the peak."""
    at_peak = peak_seconds(line, machine, fused)
    if line.kind == "conv":
        return machine.conv_seconds(line.flops, line.dtype), at_peak
    reached = machine.attention or machine.fused_attention
    if fused and reached:
        return at_peak / reached, at_peak
    if line.attention is not None:
        return machine.matmul_seconds(line.flops if fused else line.attention.flops, line.dtype), at_peak
    sizes = line.matmul
    if sizes is None or not line.flops:  # an empty dim
        return machine.matmul_seconds(line.flops, line.dtype), at_peak
    m, n, k = machine.padded(sizes.m, sizes.n, sizes.k)
    return machine.matmul_seconds(line.flops * (m * n * k) / (sizes.m * sizes.n * sizes.k), line.dtype), at_peak


def _multiplies(line: Line) -> bool:
    """True for a product that sums over one element on this device, so that it is elementwise."""
    return isinstance(line.eqn.op, Op) and line.eqn.op.product is Product.MATMUL


def _vector_seconds(line: Line, machine: Machine) -> float:
    slow = machine.transcendental and isinstance(line.eqn.op, Op) and line.eqn.op.transcendental
    return line.flops / (machine.transcendental if slow else machine.vector)
