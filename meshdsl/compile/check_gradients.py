"""`md.check_gradients`: the derivatives of a function are those of its values.

A derivative is compared with central differences in float64: <ct, f(x + h v) - f(x - h v)> / 2h with <pull(ct), v> for
a random cotangent ct and a random direction v of one argument, which a rule that is wrong anywhere passes with
probability zero. Halves of a direction that fails, and of its failing half, and so on, find an element that is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..control.autodiff import is_floating
from ..control.carry import leaves_of
from ..control.derivatives import jvp, vjp
from ..errors import MeshdslError, ShapeError
from ..ir import Graph, walk
from ..layouts import Layout, Mesh
from ..ops.creation import zeros_like
from ..ops.dtypes import cast, kind
from ..trace import Tensor, tensor, tree
from .api import compile

Arrays = Sequence[np.ndarray]


def check_gradients(
    f: Callable[..., Any],
    *args: Any,
    mesh: Mesh | str = "",
    layout: Layout | str = "",
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    """Compare `md.vjp` and `md.jvp` of f with differences of its values; raise `MeshdslError` where they differ.

    >>> import meshdsl as md
    >>> w, x = md.ones("io:3 hidden:2"), md.ones("batch:4 io:3")
    >>> md.check_gradients(lambda w, x: md.sin(md.dot(x, w, "io")), w, x, mesh="rows:2", layout="batch:rows")
    >>> square = md.custom_vjp(md.square, lambda x: (md.square(x), x), lambda x, ct: (2 * x,))  # forgets ct
    >>> md.check_gradients(square, x)
    Traceback (most recent call last):
        ...
    meshdsl.errors.MeshdslError: md.vjp of square is wrong for x at [batch=..., io=...]
      it gives 2, and differences of values ..., for a random cotangent
      ...

    Arguments and results are pytrees of tensors, of any dims. Floating arguments are cast to float64 (complex ones to
    complex128), in which differences have ten digits; JAX's 64-bit types are enabled for the time of the call. f runs
    under the mesh and the layout (default: on one device), a few times for each argument. Cotangents and directions are
    random, by `seed`. `tolerance` is the largest relative difference (default: 1e-5, and 0.01 if f itself computes in
    float32). f must be smooth at the arguments: a gradient that is meant to differ, such as a straight-through one, is
    an error too.

    Raises `MeshdslError` with the argument and the element whose gradient is wrong, and `ShapeError` if no argument or
    no result is floating, if a result is not finite, and if f computes in 8 or 16 bits.
    """
    with jax.enable_x64(True):
        _Check(f, args, mesh, layout, seed, tolerance).run()


class _Check:
    """One function with its arguments in float64, and differences of its values."""

    def __init__(self, f: Callable[..., Any], args: Any, mesh: Any, layout: Any, seed: int, tolerance: float | None):
        self.f, self.mesh, self.layout, self.random = f, mesh, layout, np.random.default_rng(seed)
        self.name = getattr(f, "__name__", type(f).__name__)
        leaves, self.structure = leaves_of(args)
        wide = {"f": "float64", "c": "complex128"}
        self.xs = [cast(x, wide.get(kind(x.dtype), x.dtype)) for x in leaves]
        self.moving = [i for i, x in enumerate(self.xs) if is_floating(x)]
        if not self.moving:
            raise ShapeError(f"md.check_gradients needs a floating argument, got {[x.type for x in leaves]}")
        self.step = compile(f, mesh, layout)
        graph = self.step.graph(*self.args(self.xs))
        self.names = [v.name for v in graph.ins]
        precision = _precision(graph, self.moving)
        self.h, self.eps = precision ** (1 / 3), precision
        self.tolerance = tolerance if tolerance is not None else 1e-5 if precision < 1e-10 else 1e-2
        self.result = self.step(*self.args(self.xs))
        self.ys, self.out = leaves_of(self.result)
        self.floating = [i for i, y in enumerate(self.ys) if is_floating(y)]
        if not self.floating:
            raise ShapeError(f"md.check_gradients needs a floating result, got {[y.type for y in self.ys]}")
        for y in (self.ys[i] for i in self.floating):
            if not np.isfinite(y.numpy()).all():
                raise ShapeError(f"md.check_gradients: a result of f, {y.type}, is not finite at these arguments")

    def args(self, xs: Sequence[Tensor]) -> tuple[Any, ...]:
        return tree.tree_unflatten(self.structure, xs)

    def run(self) -> None:
        cts = [zeros_like(y) if i not in self.floating else self.drawn(y) for i, y in enumerate(self.ys)]
        weights = [cts[i].numpy() for i in self.floating]
        pulled = self.compiled(lambda *xs: vjp(self.f, *xs)[1](tree.tree_unflatten(self.out, cts)))
        for i, gradient in zip(self.moving, pulled, strict=True):
            self.check_argument(i, gradient, weights)
        vs = [self.drawn(x, like=True) if i in self.moving else zeros_like(x) for i, x in enumerate(self.xs)]
        pushed = self.compiled(lambda *xs: jvp(self.f, xs, self.args(vs))[1], floating=self.floating)
        self.check_results(pushed, self.differences({i: vs[i].numpy() for i in self.moving}))

    def compiled(self, function: Callable[..., Any], floating: Sequence[int] | None = None) -> list[np.ndarray]:
        """The floating results of a function of f's arguments, under f's mesh and layout."""
        step = compile(functools.wraps(self.f)(function), self.mesh, self.layout)  # with f's names of arguments
        leaves = tree.tree_leaves(step(*self.args(self.xs)))
        return [leaves[i].numpy() for i in floating or range(len(leaves))]

    def drawn(self, x: Tensor, like: bool = False) -> Tensor:
        """Random numbers of this type, `like` x in size, so that a small step in their direction changes little."""
        values = self.random.normal(size=x.shape)
        if x.dtype.kind == "c":
            values = values + 1j * self.random.normal(size=x.shape)
        scale = np.maximum(np.abs(x.numpy()), 0.01) if like else 1.0
        return cast(tensor(values * scale, x.dims), x.dtype)

    def differences(self, directions: dict[int, np.ndarray]) -> list[np.ndarray]:
        """The derivative of each floating result in the directions of some arguments."""

        def at(h: float) -> Iterator[np.ndarray]:
            xs = [
                tensor(x.numpy() + h * directions[i], x.dims) if i in directions else x for i, x in enumerate(self.xs)
            ]
            leaves, _ = leaves_of(self.step(*self.args(xs)))
            return (leaves[i].numpy().astype(np.result_type(leaves[i].dtype, np.float64)) for i in self.floating)

        return [(after - before) / (2 * self.h) for after, before in zip(at(self.h), at(-self.h), strict=True)]

    def check_argument(self, i: int, gradient: np.ndarray, weights: Arrays) -> None:
        """Raise with an element of the argument whose gradient is not that of the values."""
        direction = self.drawn(self.xs[i], like=True).numpy()
        values = (self.ys[j].numpy() for j in self.floating)
        noise = 8 * self.eps / self.h * sum(_size(w * y) for w, y in zip(weights, values, strict=True))

        def both(v: np.ndarray) -> tuple[float, float, float]:
            """The derivative along v by the gradient and by differences, and the difference that is allowed."""
            by_values = self.differences({i: v})
            scale = _size(gradient * v) + sum(_size(w * d) for w, d in zip(weights, by_values, strict=True))
            found = sum(float(np.sum(w * d).real) for w, d in zip(weights, by_values, strict=True))
            return float(np.sum(gradient * v).real), found, self.tolerance * scale + noise

        ours, theirs, allowed = both(direction)
        if abs(ours - theirs) <= allowed:
            return
        places = np.arange(direction.size)
        while len(places) > 1:
            half = places[: len(places) // 2]
            a, b, _ = both(_only(direction, half))
            left, right = abs(a - b), abs((ours - a) - (theirs - b))
            places, ours, theirs = (half, a, b) if not left < right else (places[len(half) :], ours - a, theirs - b)
        ours, theirs, _ = both(_only(direction, places))
        step = direction.reshape(-1)[places[0]]
        scale = step if kind(direction.dtype) == "f" else abs(step)
        raise MeshdslError(
            f"md.vjp of {self.name} is wrong for {self.names[i]}{_place(self.xs[i], int(places[0]))}\n"
            f"  it gives {ours / scale:.6g}, and differences of values {theirs / scale:.6g}, for a random cotangent"
            f"{self.under()}\n"
            "  if f has a md.custom_vjp: bwd multiplies its derivative by the cotangent, for each argument"
        )

    def check_results(self, pushed: Arrays, by_values: Arrays) -> None:
        """Raise with an element of a result whose derivative is not that of the values."""
        for j, ours, theirs in zip(self.floating, pushed, by_values, strict=True):
            noise = 8 * self.eps / self.h * float(np.max(np.abs(self.ys[j].numpy()), initial=0))
            size = np.maximum(np.maximum(np.abs(ours), np.abs(theirs)), _size(theirs) / max(theirs.size, 1) ** 0.5)
            wrong = ~(np.abs(ours - theirs) <= self.tolerance * size + noise)
            if wrong.any():
                place = int(np.argmax(wrong))
                label = f"result {j}" if len(self.ys) > 1 else "the result"
                raise MeshdslError(
                    f"md.jvp of {self.name} is wrong for {label}{_place(self.ys[j], place)}\n"
                    f"  it gives {ours.reshape(-1)[place]:.6g}, and differences of values "
                    f"{theirs.reshape(-1)[place]:.6g}, in a random direction{self.under()}"
                )

    def under(self) -> str:
        return f", on {self.mesh} under '{self.layout}'" if str(self.mesh) else ""


def _precision(graph: Graph, moving: Sequence[int]) -> float:
    """The precision of the narrowest float that depends on the arguments; raises `ShapeError` below that of float32."""
    known = {graph.ins[i] for i in moving}
    eps = float(np.finfo(np.float64).eps)
    for eqn in graph.eqns:
        if known.isdisjoint(eqn.ins):
            continue
        known.update(eqn.outs)
        inner = (v for sub in eqn.graphs().values() for each, _ in walk(sub) for v in each.outs)
        for v in (*eqn.outs, *inner):
            if is_floating(v) and v.dtype.itemsize < 4:
                raise ShapeError(
                    f"md.check_gradients: f computes in {v.dtype.name}, in which differences of values have no digits\n"
                    "  leave out casts to fewer than 32 bits, for example with md.nn.Precision()"
                )
            if v.dtype in (np.float32, np.complex64):
                eps = float(np.finfo(np.float32).eps)
    return eps


def _size(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.abs(x) ** 2)))


def _only(direction: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The direction with zeros at all other places."""
    out = np.zeros_like(direction)
    out.reshape(-1)[places] = direction.reshape(-1)[places]
    return out


def _place(x: Tensor, place: int) -> str:
    """Where an element is, by the names of its dims."""
    index = np.unravel_index(place, x.shape)
    return f" at [{', '.join(f'{d.name}={k}' for d, k in zip(x.dims, index, strict=True))}]" if x.dims else ""
