"""One row per operation: a call, its operands and a plain reference. Every law about operations tests this table.

`rows()` lists the rows. A row makes its operands for any sizes (`row.make(rng, sizes)`), so laws can draw sizes of 1,
primes, and sizes that a mesh does not divide. `row.call(*tensors)` uses public names only and takes every size from its
operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scipy.special

import meshdsl as md
from meshdsl import backend
from meshdsl.autodiff import vjp_of_graph
from meshdsl.control import BARRIER, KEEP
from meshdsl.dims import Dim
from meshdsl.ir import Call, Cond, Control, Graph, Op, Scan, Type, While, walk
from meshdsl.ops import elementwise, indexing, pooling
from meshdsl.ops.dtypes import bitcast
from meshdsl.ops.masking import MASK
from meshdsl.ops.window import Window
from meshdsl.trace import bind1, run_kernel, trace, tree
from meshdsl.values import Tensor

SIZES = {"a": 3, "b": 4, "c": 5, "d": 2, "t": 4}
Sizes = Mapping[str, int] | Callable[[str], int]
INDEX = "index"  # the dtype of index operands; each law chooses it
INDICES = ("int32", "int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class In:
    """One operand: dims as `"a b=2*c"` (a size may be a sum of products), dtype ("": the row's) and kind of values.

    Values: any, positive, nonzero, unit (inside (-1, 1)), bool, key, `place:a` (indices of dim a; some are out of
    range, up to the limits of the dtype), `inside:a` (indices of dim a, all in range).
    """

    dims: str
    values: str = "any"
    dtype: str = ""


@dataclass(frozen=True)
class Row:
    """An operation as a function of tensors, its operands, and its properties.

    `reference` takes the operands as NumPy arrays. `exact`: on small integers, every evaluation order gives the same
    bits. `empty`: any size may be 0. `smooth`: on integers, with ties and zeros, the gradient equals JAX's. `odd`:
    values may include infinities; not allowed if a factor of a product is summed on several devices, because
    inf * (2 - 1) is inf and inf * 2 - inf * 1 is NaN; nor if products are grouped in any order, because inf * 0 is NaN.
    """

    name: str
    call: Callable[..., Any]
    ins: tuple[In, ...]
    reference: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    differentiable: bool = True
    exact: bool = True
    empty: bool = True
    smooth: bool = True
    odd: bool = True

    def dims(self) -> tuple[str, ...]:
        """The dim names whose sizes can be chosen."""
        found: dict[str, None] = {}
        for operand in self.ins:
            for word in operand.dims.split():
                name, _, size = word.partition("=")
                parts = size.replace("+", "*").split("*") if size else [name]
                found |= {part: None for part in parts if not part.isdigit()}
        return tuple(found)

    def types(self, sizes: Sizes = SIZES, dtype: str = "", index: str = INDICES[0]) -> list[Type]:
        """Types of the operands."""
        return [
            Type(
                tuple(_dim(word, sizes) for word in operand.dims.split()),
                np.dtype(jnp.dtype(index if operand.dtype == INDEX else operand.dtype or dtype or self.dtypes[0])),
            )
            for operand in self.ins
        ]

    def arrays(
        self,
        rng: np.random.Generator,
        sizes: Sizes = SIZES,
        integer: bool = True,
        dtype: str = "",
        index: str = INDICES[0],
        odd: bool = False,
    ) -> list[np.ndarray]:
        """Values for the operands; with `integer`, small whole numbers (quarters inside (-1, 1)).

        `odd` adds NaN of either sign, infinities and -0.0 to the floats.
        """
        types = self.types(sizes, dtype, index)
        found = [_values(rng, t, operand.values, integer, sizes) for t, operand in zip(types, self.ins, strict=True)]
        return [_with_odd(rng, x) for x in found] if odd else found

    def make(
        self,
        rng: np.random.Generator,
        sizes: Sizes = SIZES,
        integer: bool = True,
        dtype: str = "",
        index: str = INDICES[0],
        odd: bool = False,
    ) -> list[Tensor]:
        """The operands as concrete tensors."""
        arrays = self.arrays(rng, sizes, integer, dtype, index, odd)
        return [md.tensor(x, t.shape) for x, t in zip(arrays, self.types(sizes, dtype, index), strict=True)]

    def graph(self, sizes: Sizes = SIZES, dtype: str = "", index: str = INDICES[0]) -> Graph:
        """The traced call; its results are the leaves of the returned value."""
        graph, captures, _ = trace(self.call, self.types(sizes, dtype, index))
        assert not captures
        return graph

    def __str__(self) -> str:
        return self.name

    def vectorised(self, mapped: Sequence[bool], call: Callable[..., Any] | None = None) -> Row:
        """The row under `md.vmap` over a dim `v`, which the `mapped` operands have; `call` replaces `md.vmap`."""
        ins = tuple(replace(x, dims=f"v {x.dims}".strip()) if on else x for x, on in zip(self.ins, mapped, strict=True))
        return replace(
            self, name=f"vmap_{self.name}", call=call or md.vmap(self.call, over="v"), ins=ins, reference=None
        )


def looped(row: Row, mapped: Sequence[bool]) -> Callable[..., Any]:
    """What `md.vmap` of the row means: the stacked results of its call on each place of `v`."""

    def call(*xs: Tensor) -> Any:
        cut = [md.unstack(x, "v") if on else None for x, on in zip(xs, mapped, strict=True)]
        n = next(len(parts) for parts in cut if parts is not None)
        results = [row.call(*(x if p is None else p[i] for x, p in zip(xs, cut, strict=True))) for i in range(n)]
        flat = zip(*(leaves(y) for y in results), strict=True)
        return [md.stack(ys, "v") for ys in flat]

    return call


def _dim(word: str, sizes: Sizes) -> Dim:
    name, _, size = word.partition("=")
    choose = sizes if callable(sizes) else sizes.__getitem__

    def number(text: str) -> int:
        return int(text) if text.isdigit() else choose(text)

    return Dim(name, sum(math.prod(number(part) for part in term.split("*")) for term in (size or name).split("+")))


def _values(rng: np.random.Generator, kind: Type, values: str, integer: bool, sizes: Sizes) -> np.ndarray:
    shape = tuple(d.size for d in kind.shape)
    values, _, dim = values.partition(":")
    if values == "key":
        return rng.integers(0, 1 << 32, shape, np.uint32)
    if values in ("place", "inside"):
        size, outside = _dim(dim, sizes).size, values == "place"
        found = rng.integers(-outside, max(size, 1) + outside, shape)
        ends = np.iinfo(kind.dtype)
        found = np.where((found < ends.min) | (found > ends.max), 0, found).astype(kind.dtype)
        end = rng.choice(np.array([ends.min, ends.max], kind.dtype), shape)
        return np.where(rng.random(shape) < 0.1, end, found) if outside else found
    if kind.dtype == np.dtype(bool):
        return rng.integers(0, 2, shape).astype(bool)
    integer = integer or kind.dtype.kind in "iu"
    sign = 1 if kind.dtype.kind == "u" else rng.choice([-1, 1], shape)
    if values == "unit":
        x = rng.integers(-3, 4, shape) / 4 if integer else rng.uniform(-0.9, 0.9, shape)
    elif values in ("positive", "nonzero"):
        x = rng.integers(1, 5, shape) if integer else rng.uniform(0.5, 2, shape)
        x = x * sign if values == "nonzero" else x
    else:
        x = rng.integers(0, 4, shape) * sign if integer else rng.normal(size=shape)
    if kind.dtype.kind == "c" and values == "any":
        x = x + 1j * (rng.integers(-3, 4, shape) if integer else rng.normal(size=shape))
    return np.asarray(x).astype(kind.dtype)


def _with_odd(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Make an eighth of the floats odd, or only one of them, because many can hide each other in sums."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    odd = rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0]), x.shape).astype(x.dtype)
    chosen = rng.random(x.shape) < 0.125
    if rng.random() < 0.5:
        chosen = np.arange(x.size).reshape(x.shape) == rng.integers(0, max(1, x.size))
    return np.where(chosen, odd, x)


def run(graph: Graph, arrays: Sequence[Any], xp: Any) -> list[Any]:
    """Run a graph by its kernels in one array library, on undivided arrays; an evaluator independent of `bind`."""
    env = dict(zip(graph.ins, arrays, strict=True))
    for eqn in graph.eqns:
        ins = [env[v] for v in eqn.ins]
        if eqn.control is not None:
            outs = _control(eqn.control, ins, xp)
        else:
            types = [v.type for v in eqn.outs]
            outs = run_kernel(eqn.operation, xp, ins, [v.shape for v in eqn.ins], types, eqn.params)
        for v, x in zip(eqn.outs, outs, strict=True):
            assert (np.shape(x), np.dtype(x.dtype)) == (tuple(d.size for d in v.shape), v.dtype), f"{eqn.op}: {v}"
            env[v] = x
    return [env[v] for v in graph.outs]


def _control(control: Control, ins: Sequence[Any], xp: Any) -> Sequence[Any]:
    match control:
        case Scan():
            return _scan(control, ins, xp)
        case While():
            return _while(control, ins, xp)
        case Cond():
            yes, no = (lambda *xs, g=graph: tuple(run(g, xs, xp)) for graph in (control.yes, control.no))
            if xp is backend.Jax:
                return jax.lax.cond(ins[0], yes, no, *ins[1:])
            return (yes if ins[0] else no)(*ins[1:])
        case Call():
            return run(control.graph, ins, xp)


def _scan(loop: Scan, ins: Sequence[Any], xp: Any) -> list[Any]:
    body, carries, dim = loop.body, loop.carries, loop.dim
    held, carry, xs = loop.inputs(ins)
    rows = []
    for i in reversed(range(dim.size)) if loop.reverse else range(dim.size):
        outs = run(body, [*held, *carry, *(x[i] for x in xs)], xp)
        carry = outs[:carries]
        rows.append(outs[carries:])
    rows = rows[::-1] if loop.reverse else rows
    empty = [xp.zeros((0, *(d.size for d in v.shape)), v.dtype) for v in body.outs[carries:]]
    return [*carry, *([xp.stack(y) for y in zip(*rows, strict=True)] if rows else empty)]


def _while(loop: While, ins: Sequence[Any], xp: Any) -> Sequence[Any]:
    held, carry = loop.inputs(ins)
    more, step = (lambda c: run(loop.test, [*held, *c], xp)[0]), (lambda c: run(loop.body, [*held, *c], xp))
    if xp is backend.Jax:
        return jax.lax.while_loop(more, step, [jnp.asarray(x) for x in carry])
    while more(carry):
        carry = step(carry)
    return carry


def operations(graph: Graph) -> set[Op]:
    """Every operation of a graph, including those of loop bodies and branches."""
    return {eqn.operation for eqn, _ in walk(graph)}


def gradient(graph: Graph) -> tuple[Graph, list[int]]:
    """The graph and its pullback as one graph, and the operands that got a cotangent; see `vjp_of_graph`."""
    joint, _, want = vjp_of_graph(graph, [True] * len(graph.ins))
    return joint, want


# ruff: noqa: E501, E731 - below is a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off
# The table. Names a, b, c, d, t are dims whose sizes the law chooses.


def _n(x: Tensor, name: str) -> int:
    return next(d.size for d in x.dims if d.name == name)


X, V, W = In("a b"), In("b"), In("b c")
INTS = ("int32", "uint8")
REAL = ("float32", "bfloat16", "float16")
KEY = In("key_word=2", "key", "uint32")


def _unaries() -> Iterator[Row]:
    jnn, special = jax.nn, scipy.special
    for name, values, reference, exact in [
        ("exp", "any", np.exp, False),
        ("log", "positive", np.log, False),
        ("log1p", "positive", np.log1p, False),
        ("expm1", "any", np.expm1, False),
        ("sqrt", "positive", np.sqrt, False),
        ("rsqrt", "positive", lambda x: 1 / np.sqrt(x), False),
        ("square", "any", np.square, True),
        ("abs", "any", np.abs, True),
        ("sign", "any", np.sign, True),
        ("reciprocal", "nonzero", lambda x: 1 / x, False),
        ("sin", "any", np.sin, False),
        ("cos", "any", np.cos, False),
        ("tanh", "any", np.tanh, False),
        ("erf", "any", special.erf, False),
        ("sigmoid", "any", special.expit, False),
        ("relu", "any", lambda x: np.maximum(x, 0), True),
        ("gelu", "any", jnn.gelu, False),
        ("silu", "any", jnn.silu, False),
        ("softplus", "any", jnn.softplus, False),
        ("elu", "any", jnn.elu, False),
        ("selu", "any", jnn.selu, False),
        ("leaky_relu", "any", jnn.leaky_relu, False),
        ("floor", "any", np.floor, True),
        ("ceil", "any", np.ceil, True),
        ("round", "any", np.round, True),
    ]:
        yield Row(name, getattr(md, name), (In("a b", values),), reference, exact=exact, smooth=name != "relu")
    yield Row("erf_inv", elementwise.erf_inv, (In("a b", "unit"),), special.erfinv, exact=False)
    yield Row("gelu_exact", lambda x: md.gelu(x, approximate=False), (X,), lambda x: jnn.gelu(x, False), exact=False)
    yield Row("negative", lambda x: -x, (X,), np.negative, dtypes=(*REAL, *INTS))
    yield Row("isnan", lambda x: md.isnan(x / x), (X,), lambda x: x == 0, differentiable=False)
    yield Row("isfinite", lambda x: md.isfinite(1 / x), (X,), lambda x: x != 0, differentiable=False)
    yield Row("logical_not", md.logical_not, (In("a b", dtype="bool"),), np.logical_not, differentiable=False)
    yield Row("not", lambda x: ~(x > 0), (X,), lambda x: ~(x > 0), dtypes=(*REAL, *INTS), differentiable=False)
    yield Row("invert", lambda x: ~x, (X,), np.invert, dtypes=INTS, differentiable=False)
    yield Row("stop_gradient", lambda x: md.stop_gradient(x) + x, (X,), lambda x: 2 * x, differentiable=False)
    yield Row("cast_narrow", lambda x: md.cast(x, "bfloat16"), (X,), dtypes=("float32",), differentiable=False)
    yield Row("cast_wide", lambda x: md.cast(x, "float64") * 2, (X,), lambda x: 2 * x.astype(np.float64))
    yield Row("cast_int", lambda x: md.cast(x, "int32"), (X,), lambda x: np.trunc(x), differentiable=False)
    yield Row("cast_bool", lambda x: md.cast(x, bool), (X,), lambda x: x != 0, differentiable=False)
    yield Row("cast_float", lambda x: md.cast(x, "float32"), (X,), np.asarray, dtypes=INTS, differentiable=False)
    bits = lambda x: bitcast(x, "uint32")
    yield Row("bitcast", bits, (In("a b", dtype="float32"),), lambda x: x.view(np.uint32), differentiable=False)
    yield Row("full", lambda x: x + 2, (X,), lambda x: x + 2, dtypes=(*REAL, *INTS))
    yield Row("clip", lambda x: md.clip(x, 1, 2), (X,), lambda x: np.clip(x, 1, 2), dtypes=(*REAL, *INTS))
    line = lambda x: x + md.arange(x.dims[1], 5, 3, x.dtype) + md.full(x.dims, 2, x.dtype)
    yield Row("arange", line, (X,), lambda x: x + 7 + 3 * np.arange(x.shape[1]), dtypes=(*REAL, *INTS))
    space = lambda x: x * md.linspace(x.dims[1], -2, 3, dtype=x.dtype)
    yield Row("linspace", space, (X,), lambda x: x * np.linspace(-2, 3, x.shape[1]), exact=False)
    constant = lambda x: x + md.tensor(np.arange(_n(x, "b")).astype(x.dtype), [Dim("b", _n(x, "b"))])
    yield Row("constant", constant, (X,), lambda x: x + np.arange(x.shape[1]), dtypes=(*REAL, *INTS))


def _binaries() -> Iterator[Row]:
    both = (In("a b", "nonzero"), In("b", "nonzero"))
    plain = (X, V)
    for name, ins, function, dtypes, exact in [
        ("add", plain, lambda x, y: x + y, (*REAL, *INTS), True),
        ("subtract", plain, lambda x, y: x - y, (*REAL, *INTS), True),
        ("multiply", plain, lambda x, y: x * y, (*REAL, *INTS), True),
        ("divide", both, lambda x, y: x / y, REAL, False),
        ("remainder", both, lambda x, y: x % y, ("float32", "int32", "uint8"), True),
        ("power", (In("a b", "positive"), V), lambda x, y: x**y, ("float32",), False),
    ]:
        yield Row(name, function, ins, function, dtypes=dtypes, exact=exact)
        yield Row(f"{name}_swapped", lambda y, x, f=function: f(x, y), ins[::-1], lambda y, x, f=function: f(x, y), dtypes, exact=exact)
        other = tuple(In(i.dims.replace("a ", ""), i.values) if i is ins[0] else In("a b", i.values) for i in ins)
        yield Row(f"{name}_wider", function, other, function, dtypes[:1], exact=exact)
    for name, function in [
        ("floor_divide", lambda x, y: x // y),
        ("equal", lambda x, y: x == y),
        ("not_equal", lambda x, y: x != y),
        ("less", lambda x, y: x < y),
        ("less_equal", lambda x, y: x <= y),
        ("greater", lambda x, y: x > y),
        ("greater_equal", lambda x, y: x >= y),
    ]:
        yield Row(name, function, both, function, dtypes=(*REAL, *INTS), differentiable=False)
    for name, function in [
        ("and", lambda x, y: x & y),
        ("or", lambda x, y: x | y),
        ("xor", lambda x, y: x ^ y),
        ("left_shift", lambda x, y: x << (y & 3)),
        ("right_shift", lambda x, y: x >> (y & 3)),
    ]:
        yield Row(name, function, plain, function, dtypes=INTS, differentiable=False)
    yield Row("and_bool", lambda x, y: x & y, (In("a b", dtype="bool"), In("b", dtype="bool")), np.logical_and, differentiable=False)
    yield Row("maximum", md.maximum, plain, np.maximum, dtypes=(*REAL, *INTS))
    yield Row("minimum", md.minimum, plain, np.minimum, dtypes=(*REAL, *INTS))
    yield Row("maximum_number", lambda x: md.maximum(x, 0), (X,), lambda x: np.maximum(x, 0))
    yield Row("square_power", lambda x: x**2, (X,), lambda x: x**2, dtypes=(*REAL, *INTS))
    yield Row("cube", lambda x: x**3, (X,), lambda x: x**3)
    yield Row("inverse_power", lambda x: x**-2, (In("a b", "nonzero"),), lambda x: x**-2.0, exact=False)
    yield Row("root", lambda x: x**0.5, (In("a b", "positive"),), np.sqrt, exact=False)
    yield Row("exponential", lambda x: 2.0**x, (X,), lambda x: 2.0**x, exact=False)
    yield Row("order", lambda x, y: x * y, (X, In("b a")), lambda x, y: x * y.T)
    yield Row("scalar", lambda x, y: x * y + y, (X, In("")), lambda x, y: x * y + y)
    yield Row("chain", lambda x, y, z: x * y + z, (In("a b c"), In("c a"), In("b")), lambda x, y, z: x * y.T[:, None] + z[:, None])
    choose = (In("a", dtype="bool"), X, V)
    yield Row("where", md.where, choose, lambda c, x, y: np.where(c[:, None], x, y), dtypes=(*REAL, *INTS))
    yield Row("where_number", lambda c, x: md.where(c, x, 0), choose[:2], lambda c, x: np.where(c[:, None], x, 0))
    larger = lambda x, y: md.map(lambda u, v: jnp.where(u > v, u * v, u + 2), x, y)
    yield Row("map_exact", larger, plain, lambda x, y: np.where(x > y, x * y, x + 2), ("float32",))
    yield Row("map", lambda x, y: md.map(lambda u, v: jnp.hypot(u, v + 1), x, y), (In("a b", "positive"), In("b", "positive")), lambda x, y: np.hypot(x, y + 1), dtypes=("float32",), exact=False)


def _contractions() -> Iterator[Row]:
    sums = (*REAL, "int32")
    yield Row("matmul", lambda x, w: md.einsum(x, w, out="a c"), (X, W), lambda x, w: x @ w, dtypes=sums)
    yield Row("matmul_order", lambda x, w: md.einsum(x, w, out="c a"), (X, In("c b")), lambda x, w: w @ x.T, dtypes=sums)
    yield Row("outer", lambda x, y: md.einsum(x, y, out="b a"), (In("a"), V), lambda x, y: np.outer(y, x))
    yield Row("batched", lambda x, y: md.einsum(x, y, out="a b d"), (In("a b c"), In("a c d")), lambda x, y: x @ y)
    yield Row("three", lambda x, y, z: md.einsum(x, y, z, out="a d"), (X, W, In("c d")), lambda x, y, z: x @ y @ z)
    yield Row("einsum_alone", lambda x, y: md.einsum(x, y, out="a"), (In("a b"), In("a c")), lambda x, y: x.sum(1) * y.sum(1))
    yield Row("einsum_one", lambda x: md.einsum(x, out="b"), (X,), lambda x: x.sum(0))
    yield Row("einsum_scalar", lambda x, y: md.einsum(x, y, out=""), (X, X), lambda x, y: np.sum(x * y))
    wide = lambda x, w: md.einsum(x, w, out="a c", dtype="float32")
    yield Row("einsum_dtype", wide, (X, W), lambda x, w: x @ w, dtypes=("bfloat16",))
    yield Row("dot", lambda x, w: md.dot(x, w, "b"), (X, W), lambda x, w: x @ w)
    yield Row("dot_two", lambda x, w: md.dot(x, w, "b c"), (In("a b c"), In("c b d")), lambda x, w: np.einsum("abc,cbd->ad", x, w))
    for name, exact, empty, dtypes in [
        ("sum", True, True, sums),
        ("mean", False, True, REAL),
        ("max", True, False, sums),
        ("min", True, False, sums),
        ("prod", True, True, sums),
        ("var", False, True, ("float32",)),
    ]:
        f = getattr(md, name)
        g = getattr(np, name)
        yield Row(name, lambda x, f=f: f(x, "b"), (X,), lambda x, g=g: g(x, axis=1), dtypes, exact=exact, empty=empty)
        yield Row(f"{name}_two", lambda x, f=f: f(x, "c a"), (In("a b c"),), lambda x, g=g: g(x, axis=(0, 2)), dtypes[:1], exact=exact, empty=empty)
        yield Row(f"{name}_all", lambda x, f=f: f(x), (X,), lambda x, g=g: g(x), dtypes[:1], exact=exact, empty=empty)
    yield Row("sum_bool", lambda x: md.sum(x > 0, "a"), (X,), lambda x: np.sum(x > 0, axis=0), differentiable=False)
    yield Row("any", lambda x: md.any(x > 0, "b"), (X,), lambda x: np.any(x > 0, axis=1), differentiable=False)
    yield Row("all", lambda x: md.all(x > 0, "b"), (X,), lambda x: np.all(x > 0, axis=1), differentiable=False)
    soft = scipy.special
    yield Row("logsumexp", lambda x: md.logsumexp(x, "b"), (X,), lambda x: soft.logsumexp(x, axis=1), exact=False, empty=False)
    yield Row("softmax", lambda x: md.softmax(x, "a"), (X,), lambda x: soft.softmax(x, axis=0), exact=False, empty=False)
    yield Row("log_softmax", lambda x: md.log_softmax(x, "b"), (X,), lambda x: soft.log_softmax(x, axis=1), exact=False, empty=False)
    for name in ("argmax", "argmin"):
        f, g = getattr(md, name), getattr(np, name)
        yield Row(name, lambda x, f=f: f(x, "a"), (X,), lambda x, g=g: g(x, axis=0), sums, differentiable=False, empty=False)
    for name, order, exact in [("norm", 2, False), ("norm_one", 1, True), ("norm_most", np.inf, True)]:
        f, g = (lambda x, order=order: md.norm(x, "b", order)), (lambda x, order=order: np.linalg.norm(x, order, axis=1))
        yield Row(name, f, (In("a b", "nonzero"),), g, exact=exact, empty=name != "norm_most", smooth=False)
    yield Row("broadcast", lambda x: md.broadcast(x, "c:3 b a"), (X,), lambda x: np.broadcast_to(x.T, (3, *x.T.shape)), (*REAL, *INTS))


def _shapes() -> Iterator[Row]:
    every = (*REAL, *INTS)
    cube = In("a b c")
    yield Row("rename", lambda x: md.rename(x, b="c"), (X,), np.asarray, every)
    yield Row("transpose", lambda x: md.transpose(x, "c a b"), (cube,), lambda x: x.transpose(2, 0, 1), every)
    yield Row("flatten", lambda x: md.flatten(x, "a b", "n"), (cube,), lambda x: x.reshape(-1, x.shape[2]), every)
    yield Row("flatten_apart", lambda x: md.flatten(x, "c a", "n"), (cube,), lambda x: x.transpose(1, 2, 0).reshape(x.shape[1], -1), every)
    unflat = lambda x: md.unflatten(x, "n", [Dim("a", _n(x, "n") // 2), Dim("d", 2)])
    yield Row("unflatten", unflat, (In("n=a*2 b"),), lambda x: x.reshape(-1, 2, x.shape[1]), every)
    again = lambda x: md.reshape(x, [Dim("d", 2), Dim("n", _n(x, "a") * _n(x, "b") // 2)])
    yield Row("reshape", again, (In("a b=2*c"),), lambda x: x.reshape(2, -1), every)
    mixed = lambda x: md.reshape(x, [Dim("a", _n(x, "a")), Dim("n", _n(x, "m") // 3 * _n(x, "c")), Dim("e", 3)])
    yield Row("reshape_mixed", mixed, (In("a m=3*b c"),), lambda x: x.reshape(x.shape[0], -1, 3), every)
    yield Row("concat", lambda x, y: md.concat([x, y, x], "b"), (X, In("b=c a")), lambda x, y: np.concatenate([x, y.T, x], 1), every)
    yield Row("stack", lambda x, y: md.stack([x, y], "new"), (X, In("b a")), lambda x, y: np.stack([x, y.T]), every)
    ends = lambda x: [part * (k + 1) for k, part in enumerate(md.unstack(x, "b"))][-2:]
    yield Row("unstack", ends, (X,), lambda x: [x[:, k] * (k + 1) for k in range(x.shape[1])][-2:], every)
    yield Row("squeeze", lambda x: md.squeeze(x, "e"), (In("a e=1 b"),), lambda x: x[:, 0], every)
    yield Row("tril", lambda x: md.tril(x, "a", "b", -1), (X,), lambda x: np.tril(x, -1), every)
    yield Row("triu", lambda x: md.triu(x, "b", "a", 1), (In("a b c"),), lambda x: np.triu(x.T, 1).T, every)
    part = lambda x: md.slice(x, "a", _n(x, "a") // 3, _n(x, "a") - _n(x, "a") // 3)
    yield Row("slice", part, (X,), lambda x: x[len(x) // 3 :], every)
    yield Row("slice_stride", lambda x: md.slice(x, "b", 0, (_n(x, "b") + 1) // 2, 2), (X,), lambda x: x[:, ::2], every)
    place = In("", "place:a", INDEX)
    start = lambda i, last: min(max(int(i), 0), last)
    yield Row("dynamic_slice", lambda x, i: md.dynamic_slice(x, "a", i, 1), (X, place), lambda x, i: x[start(i, len(x) - 1) :][:1], every, empty=False)
    clipped = lambda x, i: md.dynamic_slice(x, "a", i, _n(x, "a"))
    yield Row("dynamic_slice_clipped", clipped, (X, place), lambda x, i: x, every)
    update = lambda x, u, i: md.dynamic_update_slice(x, u, "a", i)

    def updated(x: Any, u: Any, i: Any) -> Any:
        x, i = np.array(x), start(i, len(x) - u.shape[1])
        x[i : i + u.shape[1]] = u.T
        return x

    yield Row("dynamic_update_slice", update, (In("a=d+1 b"), In("b a=d"), In("", "place:d", INDEX)), updated, every)
    yield Row("pad", lambda x: md.pad(x, "a", 1, 2, value=3), (X,), lambda x: np.pad(x, [(1, 2), (0, 0)], constant_values=3), every)
    yield Row("pad_zero", lambda x: md.pad(x, "b", 2, 0), (X,), lambda x: np.pad(x, [(0, 0), (2, 0)]), every)
    yield Row("pad_cut", lambda x: md.pad(x, "a", -1, 2), (In("a=a+1 b"),), lambda x: np.pad(x[1:], [(0, 2), (0, 0)]), every)

    def spread(x: Any) -> Any:
        out = np.zeros((max(0, 3 * len(x) - 2), x.shape[1]), x.dtype)
        out[::3] = x
        return np.pad(out, [(1, 0), (0, 0)])

    yield Row("pad_inner", lambda x: md.pad(x, "a", 1, 0, inner=2), (X,), spread, every)
    yield Row("reverse", lambda x: md.reverse(x, "a"), (X,), lambda x: x[::-1], every)
    yield Row("roll", lambda x: md.roll(x, "a", 2), (X,), lambda x: np.roll(x, 2, 0), every)
    yield Row("roll_back", lambda x: md.roll(x, "b", -1), (X,), lambda x: np.roll(x, -1, 1), every)
    yield Row("shift", lambda x: md.shift(x, "b", 1), (X,), lambda x: np.pad(x, [(0, 0), (1, 0)])[:, : x.shape[1]], every)
    yield Row("shift_back", lambda x: md.shift(x, "b", -2, fill=1), (X,), lambda x: np.pad(x, [(0, 0), (0, 2)], constant_values=1)[:, 2:], every)


def _indices() -> Iterator[Row]:
    every = (*REAL, *INTS)
    yield Row("iota", lambda x: x + md.iota(x.dims[1], x.dtype), (X,), lambda x: x + np.arange(x.shape[1], dtype=x.dtype), every)
    place, soft = In("c", "place:b", INDEX), scipy.special
    hot = lambda i, x: md.one_hot(i, x.dims[1], x.dtype)
    yield Row("one_hot", hot, (place, X), lambda i, x: i[:, None] == np.arange(x.shape[1]), every, differentiable=False)

    def taken(x: Any, i: Any) -> Any:
        inside = (i >= 0) & (i < x.shape[1])
        rows = np.moveaxis(x, 1, 0)
        rows = rows[np.where(inside, i, 0)] if len(rows) else np.zeros((*i.shape, *rows.shape[1:]), x.dtype)
        return np.where(inside.reshape(inside.shape + (1,) * (x.ndim - 1)), rows, 0)

    yield Row("take", lambda x, i: md.take(x, i, "b"), (X, place), taken, every)
    yield Row("take_two", lambda x, i: md.take(x, i, "b"), (In("a b d"), In("c t", "place:b", INDEX)), taken, every)

    def paired(x: Any, i: Any) -> Any:  # each index of the shared dim has its own table and indices
        return np.stack([taken(x[:, :, k], i[:, k]) for k in range(x.shape[2])], 1) if x.shape[2] else np.zeros((*i.shape, len(x)), x.dtype)

    yield Row("take_paired", lambda x, i: md.take(x, i, "b"), (In("a b d"), In("c d", "place:b", INDEX)), paired, every)
    # indices with the dim name that `take` reads over, with the same size and with another
    for name, x, i, f in [
        ("take_order", X, "b", taken),
        ("take_renamed", X, "b=t c", taken),
        ("take_order_paired", In("a b d"), "b d", paired),
        ("take_renamed_paired", In("a b d"), "b=t d", paired),
    ]:
        yield Row(name, lambda x, i: md.take(x, i, "b"), (x, In(i, "place:b", INDEX)), f, every)
    fixed = lambda i, x: md.take(md.tensor(np.arange(1, _n(x, "b") + 1), x.dims), i, "b")
    yield Row("take_constant", fixed, (In("b a", "place:b", INDEX), V), lambda i, x: taken(np.arange(1, len(x) + 1)[None], i)[..., 0], differentiable=False)
    yield Row("take_scalar", lambda x, i: md.take(x, i, "b"), (X, In("", "place:b", INDEX)), taken, every)

    def added(x: Any, i: Any, u: Any) -> Any:
        out = np.array(x)
        for at, row in zip(i, u, strict=True):
            if 0 <= at < len(x):
                out[at] += row
        return out

    put = lambda x, i, u: md.put_add(x, i, u, "b")
    yield Row("put_add", put, (W, In("t", "place:b", INDEX), In("t c")), added, every)
    flat = lambda x, i, u: added(x, i.reshape(-1), u.transpose(1, 2, 0).reshape(-1, u.shape[0]))
    rows = lambda x, i, u: np.stack([added(x[k], i[:, k], u[k]) for k in range(len(x))]) if len(x) else x
    yield Row("put_add_paired", put, (In("a b c"), In("t a", "place:b", INDEX), In("a t c")), rows, every)
    yield Row("put_add_order", put, (W, In("b", "place:b", INDEX), In("b c")), added, every)
    yield Row("put_add_renamed", put, (W, In("b=t", "place:b", INDEX), In("b=t c")), added, every)
    yield Row("put_add_order_paired", put, (In("a b c"), In("b a", "place:b", INDEX), In("a b c")), rows, every)
    one = lambda x, i: md.put_add(x, i, 1, "b")
    count = lambda x, i: added(x, i, np.ones((len(i), x.shape[1])))
    yield Row("put_add_number", one, (W, In("t", "place:b", INDEX)), count, every)
    yield Row("put_add_two", put, (W, In("t d", "place:b", INDEX), In("c t d")), flat, every)
    # more table entries than a narrow index dtype can count
    many = In("c", "place:b=300", INDEX)
    yield Row("one_hot_many", hot, (many, In("a b=300")), lambda i, x: i[:, None] == np.arange(300), ("float32",), differentiable=False)
    yield Row("take_many", lambda x, i: md.take(x, i, "b"), (In("a b=300"), many), taken, ("float32",))
    yield Row("put_add_many", put, (In("b=300 c"), In("t", "place:b=300", INDEX), In("t c")), added, ("float32",))
    loss = lambda x, i: md.nn.softmax_cross_entropy(x, i, "b")
    chosen = lambda x, i: soft.logsumexp(x, axis=1) - np.take_along_axis(x, i[:, None], 1)[:, 0]
    yield Row("cross_entropy_many", loss, (In("a b=300"), In("a", "inside:b=300", INDEX)), chosen, ("float32",), exact=False)
    sent = lambda i: md.nn.moe.route(None, tokens="a", experts="expert:300", capacity="slot:2", router="random", ids=i).dispatch

    def slots(i: Any) -> Any:
        out = np.zeros((len(i), 300, 2), bool)
        for token, expert in enumerate(i):
            filled = int(out[:, expert].sum())
            out[token, expert, filled : filled + 1] = True
        return out

    yield Row("route_many", sent, (In("a", "inside:b=300", INDEX),), slots, ("float32",), differentiable=False)
    yield Row("cumsum", lambda x: md.cumsum(x, "a"), (X,), lambda x: np.cumsum(x, 0), ("float32", "bfloat16", "int32"))
    last = lambda x: md.cumsum(x, "a", exclusive=True, reverse=True)
    yield Row("cumsum_last", last, (X,), lambda x: np.cumsum(x[::-1], 0)[::-1] - x, ("float32", "int32"))
    yield Row("cumsum_exclusive", lambda x: md.cumsum(x, "b", exclusive=True), (X,), lambda x: np.cumsum(x, 1) - x)
    yield Row("sort", lambda x: md.sort(x, "a"), (X,), lambda x: np.sort(x, 0), every)
    yield Row("argsort", lambda x: md.argsort(x, "b"), (X,), lambda x: np.argsort(x, 1, kind="stable"), every, differentiable=False)

    def best(x: Tensor) -> Any:
        return md.top_k(x, "b", Dim("k", (_n(x, "b") + 1) // 2))

    def largest(x: Any) -> Any:
        return jax.lax.top_k(x, (x.shape[1] + 1) // 2)

    yield Row("top_k", best, (X,), largest, every)
    every_one = lambda x: jax.lax.top_k(x, x.shape[1])
    yield Row("top_k_same", lambda x: md.top_k(x, "b", x.dims[1]), (X,), every_one)
    yield Row("top_k_all", lambda x: md.top_k(x, "b", Dim("k", _n(x, "b"))), (X,), every_one, every)


def _alongs() -> Iterator[Row]:
    def picked(x: Tensor, i: Tensor) -> Tensor:
        return bind1(indexing.TAKE_ALONG, x, i, over=x.dims[1], to=i.dims[0])

    def chosen(x: Any, i: Any) -> Any:
        i = i.T
        inside = (i >= 0) & (i < x.shape[1])
        return np.where(inside, np.take_along_axis(x, np.where(inside, i, 0), 1), 0)

    yield Row("take_along", picked, (X, In("c a", "place:b", INDEX)), chosen)
    yield Row("take_along_order", picked, (X, In("b a", "place:b", INDEX)), chosen)
    yield Row("take_along_renamed", picked, (X, In("b=c a", "place:b", INDEX)), chosen)

    def put(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        return y + bind1(indexing.PUT_ALONG, x, i, over=y.dims[0], to=x.dims[1])

    def summed(x: Any, i: Any, y: Any) -> Any:
        out = np.array(y)
        for a, c in np.ndindex(x.shape):
            if i[c, a] in range(len(y)):
                out[i[c, a], a] += x[a, c]
        return out

    yield Row("put_along", put, (In("a c"), In("c a", "place:b", INDEX), In("b a")), summed)
    yield Row("put_along_order", put, (In("a b"), In("b a", "place:b", INDEX), In("b a")), summed)
    yield Row("put_along_renamed", put, (In("a b=c"), In("b=c a", "place:b", INDEX), In("b a")), summed)


def _conv_of(spec: tuple[str, str, str], stride: Any, pads: Any, base: Any = None, dilation: Any = None) -> Callable[..., Any]:
    """lax's convolution; spec letters after a dot are dims that the operand lacks, added with size 1."""

    def reference(x: Any, w: Any) -> Any:
        lhs, rhs, out = (s.partition(".") for s in spec)
        x, w = (np.asarray(v).reshape(v.shape + (1,) * len(s[2])) for v, s in ((x, lhs), (w, rhs)))
        numbers = (lhs[0] + lhs[2], rhs[0] + rhs[2], out[0] + out[2])
        y = jax.lax.conv_general_dilated(x, w, stride, pads, base, dilation, numbers)
        return y.reshape(y.shape[: y.ndim - len(out[2])])

    return reference


def _windows() -> Iterator[Row]:
    sums = (*REAL, "int32")
    line, kernel = In("a b c"), In("k=3 c d")
    conv = lambda x, w: md.conv(x, w, window={"b": "k"}, out="a b d")
    yield Row("conv", conv, (line, kernel), _conv_of(("N0C", "0IO", "N0C"), (1,), [(1, 1)]), sums)
    strided = lambda x, w: md.conv(x, w, {"b": "k"}, "b d a", stride=2, dilation=2, padding={"b": (3, 4)})
    yield Row("conv_stride", strided, (In("c b a"), In("d c k=3")), _conv_of(("C0N", "OI0", "0CN"), (2,), [(3, 4)], None, (2,)), sums)
    based = lambda x, w: md.conv(x, w, {"b": "k"}, "a d b", base_dilation=3, stride=2, padding={"b": (-1, 4)})
    yield Row("conv_base", based, (line, In("k=4 d c")), _conv_of(("N0C", "0OI", "NC0"), (2,), [(-1, 4)], (3,)), REAL)
    plane = lambda x, w: md.conv(x, w, {"b": "k", "c": "l"}, "a b c t", stride={"c": 2}, padding={"b": (2, 0), "c": (1, 2)})
    yield Row("conv_two", plane, (In("a b c d"), In("k=3 l=2 d t")), _conv_of(("N01C", "01IO", "N01C"), (1, 2), [(2, 0), (1, 2)]), REAL)
    cube = lambda x, w: md.conv(x, w, {"b": "k", "c": "l", "d": "m"}, "a b c d t", padding=dict.fromkeys("bcd", (1, 1)), stride={"d": 2})
    yield Row("conv_three", cube, (In("a b c d e=2"), In("k=2 l=3 m=1 e=2 t")), _conv_of(("N012C", "012IO", "N012C"), (1, 1, 2), [(1, 1)] * 3), ("float32",))
    apart = lambda x, w: md.conv(x, w, {"b": "k"}, "a b e d", padding={"b": (1, 2)})

    def grouped(x: Any, w: Any) -> Any:
        parts = [_conv_of(("N0C", "0IO", "N0C"), (1,), [(1, 2)])(x[..., i, :], w[i]) for i in range(2)]
        return np.stack(parts, 2)

    yield Row("conv_group", apart, (In("a b e=2 c"), In("e=2 k=3 c d")), grouped, REAL)
    depth = lambda x, w: md.conv(x, w, {"b": "k"}, "a b c", padding={"b": (0, 2)})
    each = lambda x, w: np.stack([_conv_of(("N0.C", "0.IO", "N0.C"), (1,), [(0, 2)])(x[..., i], w[:, i]) for i in range(x.shape[-1])], -1)
    yield Row("conv_depthwise", depth, (line, In("k=3 c")), each, ("float32",))
    bare = lambda x, w: md.conv(x, w, {"b": "k"}, "b", padding={"b": (1, 1)})
    yield Row("conv_bare", bare, (V, In("k=2")), _conv_of(("0.NC", "0.IO", "0.NC"), (1,), [(1, 1)]), REAL)
    slid = lambda x, w: md.conv(x, w, {"b": ("b", "lag")}, "lag a d", padding={"b": (1, 1)})
    yield Row("conv_lag", slid, (In("c b a"), In("b c d")), _conv_of(("C0N", "0IO", "0NC"), (1,), [(1, 1)]), ("float32",))
    wide = lambda x, w: md.conv(x, w, {"b": "k"}, "a b d", dtype="float32")
    wider = lambda x, w: _conv_of(("N0C", "0IO", "N0C"), (1,), [(1, 1)])(x.astype(np.float32), w.astype(np.float32))
    yield Row("conv_dtype", wide, (line, kernel), wider, ("bfloat16",))

    def pooled(reduce: Any, start: Any, size: tuple[int, ...], stride: tuple[int, ...], pads: Any) -> Callable[..., Any]:
        return lambda x: jax.lax.reduce_window(jnp.asarray(x), np.asarray(start, x.dtype), reduce, size, stride, pads)

    lowest = lambda x: -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    best = lambda x: pooled(jax.lax.max, lowest(x), (1, 2), (1, 2), [(0, 0), (0, 0)])(x)
    yield Row("max_pool", lambda x: md.max_pool(x, {"b": 2}), (X,), best, (*REAL, *INTS), smooth=False)
    best_two = lambda x: pooled(jax.lax.max, lowest(x), (3, 1, 2), (2, 1, 1), [(1, 2), (0, 0), (3, 1)])(x)
    two = lambda x: md.max_pool(x, {"a": 3, "c": 2}, stride={"a": 2}, padding={"a": (1, 2), "c": (3, 1)})
    yield Row("max_pool_two", two, (In("a b c"),), best_two, sums, smooth=False)
    total = pooled(jax.lax.add, 0, (3, 1), (2, 1), [(1, 1), (0, 0)])
    yield Row("sum_pool", lambda x: pooling.sum_pool(x, {"a": 3}, 2, {"a": (1, 1)}), (X,), total, sums)
    mean = lambda x: total(x) / total(np.ones_like(x))
    yield Row("avg_pool", lambda x: md.avg_pool(x, {"a": 3}, 2, {"a": (1, 1)}), (X,), mean, REAL, exact=False)
    mean_two = lambda x: pooled(jax.lax.add, 0, (2, 3), (2, 3), [(0, 0), (0, 0)])(x) / 6
    yield Row("avg_pool_two", lambda x: md.avg_pool(x, {"a": 2, "b": 3}), (X,), mean_two, ("float32",), exact=False)
    every = Window("b", "b", 3, stride=2, dilation=2, low=2, high=3)
    places = (Dim("place", 3),)

    def unfolded(x: Any) -> Any:
        padded = np.pad(x, [(0, 0), (2, 3)])
        n = max(0, (padded.shape[1] - 5) // 2 + 1)
        return np.stack([padded[:, 2 * k : 2 * k + 2 * n : 2][:, :n] for k in range(3)], -1)

    yield Row("unfold", lambda x: bind1(pooling.UNFOLD, x, window=(every,), places=places, value=0), (X,), unfolded, (*REAL, *INTS))

    def folded(x: Any) -> Any:
        out = np.zeros((x.shape[0], x.shape[1] + 2), x.dtype)
        for k in range(3):
            out[:, k : k + x.shape[1]] += x[..., k]
        return out[:, 1:-1]

    fold = Window("b", "b", 3, low=1, high=1)
    yield Row("fold", lambda x: bind1(pooling.FOLD, x, window=(fold,), places=places), (In("a b place=3"),), folded, REAL)


def _weights(s: Any, seen: Any = True) -> Any:
    """The softmax over the last axis of the scores that are seen; zeros for a query that sees none."""
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True, initial=-1e30), -1e30))
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-30)


def _attentions() -> Iterator[Row]:
    fixed: dict[str, Any] = {"exact": False, "odd": False, "dtypes": ("float32",)}
    q, k, v = In("a b c d"), In("a c b d"), In("a b c d")  # batch, length, heads, head
    ours = lambda **how: lambda q, k, v, *_, **more: md.attention(q, k, v, over="d", length="b", memory="t", **how)

    def reference(causal: bool = False, window: int = 1 << 20) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            s = np.einsum("albd,abmd->ablm", q, k) / np.sqrt(max(1, q.shape[-1]))
            at = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[2]))
            seen = (at < window) & ((at >= 0) if causal else (at > -window))
            return np.einsum("ablm,ambd->albd", _weights(s, seen), v)

        return attend

    yield Row("attention", ours(), (q, k, v), reference(), **{**fixed, "dtypes": ("float32", "bfloat16")})
    yield Row("attention_ring", ours(causal=True, method="ring", block=2), (q, k, v), reference(causal=True), **fixed)
    yield Row("attention_exchange", ours(causal=True, window=2, method="all_to_all"), (q, k, v), reference(True, 2), **fixed)
    yield Row("attention_window", ours(window=3, method="gather"), (q, k, v), reference(False, 3), **fixed)

    memory, value = In("a t d"), In("a t c")

    def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Any:
        return md.attention(q, k, v, over="d", length="b", memory="t", bias=bias, mask=mask)

    def masked_reference(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        s = np.einsum("abd,atd->abt", q, k) / np.sqrt(max(1, q.shape[-1])) + bias.T
        return np.einsum("abt,atc->abc", _weights(s, mask[:, None]), v)

    extras = (In("t b"), In("a t", dtype="bool"))
    yield Row("attention_memory", masked, (In("a b d"), memory, value, *extras), masked_reference, **fixed)

    def segmented(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        ids = md.cast(ids > 0, "int32")
        return md.attention(q, k, v, over="d", length="b", memory="t", segment_ids=ids, causal=True)

    def segmented_reference(q: Any, k: Any, v: Any, ids: Any) -> Any:
        s = np.einsum("lcd,md->clm", q, k) / np.sqrt(max(1, q.shape[-1]))
        seen = ((ids[:, None] > 0) == (ids[None] > 0)) & np.tri(len(k), dtype=bool)
        return np.einsum("clm,md->lcd", _weights(s, seen), v)

    yield Row("attention_segments", segmented, (In("b c d"), In("b d"), In("b d"), In("b")), segmented_reference, **fixed)

    def one(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Any:
        return md.attention(q, k, v, over="d", length="b", memory="t", causal=True, offset=at)

    def one_reference(q: Any, k: Any, v: Any, at: Any) -> Any:
        s = np.einsum("acd,atd->act", q, k) / np.sqrt(max(1, q.shape[-1]))
        return np.einsum("act,ate->ace", _weights(s, np.arange(k.shape[1]) <= at), v)

    yield Row("attention_one", one, (In("a c d"), memory, In("a t e=2"), In("", "inside:t", "int32")), one_reference, **fixed)
    cotangent = lambda q, k, v: md.grad(lambda q: md.sum(md.square(md.attention(q, k, v, over="d", length="b", memory="t"))))(q)
    yield Row("attention_grad", cotangent, (In("b d"), In("b d"), In("b d")), differentiable=False, **fixed)


def _placements() -> Iterator[Row]:
    yield Row("prefer", lambda x: md.prefer(x * 2, "b", "a"), (X,), lambda x: x * 2)
    yield Row("replicate", lambda x: md.replicate(x * 2), (X,), lambda x: x * 2)
    some = lambda x, n: md.ragged(md.where(md.broadcast(md.iota(x.dims[-1], n.dtype), x.dims) < n, x, 0), n, "b")
    yield Row("ragged", some, (X, In("a", "inside:b", "int32")), lambda x, n: np.where(np.arange(x.shape[1]) < n[:, None], x, 0))
    mask = lambda x: bind1(MASK, x, over=x.dims[:1], fill=7)
    yield Row("mask", mask, (X,), np.asarray, (*REAL, *INTS), differentiable=False)
    yield Row("barrier", lambda x: bind1(BARRIER, x), (X,), np.asarray)
    near, wide = In("a=24*a b"), In("a=24*a b=24*b")  # blocks that few meshes divide unevenly
    by_row = lambda x, y: md.local(lambda x, y: x * x * y - md.sum(x, "b"), x, y, out="b a", whole="b")
    yield Row("local", by_row, (near, V), lambda x, y: (x * x * y - x.sum(1, keepdims=True)).T, ("float32",))
    added = lambda x, y: md.local(lambda x, y: md.sum(md.sign(y) * x * x, "a"), x, y, out="b")
    yield Row("local_sum", added, (wide, In("b=24*b")), lambda x, y: (np.sign(y) * x * x).sum(0), ("float32",), smooth=False)
    whole_b = lambda x, y: md.local(lambda x, y: jnp.cumsum(x * y, 1), x, y, out="a b", split="a")
    yield Row("local_jax", whole_b, (near, V), lambda x, y: np.cumsum(x * y, 1), ("float32",))
    over_a = lambda x, y: md.local(lambda x, y: jnp.einsum("ab,b->b", x, y), x, y, out="b", split="b", contract="a")
    yield Row("local_jax_sum", over_a, (wide, In("b=24*b")), lambda x, y: (x * y).sum(0), ("float32",))
    yield Row("print", lambda x: md.print(x, "x") * 2, (X,), lambda x: x * 2)
    yield Row("name", lambda x: md.name(x, "y") * 2, (X,), lambda x: x * 2)
    yield Row("keep", lambda x: bind1(KEEP, x, md.transpose(x, "a b")), (X,), np.asarray)


def _randoms() -> Iterator[Row]:
    fixed: dict[str, Any] = {"dtypes": ("float32",), "differentiable": False}

    def wrap(key: Any) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(key))

    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        yield Row(f"bits_{dtype}", lambda k, x, d=dtype: md.random.bits(k, x.dims, d), (KEY, In("a b c")), lambda k, x, d=dtype: jax.random.bits(wrap(k), x.shape, d), **fixed)
    yield Row("fold_in", lambda k, i: md.random.fold_in(k, i), (KEY, In("a", "inside:b", "int32")), lambda k, i: jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(wrap(k), i)))(i), **fixed)
    yield Row("split", lambda k: md.random.split(k, 3)[1], (KEY,), lambda k: jax.random.key_data(jax.random.split(wrap(k), 3)[1]), **fixed)
    yield Row("uniform", lambda k, x: md.random.uniform(k, x.dims), (KEY, X), lambda k, x: jax.random.uniform(wrap(k), x.shape, "float32"), **fixed)
    yield Row("normal", lambda k, x: md.random.normal(k, x.dims), (KEY, X), lambda k, x: jax.random.normal(wrap(k), x.shape, "float32"), exact=False, **fixed)
    yield Row("bernoulli", lambda k, p, x: md.random.bernoulli(k, 0.5 + p / 2, x.dims), (KEY, In("b", "unit", "float32"), X), lambda k, p, x: jax.random.bernoulli(wrap(k), 0.5 + p / 2, x.shape), **fixed)
    yield Row("permutation", lambda k, x: md.random.permutation(k, x, "a"), (KEY, X), lambda k, x: jax.random.permutation(wrap(k), x), **fixed)
    yield Row("randint", lambda k, x: md.random.randint(k, x.dims, -2, 7), (KEY, X), lambda k, x: jax.random.randint(wrap(k), x.shape, -2, 7, "int32"), **fixed)


def _associatives() -> Iterator[Row]:
    def recurrence(a: Tensor, b: Tensor, reverse: bool = False) -> Any:
        then = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
        return md.associative_scan(then, (md.sign(a), b), over="t", reverse=reverse)

    def recurred(a: Any, b: Any) -> Any:
        product, total, rows = np.ones_like(a[:1].sum(0)), np.zeros_like(b[:1].sum(0)), []
        for one, more in zip(np.sign(a), b, strict=True):
            product, total = product * one, one * total + more
            rows.append((product, total))
        return [np.array([row[k] for row in rows]).reshape(a.shape) for k in (0, 1)]

    back = lambda a, b: [x[::-1] for x in recurred(a[::-1], b[::-1])]
    yield Row("associative_scan", recurrence, (In("t a", "nonzero"), In("t a")), recurred, ("float32",), odd=False)
    reverse = lambda a, b: recurrence(a, md.transpose(b, "t a"), True)
    yield Row("associative_scan_reverse", reverse, (In("t a", "nonzero"), In("a t")), lambda a, b: back(a, b.T), ("float32",), odd=False)
    turned = lambda p, q: md.rename(md.einsum(md.rename(p, d="k"), md.rename(q, c="k"), out="c d"), c="c")
    products = lambda x: md.associative_scan(turned, x, over="t")

    def powers(x: Any) -> Any:
        total, found = np.eye(x.shape[1]), []
        for one in x:
            total = total @ one
            found.append(total)
        return np.array(found).reshape(x.shape)

    yield Row("associative_scan_products", products, (In("t c=d d", "unit"),), powers, ("float32",), exact=False, odd=False)
    yield Row("cumprod", lambda x: md.cumprod(x, "a"), (In("a b", "unit"),), lambda x: np.cumprod(x, 0), ("float32",), exact=False, odd=False)
    last = lambda x: md.cumprod(x, "b", exclusive=True, reverse=True)
    ends = lambda x: np.cumprod(np.concatenate([x[:, 1:], np.ones_like(x[:, :1])], 1)[:, ::-1], 1)[:, ::-1]
    yield Row("cumprod_last", last, (In("a b", "unit"),), ends, ("float32",), exact=False, odd=False)


def _choices() -> Iterator[Row]:
    bounded = lambda x: md.while_loop(lambda c: md.sum(md.abs(c)) < 40, lambda c: c + c, x + md.sign(x) + 1, max_trips=3)

    def ran_three(x: Any) -> Any:
        x, n = x + np.sign(x) + 1, 0
        while n < 3 and np.abs(x).sum() < 40:
            x, n = x + x, n + 1
        return x

    yield Row("while_bounded", bounded, (X,), ran_three, ("float32",))
    three = [lambda x: x * x, lambda x: -x, lambda x: x + x]
    chosen = lambda i, x: md.switch(i, three, x)
    picked = lambda i, x: (x * x, -x, x + x)[min(max(int(i), 0), 2)]
    yield Row("switch", chosen, (In("", "place:t", INDEX), X), picked, smooth=False)


def _controls() -> Iterator[Row]:
    series = In("t a")

    def recur(w: Tensor, c: Tensor, x: Tensor) -> Any:
        def step(c: Tensor, x: Tensor) -> Any:
            return md.rename(md.einsum(c, w, out="b") + x, b="a"), (md.rename(c, a="b") * x, md.sum(x))

        return md.scan(step, c, x, over="t")

    def ran(w: Any, c: Any, x: Any) -> Any:
        first, second = [], []
        for row in x:
            first, second, c = [*first, c * row], [*second, row.sum()], c @ w + row
        return c, np.array(first), np.array(second)

    square_in = (In("a=b b", "unit"), In("a=b"), In("t b"))
    yield Row("scan", recur, square_in, ran, ("float32",))
    total = lambda c, x: md.scan(lambda c, x: (c + x, c), c, x, over="t", reverse=True)
    back = lambda c, x: (c + x.sum(0), c + np.cumsum(x[::-1], 0)[::-1] - x)
    yield Row("scan_reverse", total, (In("a"), series), back)
    inner = lambda x: md.scan(lambda c, x: (c, x * x), 0.0, x, over="t")[1]
    yield Row("scan_inner_dim", inner, (In("a t b"),), lambda x: np.moveaxis(x * x, 1, 0))
    count = lambda c: md.scan(lambda c, _: (c * 2, c), c, None, over=Dim("t", 3))
    yield Row("scan_no_xs", count, (In("a"),), lambda c: (8 * c, np.stack([c, 2 * c, 4 * c])))

    def nested(c: Tensor, x: Tensor) -> Any:
        def outer(c: Tensor, x: Tensor) -> Any:
            return md.scan(lambda s, y: (s * 0.5 + y * c, s), c, x, over="d")

        return md.scan(outer, c, x, over="t")

    def unnested(c: Any, x: Any) -> Any:
        rows = []
        for one in x:
            s, row = c, []
            for y in one:
                row.append(s)
                s = s * 0.5 + y * c
            rows.append(row)
            c = s
        return c, np.array(rows)

    yield Row("scan_nested", nested, (In(""), In("t d", "unit")), unnested, ("float32",), exact=False)

    def doubled(x: Tensor, y: Tensor) -> Any:
        more = lambda c: (c[1] < 5) & (md.sum(c[0] * c[0]) < 1000)
        return md.while_loop(more, lambda c: (2 * c[0] - y, c[1] + 1), (x, 0))

    def ran_on(x: Any, y: Any) -> Any:
        n = 0
        while n < 5 and (x * x).sum() < 1000:
            x, n = 2 * x - y, n + 1
        return x, np.int32(n)

    def added(x: Tensor) -> Any:  # the sum can stay partial until the loop ends
        start = (md.broadcast(md.cast(0, x.dtype), [d for d in x.dims if d.name == "b"]), 0)
        return md.while_loop(lambda c: c[1] < 3, lambda c: (c[0] + md.sum(x * md.cast(c[1], x.dtype), "a"), c[1] + 1), start)[0]

    yield Row("while_loop", doubled, (X, V), ran_on, ("float32",), differentiable=False)
    yield Row("while_pending", added, (X,), lambda x: 3 * x.sum(0), ("float32",), differentiable=False)
    held = lambda p, x, y: md.cond(p, lambda x: x * y, lambda x: x + 1, x)
    yield Row("cond", held, (In("", dtype="bool"), X, V), lambda p, x, y: x * y if p else x + 1)
    both = lambda x: md.cond(md.sum(x) > 0, lambda x: (x, 2 * x), lambda x: (3 * x, x * x), x)
    yield Row("cond_inside", both, (X,), lambda x: (x, 2 * x) if x.sum() > 0 else (3 * x, x * x))
    again = lambda x, w: md.checkpoint(lambda x: md.square(md.einsum(x, w, out="a c")) * 2)(x)
    yield Row("checkpoint", again, (X, W), lambda x, w: 2 * np.square(x @ w))
    two = lambda x, w: md.square(md.rename(md.name(md.einsum(md.square(x), w, out="a c"), "y"), c="d") + md.max(x, "b"))
    two_of = lambda x, w: np.square(np.square(x) @ w + x.max(1, keepdims=True))
    for policy in ("collectives", "names:y"):
        kept = lambda x, w, p=policy: md.checkpoint(two, p)(x, w) * 2
        yield Row(f"checkpoint_{policy[:5]}", kept, (X, W), lambda x, w: 2 * two_of(x, w), ("float32",), exact=False, smooth=False, empty=False)  # ties share the gradient
        run_on = lambda c, x, w, p=policy: md.scan(md.checkpoint(lambda c, x: (md.sum(md.sign(two(c, w)), "d") * c - md.sum(c) + x, c), p), c, x, over="t")
        yield Row(f"scan_checkpoint_{policy[:5]}", run_on, (X, In("t a b"), W), None, ("float32",), exact=False, empty=False)
    layers = lambda x, w: md.scan(md.checkpoint(lambda x, w: (x * w + x, {})), x, w, over="t")[0]
    yield Row("scan_checkpoint", layers, (In("a"), series), lambda x, w: x * np.prod(1 + w, axis=0), ("float32",))

    def own(x: Tensor, y: Tensor) -> Any:
        def forward(x: Tensor, y: Tensor) -> Any:
            return x * y, (x, y)

        return md.custom_vjp(lambda x, y: x * y, forward, lambda r, ct: (ct * r[1], md.sum(ct * r[0], "a")))(x, y)

    yield Row("custom_vjp", own, (X, V), lambda x, y: x * y)


# fmt: on


def rows() -> list[Row]:
    """Every row of the table."""
    families = (
        _unaries, _binaries, _contractions, _shapes, _indices, _alongs, _windows, _attentions, _placements, _randoms,
        _controls, _associatives, _choices,
    )  # fmt: skip
    found = [row for family in families for row in family()]
    assert len({row.name for row in found}) == len(found)
    return found


def leaves(x: Any) -> list[Any]:
    """The tensors of a result, in order."""
    return tree.tree_leaves(x)


def widest(dtype: Any) -> np.dtype:
    """The dtype in which values of a narrow float dtype are compared."""
    return np.dtype(np.float32) if np.dtype(dtype) in (ml_dtypes.bfloat16, np.float16) else np.dtype(dtype)
