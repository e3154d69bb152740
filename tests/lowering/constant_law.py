"""The law of constants: a result has the bits of the constant that was written, whatever else was computed before.

The constants of a family are equal to Python, or nearly: zeros of both signs, NaN of either sign and several payloads,
`True`, `1` and `1.0` of several types, subnormal numbers, the limits of a dtype. One program puts all of them, in every
place that takes a constant, side by side into results: a pass that takes one for another shows. The same calls run at
once, in both orders, with cold caches. Programs run and are simulated under several layouts.

    python -m tests.lowering.constant_law [DTYPE ...]    # every dtype, layout and family; the last line is JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl import backend
from meshdsl.trace import Tensor, eager
from tests.laws import run

DTYPES = [
    "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "int8", "uint8", "int16",
    "uint16", "int32", "uint32", "int64", "uint64", "bool",
]  # fmt: skip
LAYOUTS = ["", "a:p", "b:p; a:q", "a:p,q"]
Place = Callable[..., Any]  # (x, mask, constant) -> the result


def bits(dtype: str, *words: int) -> list[Any]:
    """The numbers with these bits."""
    kind = np.dtype(jnp.dtype(dtype))
    return list(np.array(words, f"u{kind.itemsize}").view(kind))


def families(dtype: str) -> dict[str, list[Any]]:
    """Constants that differ in type or bits only, or at the ends of a dtype's range, by the name of the family."""
    kind = np.dtype(jnp.dtype(dtype))
    if kind.kind == "b":
        return {"truths": [True, False, np.True_, np.False_]}
    ones: list[Any] = [True, 1, np.True_, kind.type(1)]
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return {"ones": [*ones, 0, False], "limits": [limits.min, limits.max, kind.type(limits.max), limits.max // 2]}
    found = {"ones": [*ones, 1.0], "zeros": [0.0, -0.0, 0, False, kind.type(-0.0), kind.type(0.0)]}
    if kind.kind == "c":
        return {**found, "parts": [complex(x, y) for x in (0.0, -0.0) for y in (0.0, -0.0)]}
    limits = jnp.finfo(kind)
    sign, most, payload = 1 << limits.bits - 1, (1 << limits.bits - 1) - 1, (1 << limits.nmant) - 1
    quiet = most ^ payload >> 1  # the exponent's bits and the first of the mantissa
    nans = [most] if dtype == "float8_e4m3fn" else [most, quiet, quiet | payload >> 2, most ^ payload ^ 1]
    return {
        **found,
        "nans": [float("nan"), *bits(dtype, *nans, *(sign | n for n in nans)), -float("nan")],
        "subnormals": bits(dtype, 1, sign | 1, payload, 0, sign, payload + 1),
        "limits": [limits.max, limits.tiny, limits.min, -limits.tiny, limits.eps, float("inf"), -float("inf")],
    }


def written(constant: Any, dtype: str) -> np.ndarray:
    """The array of one constant: the same bits if it has the dtype already."""
    with np.errstate(all="ignore"):
        return np.asarray(constant).astype(np.dtype(jnp.dtype(dtype)))


def _scan(x: Tensor, mask: Tensor, c: Any) -> Any:
    """A constant as the first carry of a loop, and one inside its body."""
    start = md.full(x.dims[1:], c, x.dtype)
    return md.scan(
        lambda carry, rows: (carry, [md.where(rows[1], rows[0], carry), md.where(rows[1], c, rows[0])]),
        start, [x, mask], over="a",
    )  # fmt: skip


def _while(x: Tensor, mask: Tensor, c: Any) -> Any:
    first = (md.tensor(0), x, md.full(x.dims, c, x.dtype))
    return md.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[2], md.where(mask, c, s[1])), first)[1:]


PLACES: dict[str, Place] = {
    "full": lambda x, mask, c: [md.full(x.dims, c, x.dtype), md.full((), c, x.dtype)],
    "tensor": lambda x, mask, c: md.where(mask, x, md.tensor(np.full(x.shape, written(c, x.dtype.name)), x.dims)),
    "where": lambda x, mask, c: [md.where(mask, x, c), md.where(mask, c, x)],
    "pad": lambda x, mask, c: [md.pad(x, "a", 1, 2, c), md.pad(x, "b", 1, 0, c), md.pad(x, "a", 0, 0, c, inner=1)],
    "shift": lambda x, mask, c: [md.shift(x, "a", 2, c), md.shift(x, "b", -1, c)],
    "joined": lambda x, mask, c: [md.concat([x, md.full(x.dims, c, x.dtype)], "a"), md.stack([x, x * 0 + x], "s")],
    "update": lambda x, mask, c: md.dynamic_update_slice(x, md.full((("a:2"), x.dims[1]), c, x.dtype), "a", 1),
    "branches": lambda x, mask, c: [
        md.cond(md.any(mask), lambda x: md.full(x.dims, c, x.dtype), lambda x: x, x),
        md.switch(md.tensor(1), [lambda x: x, lambda x: md.where(mask, x, c)], x),
    ],
    "scan": _scan,
    "while": _while,
    "map": lambda x, mask, c: md.map(lambda x, mask: jnp.where(mask, x, written(c, x.dtype.name)), x, mask),
    "moved": lambda x, mask, c: md.transpose(md.roll(md.reverse(md.where(mask, x, c), "a"), "b", 1), "b a"),
}
PENDING: dict[str, Place] = {  # a constant beside a sum over a split dim, which may still be pending there
    "where_sum": lambda x, mask, c: md.where(md.any(mask, "a"), md.sum(x, "a"), c),
    "pad_sum": lambda x, mask, c: md.pad(md.sum(x, "a"), "b", 1, 1, c),
    "concat_sum": lambda x, mask, c: md.concat([md.sum(x, "a"), md.full(x.dims[1:], c, x.dtype)], "b"),
}
SENTINEL = 3  # not among the other values of a result


def operands(dtype: str) -> list[Tensor]:
    """A tensor without a value that is a constant of the law, and a mask."""
    kind = np.dtype(jnp.dtype(dtype))
    x = np.full((5, 4), kind.kind != "b").astype(kind)
    mask = np.random.default_rng(7).integers(0, 2, x.shape).astype(bool)
    return [md.tensor(x, "a b"), md.tensor(mask, "a b")]


def places(dtype: str) -> dict[str, Place]:
    return PLACES if dtype == "bool" else {**PLACES, **PENDING}


def leaves(result: Any) -> list[np.ndarray]:
    return [x.numpy() for x in jax.tree_util.tree_leaves(result)]


def alike(got: np.ndarray, wanted: np.ndarray) -> bool:
    """True for the same bits. XLA computes some moves of narrow floats in float32, and keeps NaN but not its bits.

    Its optimized programs read subnormal numbers of bfloat16 as zeros there: `jnp.full` of one is full of zeros.
    """
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    if jnp.issubdtype(got.dtype, jnp.floating) and got.dtype.itemsize < 4:
        nan = np.asarray(np.nan, got.dtype)
        got, wanted = (np.where(np.isnan(x), nan, x) for x in (got, wanted))
    if got.dtype.name == "bfloat16":
        tiny = jnp.finfo(got.dtype).tiny
        got, wanted = (np.where(np.abs(x) < tiny, np.copysign(np.zeros_like(x), x), x) for x in (got, wanted))
    return got.tobytes() == wanted.tobytes()


def expected(place: Place, dtype: str, constants: Sequence[Any]) -> list[list[np.ndarray]]:
    """For each constant, the results with its bits: those of another number, with the constant in its place."""
    args = operands(dtype)
    graph = md.compile(lambda *xs: place(*xs, dtype == "bool" or SENTINEL), "", "").graph(*args)
    with np.errstate(all="ignore"):
        known = run(graph, [x.numpy() for x in args], backend.NumPy)
    other = [x if dtype == "bool" else x == np.asarray(SENTINEL).astype(x.dtype) for x in known]
    return [[np.where(at, written(c, dtype), x) for at, x in zip(other, known, strict=True)] for c in constants]


def check(
    dtype: str, layouts: Sequence[str] = LAYOUTS, most: int = 99, at_once: Sequence[str] = (), only: str = ""
) -> Iterator[str]:
    """Run the constants of a dtype, `most` of each family or of one, and the places `at_once` without a program (all).

    Yields for each result the text of a mismatch, or "".
    """
    constants = [c for name, family in families(dtype).items() if only in ("", name) for c in family[:most]]
    args, named = operands(dtype), places(dtype)
    wanted = {name: expected(place, dtype, constants) for name, place in named.items()}

    def judge(how: str, name: str, k: int, got: Sequence[np.ndarray]) -> Iterator[str]:
        for x, right in zip(got, wanted[name][k], strict=True):
            yield "" if alike(x, right) else f"{dtype} {how} {name} {constants[k]!r}"

    for order in (range(len(constants)), range(len(constants) - 1, -1, -1)):
        eager._compiled_kernel.cache_clear()
        for name in at_once or named:
            for k in order:
                yield from judge("at once", name, k, leaves(named[name](*args, constants[k])))

    def all_of_them(x: Tensor, mask: Tensor) -> list[Any]:
        return [[jax.tree_util.tree_leaves(place(x, mask, c)) for c in constants] for place in named.values()]

    structure = jax.tree_util.tree_structure(list(wanted.values()))
    for layout in layouts:
        compiled = md.compile(all_of_them, "p:2 q:2", layout)
        ways = {"compiled": leaves(compiled(*args)), "simulated": md.simulate(compiled.program(*args), *args)}
        for how, flat in ways.items():
            for name, results in zip(named, jax.tree_util.tree_unflatten(structure, flat), strict=True):
                for k, got in enumerate(results):
                    yield from judge(f"{how} {layout!r}", name, k, got)


def main() -> int:
    start, compared, wrong = time.monotonic(), 0, list[str]()
    parts = [(dtype, family) for dtype in sys.argv[1:] or DTYPES for family in families(dtype)]
    for problem in (each for dtype, family in parts for each in check(dtype, only=family)):  # all at once is too large
        compared += 1
        if problem:
            wrong.append(problem)
            print(problem, flush=True)
    seconds = round(time.monotonic() - start)
    print(json.dumps({"law": "constants", "results": compared, "wrong": len(wrong), "seconds": seconds}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
