"""Compile a program with the TPU compiler (the extra `aot`), without a TPU, and read its memory and collectives.

The compiler runs in its own process, because it reads its environment before jax is imported, and because an unknown
topology aborts the process. All figures come from compilation; nothing is run or measured.

The compiler's `peak` is the memory that the device needs, and decides whether the program fits. In programs with loops
the sum argument + output + temp - alias exceeds the peak: such programs compile and fit even if that sum is well over
the device's memory.

Options of the TPU compiler for programs with an overlap plan: each planned collective runs beside its products.

Without them, the compiler makes most kinds synchronous and may start a collective after the products beside it. The
machine files list the kinds that are asynchronous with these options, in texts of libtpu 0.0.42.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from ...errors import LayoutError
from ...errors.installed import installs
from ...ir import Var, walk
from ...lowering import Program
from ...lowering.asynchrony import Start
from ...lowering.emit import emit, shardings
from ...targets.kernel_choice import with_kernels
from ...targets.tpu import TPU
from .compilation import Compilation, CompiledMemory, CompilerError, refused
from .diff import changes
from .hlo import estimated_cycles, performed
from .windows import CompiledWindow, compiled_windows

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the cloud for the TPU type
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
EFFORTS = {"": {}, "O1": {"xla_optimization_level": "EFFORT_O1"}}


def available() -> str:
    """The reason why this installation cannot compile for TPUs; "" if it can."""
    missing = [name for name in ("libtpu", "flatbuffers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed: {installs('aot')}" if missing else ""


def tpu_program(program: Program) -> Program:
    """The program as TPUs run it, with their kernels for attention."""
    return TPU.prepare(with_kernels(program, TPU))


def compile_for(
    topology: str,
    program: Program,
    *,
    donated: Collection[Var] = (),
    effort: str = "",
    slices: int = 1,
    timeout: float = 900,
) -> Compilation:
    """Compile a program for a topology such as "tpu:v5e:4x4" in a separate process; needs the extra `aot`.

    >>> import meshdsl as md
    >>> program = md.compile(md.exp, "rows:4", "batch:rows").program(md.spec("batch:4096 io:1024"))
    >>> try:
    ...     fits = md.compile_for("tpu:v5e:2x2", program, effort="O1").fits
    ... except md.CompilerError as error:  # here, only where the extra is missing
    ...     fits = "not installed" in str(error)
    >>> fits
    True

    `donated` are inputs whose buffers results may reuse. `effort` "O1" compiles several times faster and is within a
    few percent in memory; it does not overlap collectives, so it cannot keep an overlap plan. `slices` is the number of
    pods. `timeout` is in seconds. A program with an overlap plan is compiled with the options that its collectives
    need, and the result contains its `windows`. Raises `CompilerError` if the compiler is not installed, does not know
    the topology, takes longer or fails, or if it makes a planned collective synchronous; `LayoutError` if the
    topology's device count differs from the mesh's. A program that does not fit is not an error: the result has `fits`
    False.
    """
    platform, _, name = topology.partition(":")
    if platform != "tpu" or not name:
        raise CompilerError(f"a topology is written tpu:NAME:SIZES, for example tpu:v5e:4x4; got {topology!r}")
    if effort not in EFFORTS:
        raise CompilerError(f"there is no effort {effort!r}; there are: '' (the compiler's own) and 'O1' (faster)")
    if problem := available():
        raise CompilerError(f"{topology} needs the compiler for TPUs\n  {problem}")
    with tempfile.TemporaryDirectory(prefix="meshdsl-aot-") as scratch:
        directory = Path(scratch)
        program = tpu_program(program)
        started = {eqn.op.name for eqn, _ in walk(program) if isinstance(eqn.op, Start)}
        options = EFFORTS[effort] | plan_options(name.partition(":")[0], started)
        request = {
            "mesh": program.mesh.axes,
            "donated": [i for i, v in enumerate(program.ins) if v in donated],
            "x64": bool(jax.config.read("jax_enable_x64")),
            "platform": platform,
            "topology": name,
            "slices": slices,
            "options": options,
        }
        (directory / "request.json").write_text(json.dumps(request), encoding="utf-8")
        (directory / "program.bin").write_bytes(_exported(program))
        record = _run(directory, topology, timeout)
        if "order" not in record:
            raise LayoutError(
                f"{topology} has {record['devices']} devices, and the mesh '{program.mesh}' has {program.mesh.size}\n"
                "  give the mesh as many devices (v2, v3 and v4 count two cores for each chip), or another topology"
            )
        if "error" in record:
            return refused(topology, record)
        memory = CompiledMemory(**record["memory"])
        text = (directory / "compiled.txt").read_text(encoding="utf-8")
    collectives, found_windows = performed(text), compiled_windows(text, program)
    _check_windows(topology, found_windows)
    return Compilation(
        topology,
        record["devices"],
        record["order"],
        fits=True,
        needed=memory.peak,
        memory=memory,
        collectives=collectives,
        changes=changes(program, collectives),
        windows=found_windows,
        seconds=record["seconds"],
        cycles=estimated_cycles(text),
    )


def _check_windows(topology: str, windows: Sequence[CompiledWindow]) -> None:
    """Raise `CompilerError` if a collective that should run beside a product came back synchronous."""
    lost = [window for window in windows if window.planned and not window.asynchronous]
    if lost:
        listed = "".join(f"\n  {window}" for window in lost[:8])
        raise CompilerError(
            f"the compiler for {topology} made {len(lost)} of {len(windows)} planned collectives synchronous{listed}\n"
            "  the machine file that the plan was made with says which kinds run beside computation (`asynchronous`)"
        )


def _exported(program: Program) -> bytearray:
    mesh = program.mesh.abstract()
    shapes = [
        jax.ShapeDtypeStruct(program.stored_shape(v), v.dtype, sharding=sharding)
        for v, sharding in zip(program.ins, shardings(program.ins, mesh), strict=True)
    ]
    # no compatibility guarantee needed: the same JAX version reads it at once
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")]
    function = jax.jit(emit(program, mesh, TPU.emission), out_shardings=shardings(program.outs, mesh))
    return jax.export.export(function, platforms=["tpu"], disabled_checks=unchecked)(*shapes).serialize()


def _run(directory: Path, topology: str, timeout: float) -> dict[str, Any]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("aot_child.py")), str(directory)]
    try:
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompilerError(
            f"compiling for {topology} took longer than {timeout:g} s\n  allow more, or less effort: effort='O1'"
        ) from None
    result = directory / "result.json"
    if done.returncode or not result.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "rror" in line or "heck fail" in line), "".join(lines[-1:]))
        raise CompilerError(
            f"the compiler for {topology} ended with code {done.returncode}: {why.strip()[:500]}\n"
            "  topologies it knows are for example tpu:v5e:4x4, tpu:v6e:2x4, tpu:v5p:2x2x2, tpu:v4:2x2x1, tpu:v3:2x2"
        )
    return json.loads(result.read_text(encoding="utf-8"))


# The compiler starts a collective late once later kernels take as long as it. A plan has this decision already, so
# kernels count almost nothing: every start directly follows its fence.
LATENCIES = {f"xla_lhs_{kind}_fusion_latency_multiplier": "0.001" for kind in ("output", "loop")}
FUSED_GATHER = {"xla_enable_async_all_gather": "true", "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true"}


def _sparse_core(*kinds: str) -> dict[str, str]:
    """Collectives of these kinds on the sparse cores, small ones too."""
    enabled = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in kinds}
    sizes = {f"xla_tpu_sparse_core_{kind.removeprefix('nd_')}_offload_min_size_in_bytes": "0" for kind in kinds}
    return enabled | sizes


# generation -> kind -> options
ASYNCHRONOUS = {
    **{name: {"all_gather": FUSED_GATHER} for name in ("v2", "v3", "v4")},
    "v5p": {
        "all_gather": FUSED_GATHER,
        "all_reduce": _sparse_core("all_reduce"),
        "reduce_scatter": _sparse_core("all_reduce", "reduce_scatter", "nd_reduce_scatter"),
    },
    "v6e": {
        "all_gather": _sparse_core("all_gather"),
        # sparse cores cannot cast: the compiler would let a sum in float32 give the bfloat16 that its reader casts to
        "all_reduce": _sparse_core("all_reduce") | {"xla_jf_bf16_propagation": "false"},
        "reduce_scatter": _sparse_core("reduce_scatter"),
    },
}


def plan_options(generation: str, started: Iterable[str]) -> dict[str, str]:
    """The options for a plan that starts collectives of these kinds, on a generation such as "v5e"; {} for none.

    >>> sorted(set(plan_options("v5e", ["all_to_all"])) - set(plan_options("v5e", ["all_gather"])))
    ['xla_tpu_enable_async_all_to_all']
    """
    started = set(started)
    options = dict(LATENCIES) if started else {}
    for kind in sorted(started):
        options |= ASYNCHRONOUS.get(generation, {}).get(kind, {})
    return options | ({"xla_tpu_enable_async_all_to_all": "true"} if "all_to_all" in started else {})
