"""Every operation on this computer's first device, beside NumPy: python -m tests.ops.on_device [I/N]

Values and gradients of the rows of tests/laws/, in float64 where the row takes it. Prints a JSON line with the rows
that are further than 1e-11 apart, and one for each that fails. With I/N, every N-th row from I: processes for other I
may run beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl import backend
from tests.laws import gradient, leaves, rows, run


def error(ours: Any, theirs: Any) -> float:
    """The norm of the difference over that of `theirs`, at least 1. Equal elements that are not finite do not count."""
    a, b = (np.asarray(x).astype(np.float64) for x in (ours, theirs))
    different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    return float(np.linalg.norm((a - b)[different]) / max(np.linalg.norm(b[np.isfinite(b)]), 1))


def lines(part: str) -> Iterator[dict[str, Any]]:
    first, of = (int(n) for n in part.split("/"))
    jax.config.update("jax_enable_x64", True)
    worst: dict[str, float] = {}
    for row in rows(composed=None)[first::of]:
        dtype = "float64" if "float32" in row.dtypes else row.dtypes[0]
        draw = np.random.default_rng(0)
        tensors = row.make(draw, dtype=dtype)
        try:
            graph = row.graph(dtype=dtype)
            joint = gradient(graph)[0] if row.differentiable else graph
            arrays = [np.asarray(x.numpy()) for x in tensors]
            cts = [draw.normal(size=[d.size for d in v.dims]).astype(v.dtype) for v in joint.ins[len(arrays) :]]
            want = run(joint, [*arrays, *cts], backend.NumPy)
            made = jax.jit(lambda *xs, graph=joint: run(graph, xs, backend.Jax))(*arrays, *cts)
            forward = leaves(md.compile(row.call, "one:1", "")(*tensors))
            pairs = [*zip(made, want, strict=True), *((x.numpy(), y) for x, y in zip(forward, want, strict=False))]
            worst[row.name] = max((error(x, y) for x, y in pairs), default=0.0)
        except Exception as problem:
            yield {"row": row.name, "error": f"{type(problem).__name__}: {problem}"[:600]}
    far = {name: each for name, each in worst.items() if not each < 1e-11}
    yield {"rows": len(worst), "bitwise": sum(each == 0 for each in worst.values()), "far": far}


if __name__ == "__main__":
    for line in lines(sys.argv[1] if len(sys.argv) > 1 else "0/1"):
        print(json.dumps(line), flush=True)
