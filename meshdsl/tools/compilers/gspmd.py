"""GSPMD's program for a graph of ours, to compare its collectives, cycles and memory with our own program's."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ...ir import Graph
from ...layouts import Layout, Mesh
from ...lowering import Program
from ...lowering.emit import run_equations, shardings
from ...lowering.partition import partition
from ...lowering.unroll import unroll
from ...targets import target_of


def gspmd(graph: Graph, program: Program, donated: Sequence[int] = (), unrolled: bool = False) -> jax.stages.Compiled:
    """`jax.jit` of the unsplit graph's kernels, with our program's shardings of inputs and results.

    `donated` are the numbers of the inputs whose memory results may reuse. Loops are `lax.scan`, unless `unrolled`.
    """
    whole = partition(graph, Mesh(""), Layout(""))
    whole = unroll(whole, stores=False) if unrolled else whole
    mesh = program.mesh.bind()
    emission = target_of(mesh.devices.flat).emission
    function = jax.jit(
        lambda *xs: run_equations(whole, xs, emission),
        in_shardings=shardings(program.ins, mesh),
        out_shardings=shardings(program.outs, mesh),
        donate_argnums=tuple(donated),
    )
    return function.lower(*(jax.ShapeDtypeStruct([d.size for d in v.dims], v.dtype) for v in whole.ins)).compile()
