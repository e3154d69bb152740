"""Right programs: training steps that meshdsl emits, under random layouts and plans, and what `md.verify_jax` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType

import meshdsl as md
from meshdsl import backend
from meshdsl.jax_functions.foreign import JaxReport
from meshdsl.lowering.emit import emit
from tests.compile.steps import arguments, leaves
from tests.compile.steps_law import Case, _graph, cases, compiled
from tests.laws import run


def reports(seed: int, count: int) -> Iterator[tuple[Case, JaxReport]]:
    """`count` random steps as programs of `jax.shard_map`, without padding, and their reports."""
    found = 0
    for own in cases(seed, 10 * count, 0):
        for case in own:
            params, state, batches = arguments(case.model)
            try:
                program = compiled(case).program(params, state, batches[0])
            except md.MeshdslError:
                continue
            if program.collectives and not any(program.is_padded(v, d) for v in program.ins for d in v.dims):
                names, sizes = zip(*program.mesh.axes.items(), strict=True)
                mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
                graph, arrays = _graph(case.model), list(map(np.asarray, leaves((params, state, batches[0]))))

                def reference(*xs: Any, graph: Any = graph) -> Any:
                    return run(graph, list(xs), backend.Jax)

                yield case, md.verify_jax(emit(program, mesh), *arrays, reference=reference)
                found += 1
            break
        if found == count:
            return


if __name__ == "__main__":
    import sys

    import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests

    for n, (case, report) in enumerate(reports(int(sys.argv[1]), int(sys.argv[2]))):
        print(n, "right" if report.ok else (case, report), flush=True)
