"""A sort along a split dim is the stable sort of the undivided one, and sends no more than gathering would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts import Mesh
from meshdsl.lowering import Program
from tests.lowering.test_layout_law import placed
from tests.stablehlo import cost_law

SORTS: dict[str, Any] = {
    "sort": lambda x: [md.sort(x, "a")],
    "argsort": lambda x: [md.argsort(x, "a")],
    "both": lambda x: [md.sort(x, "a"), md.argsort(x, "a")],
}


def wanted(x: np.ndarray, name: str) -> list[np.ndarray]:
    index = np.argsort(x, 0, kind="stable")
    values = np.take_along_axis(x, index, 0)
    return {"sort": [values], "argsort": [index], "both": [values, index]}[name]


def rough(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Many ties, NaN, both zeros and both infinities."""
    x = rng.integers(-3, 4, shape).astype(dtype)
    if x.dtype.kind == "f":
        for value in (np.nan, -0.0, np.inf, -np.inf):
            x[rng.random(shape) < 0.15] = value
    return x


def sent(program: Program) -> int:
    return round(sum(record.wire_bytes * record.count for record in program.collectives))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("name", SORTS)
def test_every_size_is_sorted_stably(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for shape in ((1,), (n - 1,), (n,), (3 * n + 1,), (23,), (160,), (999,), (5, 2), (2 * n, n), (41, 8)):
        for dtype in ("float32", "int32"):
            x = rough(rng, shape, dtype)
            spec = md.spec(" ".join(f"{d}:{size}" for d, size in zip("ab", shape, strict=False)), dtype)
            program = md.compile(SORTS[name], f"x:{n}", "a:x").program(spec)
            for got, right in zip(md.simulate(program, x), wanted(x, name), strict=True):
                assert np.array_equal(got, right, equal_nan=True), (shape, dtype)
            assert sent(program) <= -(-shape[0] // n) * (n - 1) * int(np.prod(shape[1:])) * 4


@pytest.mark.parametrize("layout", ["a:x", "a:y,x", "a:x; b:y", "b:x"])
def test_devices_sort_as_the_simulation_does(layout: str) -> None:
    x = rough(np.random.default_rng(1), (403, 4))
    step = md.compile(SORTS["both"], "x:4 y:2", layout)
    spec = md.spec("a:403 b:4")
    program = step.program(spec)
    cost_law(program, step.lower(spec).as_text())
    for got, right in zip(step(*placed(program, [x])), wanted(x, "both"), strict=True):
        assert np.array_equal(got.numpy(), right, equal_nan=True)


def test_the_way_that_sends_fewer_bytes_is_taken() -> None:
    """Bytes that one device sends to sort 4,096 float32 beside another dim of `n`, and which collectives."""
    ways = {}
    for name in SORTS:
        for n in (2, 4):
            program = md.compile(SORTS[name], f"x:{n}", "a:x").program(md.spec(f"a:4096 b:{n}"))
            ways[name, n] = sent(program), " ".join(dict.fromkeys(record.kind for record in program.collectives))
    block = 4096 * 4
    assert ways == {
        ("sort", 2): (block, "all_to_all"),
        ("sort", 4): (block * 6 // 4, "all_to_all"),
        ("argsort", 2): (block, "all_to_all"),
        ("argsort", 4): (block * 6 // 4, "all_to_all"),
        ("both", 2): (block, "all_gather"),
        ("both", 4): (block * 9 // 4, "all_to_all"),
    }


def test_negative_nan_and_ties_keep_their_order() -> None:
    x = np.array([np.nan, 1, -np.nan, 0.0, -0.0, 1, -np.inf, np.copysign(np.nan, -1)], np.float32)
    for more in ((), (4,), (3,)):
        array = np.broadcast_to(x.reshape(8, *[1] * len(more)), (8, *more)).copy()
        spec = md.spec(" ".join(f"{d}:{n}" for d, n in zip("ab", array.shape, strict=False)))
        split, undivided = (md.compile(SORTS["both"], "x:4", layout) for layout in ("a:x", ""))
        found, wanted_results = (step(*placed(step.program(spec), [array])) for step in (split, undivided))
        for got, right in zip(found, wanted_results, strict=True):
            assert got.numpy().tobytes() == right.numpy().tobytes()


def test_the_cause_says_which_way() -> None:
    def causes(name: str, spec: str, n: int) -> list[str]:
        program = md.compile(SORTS[name], Mesh(f"x:{n}"), "a:x").program(md.spec(spec))
        return list(dict.fromkeys(str(record.cause) for record in program.collectives))

    assert causes("sort", "a:8", 2) == ["sort needs 'a' whole"]
    assert causes("both", "a:8 b:2", 2) == ["sort needs 'a' whole"]
    assert causes("sort", "a:8 b:4", 4) == ["sort needs 'a' whole, 'b' is cut instead", "and back"]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_second_derivatives_of_a_sort_along_a_split_dim(n: int) -> None:
    """Their indices and their elements may have one tuple of dims, which once gave both the same labels."""

    def product(x: md.Tensor) -> md.Tensor:
        pulled = lambda x: md.vjp(lambda x: md.sort(x, "a") * x, x)[1](md.sin(x))[0]  # noqa: E731 - short
        return md.jvp(md.grad(lambda x: md.sum(md.square(pulled(x)))), (x,), (md.sin(x),))[1]

    x = md.tensor(np.random.default_rng(n).normal(size=n), "a")
    program = md.compile(product, "x:8", "a:x").program(x)
    np.testing.assert_allclose(md.simulate(program, x)[0], product(x).numpy(), rtol=1e-12)
