"""A sample of the law of constants, and the key by which caches and passes compare constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import exact
from tests.lowering.constant_law import check


@dataclass(frozen=True)
class Options:
    slope: Any


TWINS = [0.0, -0.0, 0, False, 1, 1.0, True, 1 + 0j, np.float32(0), np.float64(0), np.int8(0), np.float32(-0.0)]
TWINS += [complex(0.0, -0.0), complex(0.0, 0.0), float("nan"), -float("nan"), np.zeros(1), np.zeros(1, "f4"), "0", None]


@pytest.mark.usefixtures("at_once_in_jax")
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_a_constant_keeps_its_bits_in_every_place(dtype: str) -> None:
    wrong = [problem for problem in check(dtype, ["a:p; b:q"], most=2, at_once=["pad"]) if problem]
    assert not wrong


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x, 1), Options, lambda x: {"x": [x]}], ids=["plain", "tuple", "record", "dict"]
)
def test_keys_of_constants_differ_in_type_and_bits(wrap: Any) -> None:
    assert len({exact(wrap(x)) for x in TWINS}) == len(TWINS)
    assert [exact(wrap(x)) for x in TWINS] == [exact(wrap(x)) for x in TWINS]


def test_dims_of_a_tensor_have_the_key_of_their_tuple() -> None:
    dims = md.spec("a:2 b:3").dims
    assert exact(dims) == exact(tuple(dims)) and hash(exact((dims,))) == hash(exact((tuple(dims),)))


@pytest.mark.usefixtures("at_once_in_jax")
def test_static_arguments_share_a_program_if_their_bits_are_equal() -> None:
    traced: list[Any] = []

    def f(x: Any, c: Any) -> Any:
        traced.append(c)
        return x / c.slope if isinstance(c, Options) else md.where(x > 1, x, c)

    compiled, x = md.compile(f, "p:2", "a:p", static="c"), md.tensor(np.array([1, 2, 3], "f4"), "a")
    for one, other in ((Options(0.0), Options(-0.0)), (0.0, -0.0), (True, 1), (1, 1.0), (float("nan"),) * 2):
        for c in (one, other, one):
            assert compiled(x, c=c).numpy().tobytes() == f(x, c).numpy().tobytes()
    assert (
        len(traced) == 5 * 3 + 8
    )  # at once, and one trace for each constant: two pairs have a 1, and one is the same NaN twice


def test_sums_over_a_loop_keep_the_sign_of_zero() -> None:
    rows, start = md.tensor(np.full((3, 4), -0.0, "f4"), "n a"), md.tensor(np.array([-0.0, 0.0, -0.0, 1], "f4"), "a")

    def total(rows: Any, start: Any) -> Any:
        firsts = (start, start * 0, -start * 0)
        return [md.scan(lambda s, x: (s + x, None), first, rows, over="n")[0] for first in firsts]

    compiled = md.compile(total, "p:2", "a:p")
    wanted = total(rows, start)
    for got in ([x.numpy() for x in compiled(rows, start)], md.simulate(compiled.program(rows, start), rows, start)):
        assert [x.tobytes() for x in got] == [x.numpy().tobytes() for x in wanted]


@pytest.mark.usefixtures("at_once_in_jax")
def test_a_number_beyond_the_range_of_its_dtype_is_infinite() -> None:  # and NumPy warns of nothing
    def f(x: Any) -> Any:
        return [md.sum(x, "b") * 1e6, md.pad(x, "a", 0, 1, -1e6), md.cast(md.full("a:2", 1e6, x.dtype), "float32")]

    x = md.tensor(np.ones((3, 2), "f2"), "a b")
    compiled = md.compile(f, "p:2", "b:p")
    for got in ([y.numpy() for y in compiled(x)], md.simulate(compiled.program(x), x), [y.numpy() for y in f(x)]):
        assert [float(np.abs(y).max()) for y in got] == [np.inf, np.inf, np.inf]
