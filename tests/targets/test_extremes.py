"""On TPUs, the index of an extreme along a whole dim is one reduction, with the bits of two; also in loops."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.targets.tpu.extremes import one_reduction
from tests.lowering.programs import same_bits

X = np.array([[1, 3, 3, np.nan], [2, -0.0, 0.0, -1], [0, 0, 0, 0], [5, 1, np.inf, np.inf]], np.float32)


@pytest.mark.parametrize("f", [md.argmax, md.argmin])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_one_reduction_has_the_bits_of_two(f: Any, dtype: str) -> None:
    x = np.asarray(jnp.asarray(np.nan_to_num(X, posinf=9) if dtype == "int32" else X, dtype))

    def looped(x: md.Tensor) -> md.Tensor:
        return md.scan(lambda carry, row: (carry, f(row, "a")), md.tensor(0.0), x, over="b")[1]

    for g, layout in ((lambda x: f(x, "a"), "b:rows"), (looped, "b:rows"), (lambda x: f(x, "a"), "a:rows")):
        program = md.compile(g, "rows:2", layout).program(md.spec("b:4 a:4", dtype))
        new = one_reduction(program)
        assert ("index_of_extreme" in str(new)) is (layout == "b:rows") is (new is not program)
        wanted = getattr(np, f.__name__)(x.astype(np.float32), 1).astype(np.int32)
        assert same_bits(md.simulate(new, x), [wanted]) and same_bits(md.simulate(program, x), [wanted])
