"""`meshdsl.backend.direct` traces to what `jax.numpy` traces to, for every dtype and rank; and `where`, `clip`,
`pad` and `rows`, whose `jax.numpy` is a function of its own in the program, have its values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.backend import direct

DTYPES = (
    "bool", "int8", "uint8", "int32", "uint32", "int64", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn",
    "complex64",
)  # fmt: skip
SHAPES = [((3, 5), (3, 5)), ((3, 1), (1, 5)), ((), ()), ((0, 5), (1, 5)), ((3, 5), (5,)), ((3, 5), ()), ((), (5,))]


def traced(function: Callable[..., Any], *specs: tuple[tuple[int, ...], str], **options: Any) -> str:
    """The jaxpr, or the kind of error."""
    try:
        return str(
            jax.make_jaxpr(partial(function, **options))(
                *(jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in specs)
            )
        )
    except (TypeError, ValueError) as error:
        return type(error).__name__


def beside(function: Callable[..., Any], constant: np.ndarray) -> Callable[[Any], Any]:
    return lambda x: function(x, constant)


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_functions_trace_as_in_jax(dtype: str) -> None:
    for name, function in direct.UNARY.items():
        assert traced(function, ((3, 5), dtype)) == traced(getattr(jnp, name), ((3, 5), dtype)), name
    for name, function in direct.BINARY.items():
        for x, y in SHAPES:
            expected = traced(getattr(jnp, name), (x, dtype), (y, dtype))
            assert traced(function, (x, dtype), (y, dtype)) == expected, (name, x, y)
    for name, function in direct.REDUCTIONS.items():
        for shape, axis in [((3, 5), (0,)), ((3, 5), (0, 1)), ((3, 5), ()), ((3, 5), (-1,)), ((0, 5), (0,))]:
            expected = traced(getattr(jnp, name), (shape, dtype), axis=axis)
            assert traced(function, (shape, dtype), axis=axis) == expected, (name, shape, axis)
    for shape in ([5, 3], [15], (3, -1), [3, 5], [1, 3, 5]):
        expected = traced(jnp.reshape, ((3, 5), dtype), shape=shape)
        assert traced(direct.reshape, ((3, 5), dtype), shape=shape) == expected, shape
    for source, destination in [(0, 1), (-1, 0), ([0], [0]), ([2, 0], range(2))]:
        axes = {"source": source, "destination": destination}
        expected = traced(jnp.moveaxis, ((3, 5, 2), dtype), **axes)
        assert traced(direct.moveaxis, ((3, 5, 2), dtype), **axes) == expected, axes


FORMULAS = (
    "ab,bc->ac", "ab,bc->ca", "ab,cb->ac", "zab,zcb->zca", "azb,zbc->acz", "ab,ab->ba", "ab,ab->", "a,b->ba", ",ab->ba",
    "ab,bc->a", "ab,b->a", "abc,dbc->da", "abcd,bd->ca", "ab,ac->abc", "ab->a", "ab,bc,cd->ad",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("summed", [None, "float32", "int32"])
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_products_trace_as_in_jax(dtype: str, summed: str | None) -> None:
    sizes = {"a": 2, "b": 3, "c": 4, "d": 5, "z": 6}
    wide = None if summed is None else np.dtype(summed)
    for formula in FORMULAS:
        shapes = [tuple(sizes[n] for n in names) for names in formula.partition("->")[0].split(",")]
        for dtypes in ([dtype] * 3, [dtype, "float32", dtype]):
            specs = list(zip(shapes, dtypes, strict=False))
            expected = traced(partial(jnp.einsum, formula), *specs, preferred_element_type=wide)
            assert traced(partial(direct.einsum, formula), *specs, dtype=wide) == expected, (formula, dtypes)
    ones = [((3, 1), dtype), ((2, 4), dtype)]  # an axis of size 1 fits any other
    assert traced(partial(direct.einsum, "ab,bc->ac"), *ones, dtype=wide) == traced(
        partial(jnp.einsum, "ab,bc->ac"), *ones, preferred_element_type=wide
    )


@pytest.mark.parametrize("mixed", ["float64", "int32"])
def test_direct_functions_promote_as_in_jax(mixed: str) -> None:
    for name, function in direct.BINARY.items():
        expected = traced(getattr(jnp, name), ((3,), "float32"), ((3,), mixed))
        assert traced(function, ((3,), "float32"), ((3,), mixed)) == expected, name
        for constant in (np.ones(3, np.float32), np.ones((), np.float32), np.ones((), mixed)):
            expected = traced(beside(getattr(jnp, name), constant), ((3,), "float32"))
            assert traced(beside(function, constant), ((3,), "float32")) == expected, (name, constant)
    assert str(jax.make_jaxpr(lambda x: direct.BINARY["add"](x, 1))(1.0)) == str(jax.make_jaxpr(lambda x: x + 1)(1.0))


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "complex64"])
def test_direct_where_pad_and_rows_have_the_values_of_jax(dtype: str) -> None:
    def array(shape: tuple[int, ...]) -> Any:
        return jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 7 - 2).astype(dtype)

    def results(where: Callable[..., Any], pad: Callable[..., Any], rows: Any, clip: Any) -> list[Any]:
        cases = [
            ((3, 5), (3, 5), (3, 5)),
            ((1, 5), (3, 1), (1, 1)),
            ((), (3, 5), (1, 5)),
            ((), (), ()),
            ((5,), (3, 5), ()),
            ((3, 1), (1, 5), ()),
            ((3, 5), (), ()),
            ((), (), (3, 5)),
        ]
        found = [where(array(c) == 1, array(x), -array(y) if dtype != "bool" else array(y)) for c, x, y in cases]
        found += [where(array((3, 5)) == 1, array((3, 5)), zero) for zero in (0, np.zeros((), dtype))]
        found += [where(jnp.arange(5), array((5,)), array((5,)))]
        numbers = [0, 1, np.float32(2.5), True] + [np.nan] * (dtype not in ("bool", "int8"))
        found += [pad(array((3, 5)), [(0, 2), (1, 0)], constant_values=number) for number in numbers]
        for index in (jnp.asarray([[2, 0], [1, 2]]), np.asarray([1]), jnp.asarray(2), jnp.zeros((0,), int)):
            found += [rows(x, index) for x in (array((3, 5)), array((3,)), array((3, 0)))]
        integers = [jnp.arange(-3, 6), jnp.arange(6, dtype=jnp.uint8)]
        return found + [clip(x, *limits) for limits in ((0, 3), (-1, 1), (2, 1)) for x in integers]

    def both() -> tuple[list[Any], list[Any]]:
        ours = results(direct.where, direct.pad, direct.rows, direct.clip)
        return ours, results(jnp.where, jnp.pad, lambda x, index: x[index], jnp.clip)

    ours, theirs = jax.jit(both)()
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype and np.asarray(mine).tobytes() == np.asarray(expected).tobytes()
