"""Functions that are compositions of other operations: values, gradients and layouts, without a compiled program."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from tests.laws import Row, gradient, leaves, rows, run
from tests.lowering.maker import Draw
from tests.lowering.test_layout_law import close, drawn, legal
from tests.ops.test_laws import rng, same

ROWS = rows(composed=True)
LOOPS = ("gamma", "beta", "dirichlet", "poisson", "t_student")  # programs that take a second to compile
EVERY = pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row.name in LOOPS)) for row in ROWS], ids=str
)
STEP = 1e-6


@EVERY
def test_a_composed_function_equals_its_reference_and_its_gradient_the_differences(row: Row) -> None:
    for dtype in row.dtypes:
        graph = row.graph(dtype=dtype)
        arrays = row.arrays(rng(row), dtype=dtype)
        assert row.reference is not None
        for y, reference in zip(run(graph, arrays, backend.NumPy), leaves(row.reference(*arrays)), strict=True):
            same(row, y, np.asarray(reference).astype(y.dtype))
    if not row.differentiable:
        return
    graph, draw = row.graph(dtype="float64"), rng(row)
    joint, want = gradient(graph)
    xs = row.arrays(draw, integer=False, dtype="float64")
    weights = [draw.normal(size=tuple(d.size for d in v.dims)) for v in graph.outs]
    slopes = run(joint, [*xs, *weights], backend.NumPy)[len(graph.outs) :]
    steps = {i: draw.normal(size=xs[i].shape) for i in want}

    def loss(sign: int) -> float:
        moved = [x + sign * STEP * steps[i] if i in steps else x for i, x in enumerate(xs)]
        return sum(float(np.sum(y * w)) for y, w in zip(run(graph, moved, backend.NumPy), weights, strict=True))

    ours = sum(float(np.sum(slope * steps[i])) for i, slope in zip(want, slopes, strict=True))
    assert ours == pytest.approx((loss(1) - loss(-1)) / (2 * STEP), rel=1e-6, abs=1e-7)


@EVERY
def test_a_composed_function_gives_the_same_under_layouts(row: Row) -> None:
    case = drawn(row, Draw(row.name), rng(row), "" if row.exact else "float64")
    with np.errstate(all="ignore"):
        wanted = run(case.graph, case.arrays, backend.NumPy)
    for mesh, layout, program in islice(legal(Draw(row.name), case.graph, Counter()), 2):
        got = md.simulate(program, *case.arrays)
        wrong = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if not close(row, a, b)]
        assert not wrong, f"results {wrong} differ: {case} on {mesh} under {layout}"


def test_every_public_index_is_checked() -> None:
    x = md.tensor([[1.0, 2.0], [3.0, 4.0]], "a b")
    assert x.size("b") == x.dims["b"].size == 2
    for wrong in (lambda: x["a", 2], lambda: x["c", 0], lambda: x["a", 0, "a", 1], lambda: x["a", x > 1], lambda: x[0]):
        with pytest.raises(md.MeshdslError):
            wrong()
