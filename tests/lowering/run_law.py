"""The simulator and the devices give the same results, for every operation of every dtype that it takes.

Operands have whole numbers from the whole range of an integer dtype, so that sums and products wrap; floats have small
whole numbers. Integers and booleans agree bit for
bit, and so do complex numbers and wide floats of operations that are exact on whole numbers; other floats to a few
roundings of the largest result. A program that XLA fails to compile for CPUs is counted apart.

    python -m tests.lowering.run_law --layouts 2    # every row and dtype; the last line is JSON
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl.ir import While, walk
from meshdsl.layouts import Layout, Mesh
from meshdsl.lowering.partition import partition
from tests.laws import INDEX, SIZES, Row, rows
from tests.lowering.maker import Draw
from tests.lowering.programs import draw_layout, same_bits, tensors
from tests.lowering.test_layout_law import placed
from tests.stablehlo import cost_law

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
]  # fmt: skip
MESHES = ["x:2", "x:3", "x:4 y:2", "x:2 y:3"]
CASES = [
    (row, dtype) for row in rows(composed=None) if any(not operand.dtype for operand in row.ins) for dtype in DTYPES
]


def narrow(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < 4


def alike(got: np.ndarray, wanted: np.ndarray, exact: bool = True) -> bool:
    """Equal bits, apart from NaN's; to some roundings of the largest result where floats round."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if got.dtype.kind in "biu" or (exact and not narrow(got.dtype)):
        both = [np.where(x == x, x, 0) for x in (got, wanted)]  # NaN apart, for complex numbers too
        return same_bits(both[:1], both[1:]) and np.array_equal(got != got, wanted != wanted)
    a, b = (x.astype(np.result_type(x.dtype, "float32") if x.dtype.kind == "c" else "float64") for x in (got, wanted))
    size = float(np.max(np.abs(b), initial=1, where=np.isfinite(b)))
    return np.allclose(a, b, rtol=0, atol=8 * float(jnp.finfo(got.dtype).eps) * size, equal_nan=True)


def operands(row: Row, dtype: str) -> list[np.ndarray]:
    """Operands of the row in a dtype; raises the typed error of an operation that does not take it."""
    md.compile(row.call, "", "").graph(*row.types(SIZES, dtype))
    rng = np.random.default_rng(list(row.name.encode()))
    arrays = row.arrays(rng, SIZES, dtype=dtype)
    for k, (operand, x) in enumerate(zip(row.ins, arrays, strict=True)):
        if x.dtype == bool and operand.values == "nonzero":
            arrays[k] = np.ones_like(x)  # XLA computes 0 for False / False in some programs
        elif narrow(x.dtype):
            arrays[k] = np.sign(x.astype(np.float32)).astype(x.dtype)
        elif x.dtype.kind in "iu" and operand.values == "any" and operand.dtype != INDEX:
            limits = np.iinfo(x.dtype)
            arrays[k] = rng.integers(limits.min, limits.max, x.shape, x.dtype, endpoint=True)
    return arrays


def check(row: Row, dtype: str, layouts: int = 1) -> Iterator[str]:
    """For each random layout, the text of a difference, "XLA" or ""; nothing if the operation refuses the dtype."""
    try:
        arrays = operands(row, dtype)
    except md.ShapeError:
        return
    except ValueError:
        assert row.name == "map" and "complex" in dtype, row  # its function, `jnp.hypot`, takes no complex numbers
        return
    rng, found, types = Draw(f"{row.name} {dtype}"), 0, row.types(SIZES, dtype)
    graph = md.compile(row.call, "", "").graph(*types)
    exact = row.exact and dtype[0] in "fc"  # floats made of integers round
    while found < layouts:
        rules = draw_layout(rng, mesh := rng.choice(MESHES), tensors(graph))
        try:
            partition(graph, Mesh(mesh), Layout(dict(rules)))
        except md.LayoutError:
            continue
        found += 1
        step = md.compile(row.call, mesh, dict(rules))
        program = step.program(*types)
        if not any(isinstance(eqn.control, While) for eqn, _ in walk(program)):  # its trips are unknown to the program
            try:
                cost_law(program, step.lower(*types).as_text())
            except AssertionError as error:
                yield f"{row} {dtype} {mesh} {dict(rules)}: {error}"
                continue
        try:
            real = [x.numpy() for x in jax.tree_util.tree_leaves(step(*placed(program, arrays)))]
        except jax.errors.JaxRuntimeError as error:
            if "RET_CHECK" not in str(error):
                raise
            yield "XLA"
            continue
        pairs = list(zip(real, md.simulate(program, *arrays), strict=True))
        wrong = [k for k, (got, wanted) in enumerate(pairs) if not alike(got, wanted, exact)]
        yield f"{row} {dtype} {mesh} {dict(rules)}: results {wrong}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    start, counts = time.monotonic(), Counter[str]()
    for row, dtype in CASES:
        if options.only in f"{row} {dtype}":
            for problem in check(row, dtype, options.layouts):
                counts["wrong" if problem not in ("", "XLA") else problem or "right"] += 1
                if problem:
                    print(problem, flush=True)
    seconds = round(time.monotonic() - start)
    print(json.dumps({"law": "run", **{k: counts[k] for k in ("right", "wrong", "XLA")}, "seconds": seconds}))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
