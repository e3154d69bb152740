"""`md.verify_jax` counts the same bytes in emitted programs as the programs state."""

from __future__ import annotations

from collections import Counter

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import meshdsl as md
from meshdsl.jax_functions.foreign.collectives import groups
from meshdsl.jax_functions.foreign.price import collectives
from meshdsl.jax_functions.foreign.trace import trace
from meshdsl.lowering.emit import emit
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm
from meshdsl.tools.compilers.stablehlo import stated

CASES = [(mlp, name) for name in mlp.layouts] + [(lm.replace(layers=2), name) for name in ("data", "model")]


@pytest.mark.parametrize(("workload", "name"), CASES, ids=[f"{w.name}-{name}" for w, name in CASES])
def test_what_is_sent_is_what_the_program_states(workload: md.Workload, name: str) -> None:
    mesh, layout = workload.layouts[name]
    program = md.compile(workload.train_step(), mesh, layout).program(*workload.specs())
    names, sizes = zip(*program.mesh.axes.items(), strict=True)
    on = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    arrays = [jax.ShapeDtypeStruct(program.stored_shape(v), v.dtype) for v in program.ins]
    found: Counter[object] = Counter()
    for one in collectives(trace(emit(program, on), arrays).jaxpr):
        members = tuple(sorted(tuple(map(int, row)) for row in groups(one.mesh, one.axes)))
        found[one.kind, one.dtype, one.bytes, () if one.kind == "permute" else members] += one.trips
    wanted: Counter[object] = Counter()
    for one, n in stated(program).items():
        if len(one.groups[0]) > 1:
            wanted[one.kind, one.dtype, one.bytes, () if one.kind == "permute" else one.groups] += n
    assert found == wanted
