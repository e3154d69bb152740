"""`ArrayFunction`: a function of tensors for one mesh and layout, and those of its derivatives and of one more dim.

A function that is derived from another one is traced when JAX asks for its types, and partitioned when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..control.autodiff import pullback
from ..control.batching import batched
from ..control.derivatives import jvp
from ..dims import Dim, fresh_dim
from ..ir import Graph, Type
from ..layouts.layout import within
from ..lowering.partition.legality import named_by_layouts
from ..ops.creation import zeros_like
from ..trace import Tensor, evaluate, location, tree
from .pipeline import Options
from .signature import Stages, Traced

Apply = Callable[..., Sequence[Tensor]]
Transposed = Callable[[], "ArrayFunction"]


class ArrayFunction:
    """A function of tensors, whose stages are for the mesh and the layout of `like`.

    `linear` are the arguments in which it is linear, jointly. `transposed` then gives the function from the other
    arguments and the cotangents of all results to the cotangents of these.
    """

    def __init__(
        self,
        apply: Apply,
        ins: Sequence[Type],
        labels: Sequence[str],
        like: Stages,
        outs: Sequence[Type] | None = None,
        linear: Sequence[int] = (),
        transposed: Transposed | None = None,
    ):
        self.apply, self.ins, self.labels, self.like = apply, tuple(ins), tuple(labels), like
        self.linear, self.transposed = frozenset(linear), transposed
        self._outs = outs
        self._derived: dict[Any, Any] = {}

    @staticmethod
    def of(stages: Stages) -> ArrayFunction:
        """The function of stages. It donates no argument, because JAX may use the argument again for a derivative."""
        graph = stages.graph
        function = ArrayFunction(
            lambda *xs: evaluate(graph, xs), [v.type for v in graph.ins], [v.name for v in graph.ins], stages
        )
        function.stages = stages if not stages.donate else stages.without_donation()
        return function

    def __repr__(self) -> str:
        return f"<{len(self.ins)} arrays to {len(self.outs)}>"

    @cached_property
    def stages(self) -> Stages:
        structure = tree.tree_structure(tuple(range(len(self.ins))))
        traced = Traced(lambda *xs: list(self.apply(*xs)), structure, self.ins, self.labels, self.like.platform)
        options = Options(attention_kernel=self.like.options.attention_kernel)
        layout = within(self.like.layout, *named_by_layouts(traced.begun[-1].graph, None))  # it may lack dims of `like`
        return Stages(traced, self.like.mesh, layout, (), options)

    @property
    def graph(self) -> Graph:
        return self.stages.graph

    @cached_property
    def outs(self) -> tuple[Type, ...]:
        return tuple(v.type for v in self.graph.outs) if self._outs is None else tuple(self._outs)

    @property
    def floating_ins(self) -> list[int]:
        return [i for i, t in enumerate(self.ins) if _floating(t)]

    @property
    def floating_outs(self) -> list[int]:
        return [i for i, t in enumerate(self.outs) if _floating(t)]

    @cached_property
    def devices(self) -> Any:
        """A jaxpr with a sharding over the mesh.

        `jax.jit` finds the devices that it compiles for in the jaxprs among the parameters of its equations.
        """
        everywhere = NamedSharding(self.like.bound, PartitionSpec())
        return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, everywhere))(0.0)

    def jvp(self, moving: tuple[int, ...]) -> ArrayFunction:
        """From the arguments, and tangents of those in `moving`, to the tangents of the floating results."""
        n = len(self.ins)

        def derivative(*args: Tensor) -> Sequence[Tensor]:
            xs, tangents = args[:n], args[n:]

            def along(*moved: Tensor) -> list[Tensor]:
                at = dict(zip(moving, moved, strict=True))
                ys = evaluate(self.graph, [at.get(i, x) for i, x in enumerate(xs)])
                return [ys[i] for i in self.floating_outs]

            return jvp(along, tuple(xs[i] for i in moving), tuple(tangents))[1]

        outs = [self.outs[i] for i in self.floating_outs]
        return self._linear(("jvp", moving), derivative, [self.ins[i] for i in moving], outs, lambda: self.vjp(moving))

    def vjp(self, moving: tuple[int, ...]) -> ArrayFunction:
        """From the arguments, and cotangents of the floating results, to cotangents of the arguments in `moving`."""
        n = len(self.ins)

        def gradient(*args: Tensor) -> Sequence[Tensor]:
            xs, cts = args[:n], dict(zip(self.floating_outs, args[n:], strict=True))
            _, backward = pullback(self.graph, xs, [i in moving for i in range(n)])
            with location(None, backward=True):
                grads = backward([cts.get(i) for i in range(len(self.outs))])
            return [zeros_like(xs[i]) if (g := grads[i]) is None else g for i in moving]

        cts = [self.outs[i] for i in self.floating_outs]
        outs = [self.ins[i] for i in moving]
        return self._linear(("vjp", moving), gradient, cts, outs, lambda: self.jvp(moving))

    def _linear(
        self, key: Any, apply: Apply, more: Sequence[Type], outs: Sequence[Type], transposed: Transposed
    ) -> ArrayFunction:
        """The function that `apply` computes from the arguments and more of them, in which it is linear."""
        if key not in self._derived:
            n, ins = len(self.ins), (*self.ins, *more)
            labels = (*self.labels, *(f"{key[0]}/{i}" for i in range(len(more))))
            linear = range(n, len(ins))
            self._derived[key] = ArrayFunction(apply, ins, labels, self.like, outs, linear, transposed)
        return self._derived[key]

    def batched(self, mapped: tuple[bool, ...], size: int) -> tuple[ArrayFunction, Dim]:
        """The function of arguments that have one more dim first where `mapped`, and the dim."""
        key = (mapped, size)
        if key not in self._derived:
            new = fresh_dim(Dim("vmap", size), self.graph.known_dim_names, self.like.graph.mentions)
            ins = [Type((new, *t.dims), t.dtype) if on else t for t, on in zip(self.ins, mapped, strict=True)]
            apply: Apply = lambda *xs: batched(self.graph, xs, new)  # noqa: E731 - one line
            self._derived[key] = ArrayFunction(apply, ins, self.labels, self.like, None, tuple(self.linear)), new
        return self._derived[key]


def _floating(t: Type) -> bool:
    return bool(jnp.issubdtype(t.dtype, np.inexact))
