"""The law of md.local: a JAX function that passes the check gives the same on blocks as on the whole.

`python -m tests.jax_functions.local_law --cases 2000 --seed 1` draws functions, most of them wrong on purpose: they
reduce, reshape, squeeze, sort or pad along any axis, read sizes, and use sums before they are complete. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.dims import Dim
from meshdsl.ir import Type
from meshdsl.jax_functions.function import JaxFunction

SIZES = {"b": 6, "c": 4, "n": 3, "one": 1}
BLOCKS = {"b": (6, 3, 2, 1), "c": (4, 2, 1)}  # sizes of a block along dims that may be split
OPERANDS = (("b", "n"), ("c", "n"), ("n",), ("b", "c"), ("c",), ("b", "one", "n"), ("b", "n", "n"))
INDICES = np.array([0, 2, 7])

Step = Callable[[Any, Any, int], Any]  # of two earlier values and a drawn number


class Drawn(NamedTuple):
    """A drawn function: its steps, each with the numbers of two earlier values and a number of its own."""

    names: tuple[str, ...]
    steps: tuple[tuple[str, int, int, int], ...]
    operands: tuple[tuple[str, ...], ...]
    integers: bool

    def __call__(self, *xs: Any) -> Any:
        values = [jnp.asarray(x) for x in xs]
        for name, i, j, k in self.steps:
            values.append(STEPS[name](values[i % len(values)], values[j % len(values)], k))
        return values[-1]


def axis(x: Any, k: int) -> int:
    if not x.ndim:
        raise TypeError("a number has no axis")
    return k % x.ndim


def tiled(x: Any, y: Any, k: int) -> Any:
    """The places of x once for each place of y, merged into one axis."""
    return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], y.shape[axis(y, k)], x.shape[-1])).reshape(
        *x.shape[:-1], -1
    )


def moved(x: Any, k: int) -> Any:
    along = axis(x, k)
    config = [(1, -1) if i == along else (0, 0) for i in range(x.ndim)]
    return lax.reduce_window(x, np.zeros((), x.dtype)[()], lax.add, (1,) * x.ndim, (1,) * x.ndim, config)


def taken(x: Any, k: int, fill: Any) -> Any:
    return jnp.take(x, INDICES, axis=axis(x, k), mode="fill", fill_value=fill)


def halved(x: Any, k: int) -> Any:
    return lax.div(x, jnp.full_like(x, 2)) if k % 2 else x / 2


def scanned(x: Any, first: Any) -> Any:
    return lax.scan(lambda carry, t: (carry + x * t, None), first, jnp.arange(3).astype(x.dtype))[0]


def dtype_by_size(x: Any, k: int) -> Any:
    short = "float32" if x.dtype.kind == "f" else "int8"
    return x.astype(short if x.shape[axis(x, k)] <= 3 else x.dtype).astype(x.dtype)


STEPS: dict[str, Step] = {
    "sin": lambda x, y, k: jnp.sin(x),
    "square": lambda x, y, k: x * x,
    "add": lambda x, y, k: x + y,
    "multiply": lambda x, y, k: x * y,
    "twice": lambda x, y, k: 2 * x,
    "plus one": lambda x, y, k: x + 1,
    "halve": lambda x, y, k: halved(x, k),
    "sum": lambda x, y, k: jnp.sum(x, axis(x, k)),
    "sum, kept": lambda x, y, k: jnp.sum(x, axis(x, k), keepdims=True),
    "mean": lambda x, y, k: jnp.mean(x, axis(x, k)),
    "max": lambda x, y, k: jnp.max(x, axis(x, k)),
    "cumsum": lambda x, y, k: jnp.cumsum(x, axis(x, k)),
    "sort": lambda x, y, k: jnp.sort(x, axis(x, k)),
    "reverse": lambda x, y, k: jnp.flip(x, axis(x, k)),
    "window": lambda x, y, k: moved(x, k),
    "squeeze": lambda x, y, k: jnp.squeeze(x),
    "expand": lambda x, y, k: jnp.expand_dims(x, axis(x, k)),
    "transpose": lambda x, y, k: x.T,
    "swap": lambda x, y, k: jnp.swapaxes(x, 0, axis(x, k)),
    "like": lambda x, y, k: x.reshape(y.shape),
    "rows": lambda x, y, k: x.reshape(x.shape[0], -1),
    "tile": tiled,
    "broadcast": lambda x, y, k: jnp.broadcast_to(x, (y.shape[axis(y, k)], *x.shape)),
    "product": lambda x, y, k: jnp.matmul(x, y),
    "product of transpose": lambda x, y, k: jnp.matmul(x, y.mT),
    "outer": lambda x, y, k: jnp.tensordot(x, y, 0),
    "contract": lambda x, y, k: jnp.tensordot(x, y, ((axis(x, k),), (axis(y, k // 2),))),
    "fill": lambda x, y, k: taken(x, k, (None, 0, 3)[k % 3]),
    "take": lambda x, y, k: jnp.take(x, INDICES[:2], axis=axis(x, k), mode="clip"),
    "take along": lambda x, y, k: jnp.take_along_axis(x, jnp.argsort(x, axis(x, k)), axis(x, k)),
    "first": lambda x, y, k: x[:1],
    "set": lambda x, y, k: x.at[..., k % 3].set(0),
    "pad": lambda x, y, k: jnp.pad(x, [(0, k % 2)] * x.ndim, constant_values=k % 3),
    "choose": lambda x, y, k: jnp.where(y > 0, x, 0),
    "join": lambda x, y, k: jnp.concatenate([x, y], axis(x, k)),
    "barrier": lambda x, y, k: lax.optimization_barrier((x, y))[k % 2],
    "checkpoint": lambda x, y, k: jax.checkpoint(lambda x: x * 3)(x),
    "compiled": lambda x, y, k: jax.jit(lambda x: x - x.sum(axis(x, k)))(x),
    "scan": lambda x, y, k: scanned(x, jnp.zeros_like(x) + k % 2),
    "branch": lambda x, y, k: lax.cond(y.sum() > 0, lambda: x, lambda: -x),
    "early": lambda x, y, k: x if x.shape[axis(x, k)] == 1 else x + x,
    "size": lambda x, y, k: x / x.shape[axis(x, k)],
    "places": lambda x, y, k: x * jnp.arange(x.shape[axis(x, k)]),
    "dtype": lambda x, y, k: dtype_by_size(x, k),
    "cast": lambda x, y, k: x.astype("int32" if k % 2 else "float64"),
    "vmap": lambda x, y, k: jax.vmap(lambda row: row - row.sum())(x),
    "fft": lambda x, y, k: jnp.fft.rfft(x.astype("float64"), axis=axis(x, k)).real,
}


def draw(rng: random.Random) -> Drawn:
    """A function of one to three arrays, of two to six steps."""
    count = rng.randint(1, 3)
    names = tuple(rng.choice(list(STEPS)) for _ in range(rng.randint(2, 6)))
    # a step mostly reads the last value, so that few are dead
    steps = tuple(
        (name, count + n - 1 if rng.random() < 0.8 else rng.randrange(9), rng.randrange(9), rng.randrange(12))
        for n, name in enumerate(names)
    )
    return Drawn(names, steps, tuple(rng.choice(OPERANDS) for _ in range(count)), rng.random() < 0.2)


def named(shape: Sequence[int]) -> tuple[str, ...]:
    """Names for the axes of a result, by their sizes; other sizes, and the second axis of one size, are new dims."""
    known = {size: name for name, size in SIZES.items()}
    names: list[str] = []
    for i, size in enumerate(shape):
        name = known.get(size, f"new{i}")
        names.append(f"new{i}" if name in names else name)
    return tuple(names)


class Outcome(NamedTuple):
    """The result of the law: accepted block sizes, and the first that differs ("" if none)."""

    accepted: int
    refused: int
    wrong: str


def law(f: Drawn, seed: int) -> Outcome | None:
    """Compare a function on blocks with itself on the whole; None if it fails on the whole."""
    numbers = np.random.default_rng(seed)
    shapes = [tuple(SIZES[name] for name in names) for names in f.operands]
    xs = [numbers.integers(-9, 9, s) if f.integers else numbers.normal(size=s) for s in shapes]
    types = tuple(
        Type(tuple(Dim(n, SIZES[n]) for n in dict.fromkeys(own)), x.dtype)
        for own, x in zip(f.operands, xs, strict=True)
        if len(set(own)) == len(own)
    )
    if len(types) != len(xs):
        types = tuple(
            Type(tuple(Dim(n if own.index(n) == i else n + "2", SIZES[n]) for i, n in enumerate(own)), x.dtype)
            for own, x in zip(f.operands, xs, strict=True)
        )
    try:
        result = jax.eval_shape(lambda *xs: f(*xs), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
    except (TypeError, ValueError, IndexError):
        return None
    out = named(result.shape)
    dims = [name for name in BLOCKS if any(name in own for own in f.operands)]
    split, contract = [d for d in dims if d in out], [d for d in dims if d not in out]
    if not dims or (contract and result.dtype == bool):
        return None
    shape = tuple(Dim(name, size) for name, size in zip(out, result.shape, strict=True))
    function = JaxFunction(lambda *xs: [f(*xs)], "f", types, (shape,), tuple(split), tuple(contract), True)
    if function.problem() is not None:
        return Outcome(0, 1, "")
    legal, refused = [], 0
    for sizes in itertools.product(*(BLOCKS[d] for d in dims)):
        block = dict(zip(dims, sizes, strict=True))
        local = tuple(Type(tuple(Dim(d.name, block.get(d.name, d.size)) for d in t.dims), t.dtype) for t in types)
        if all(block[d] == SIZES[d] for d in dims):
            continue
        sizes_of = {**SIZES, **block}
        own = tuple(sizes_of.get(name, d.size) for name, d in zip(out, shape, strict=True))
        if function.problem(local) is not None or function.traced(local).out_avals[0].shape != own:
            refused += 1  # a result of another shape is an error of its own
            continue
        legal.append(block)
    whole, *parts = jax.jit(lambda *xs: [f(*xs), *(of_blocks(f, xs, types, block) for block in legal)])(*xs)
    for number, (block, results) in enumerate(zip(legal, parts, strict=True)):
        joined = on_blocks(results, out, block, np.asarray(whole))
        if not np.allclose(joined, whole, rtol=1e-9, atol=1e-9, equal_nan=True):
            return Outcome(number + 1, refused, f"blocks of {block}, split={split}, contract={contract}")
    return Outcome(len(legal), refused, "")


def places(block: dict[str, int]) -> Iterator[dict[str, slice]]:
    """The slices of each block, by dim, where all blocks have these sizes."""
    for at in itertools.product(*(range(SIZES[d] // n) for d, n in block.items())):
        yield {d: slice(i * n, (i + 1) * n) for (d, n), i in zip(block.items(), at, strict=True)}


def of_blocks(f: Drawn, xs: Sequence[Any], types: Sequence[Type], block: dict[str, int]) -> list[Any]:
    """The results of all blocks."""
    one = jax.jit(lambda *xs: f(*xs))  # blocks have one shape, so it is traced and lowered once
    parts = (
        [x[tuple(cut.get(d.name, slice(None)) for d in t.dims)] for x, t in zip(xs, types, strict=True)]
        for cut in places(block)
    )
    return [one(*part) for part in parts]


def on_blocks(results: Sequence[Any], out: Sequence[str], block: dict[str, int], whole: np.ndarray) -> np.ndarray:
    """The results of all blocks: each in its place, and those of one place added."""
    total = np.zeros(whole.shape, whole.dtype)
    for cut, result in zip(places(block), results, strict=True):
        total[tuple(cut.get(name, slice(None)) for name in out)] += np.asarray(result)
    return total


def run(cases: int, seed: int) -> dict[str, Any]:
    """Draw functions; print those for which the law fails."""
    counts: Counter[str] = Counter()
    for number in range(seed, seed + cases):
        f = draw(random.Random(number))
        outcome = law(f, number)
        counts["functions"] += outcome is not None
        if outcome is None:
            continue
        counts["accepted"] += bool(outcome.accepted)
        counts["blocks"] += outcome.accepted
        counts["refused"] += not outcome.accepted
        if outcome.wrong:
            counts["wrong"] += 1
            print(f"seed {number}: {f.steps} of {f.operands}, integers={f.integers}: {outcome.wrong}", flush=True)
    return dict(counts)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = run(options.cases, options.seed)
    print(json.dumps(figures))
    sys.exit(bool(figures.get("wrong")))
