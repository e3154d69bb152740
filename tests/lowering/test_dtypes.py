"""Every operation takes every dtype that JAX has under every layout, or refuses it with a typed error when traced.

Booleans, integers, complex numbers and wide floats give the undivided function's bits; narrow floats, whose sums round,
give it to a few roundings of the largest result.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from meshdsl.ir import Graph
from meshdsl.layouts import Layout, Mesh
from meshdsl.lowering.partition import partition
from tests.laws import SIZES, Row, rows, run
from tests.lowering.maker import Draw
from tests.lowering.programs import MESHES, draw_layout, tensors
from tests.lowering.run_law import CASES, alike, check, narrow

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint32", "int64", "float16", "bfloat16", "float64", "float8_e4m3fn",
    "float8_e5m2", "complex64", "complex128",
]  # fmt: skip
ROWS = [row for row in rows() if row.exact and any(not operand.dtype for operand in row.ins)]
LAYOUTS_PER_DTYPE = 1


def operands(row: Row, dtype: str) -> tuple[Graph, list[np.ndarray]]:
    """The traced row and small operands; raises the typed error of an operation that does not take the dtype."""
    graph = md.compile(row.call, "", "").graph(*row.types(SIZES, dtype))
    arrays = row.arrays(np.random.default_rng(list(row.name.encode())), SIZES, dtype=dtype)
    if narrow(dtype):
        arrays = [np.sign(x.astype(np.float32)).astype(x.dtype) if narrow(x.dtype) else x for x in arrays]
    return graph, arrays


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_dtype_is_right_or_refused(row: Row) -> None:
    rng, taken = Draw(row.name), Counter[str]()
    for dtype in DTYPES:
        try:
            graph, arrays = operands(row, dtype)
        except md.ShapeError:
            continue
        with np.errstate(all="ignore"):
            wanted = run(graph, arrays, backend.NumPy)
        found = 0
        while found < LAYOUTS_PER_DTYPE:
            mesh, rules = (mesh := rng.choice(MESHES)), draw_layout(rng, mesh, tensors(graph))
            try:
                program = partition(graph, Mesh(mesh), Layout(dict(rules)))
            except md.LayoutError:
                continue
            found += 1
            got = md.simulate(program, *arrays)
            wrong = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if not alike(a, b)]
            assert not wrong, f"results {wrong} differ: {row.name} of {dtype} on {mesh} under {rules}"
        taken[dtype] += 1
    assert taken["float64"] or taken["int64"]


@pytest.mark.parametrize("part", range(2))
def test_devices_give_the_results_of_the_simulator(part: int) -> None:
    cases = CASES[37 * part :: 151]  # 151 and the number of dtypes have no common factor
    found = [problem for row, dtype in cases for problem in check(row, dtype)]
    assert len(found) > len(cases) // 3
    assert set(found) <= {"", "XLA"}, [problem for problem in found if problem]


@pytest.mark.parametrize(
    ("f", "dtype", "text"),
    [
        (lambda x: md.max(x, "a"), "complex64", "md.max does not take complex64"),
        (lambda x: md.sort(x, "a"), "complex64", "md.sort does not take complex64"),
        (lambda x: md.top_k(x, "a", md.Dim("k", 2)), "complex64", "md.top_k does not take complex64"),
        (lambda x: x < x, "complex64", "md.less does not take complex64"),
        (lambda x: md.cast(x, "float32"), "complex64", "lose the imaginary part"),
        (lambda x: x - x, "bool", "md.subtract does not take bool; use md.cast"),
        (lambda x: md.put_add(x, md.iota("b:2"), x, "a"), "bool", "does not add booleans"),
        (
            lambda x: md.unflatten(x, "a", "b:2 c:2").at["b", md.iota("n:2"), "c", md.iota("n:2")].add(True),
            "bool",
            "does not add booleans",
        ),
        (lambda x: x**-2, "int32", "is not whole"),
    ],
)
def test_the_error_says_why(f: Any, dtype: str, text: str) -> None:
    with pytest.raises(md.ShapeError, match=text):
        md.compile(f, "", "").graph(md.spec("a:4", dtype))
