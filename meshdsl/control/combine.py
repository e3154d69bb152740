"""The function of an associative scan: which dims it treats place by place, and how it runs on blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dims import Dim, Shape, names
from ..errors import ShapeError, TraceError, at
from ..ir import Call, Eqn, Type, walk
from ..ops.reshape import transpose
from ..trace import Tensor, trace, tree
from .batching import at_all_places
from .blockwise import run_on
from .carry import leaves_of


@dataclass(frozen=True, eq=False)
class Combine:
    """`flat(*a, *b)` combines two elements of an associative scan, each a list of tensors, and returns one.

    The dims in `free` are treated place by place, so they may be split; if `elementwise`, all dims are.
    """

    flat: Callable[..., Sequence[Tensor]]
    name: str
    free: frozenset[str]
    elementwise: bool
    operations: int

    def __call__(self, *xs: Tensor) -> Sequence[Tensor]:
        return self.flat(*xs)

    @property
    def __name__(self) -> str:  # in printed programs
        return self.name

    def along(self, dim: Dim) -> Callable[..., Sequence[Tensor]]:
        """The function of tensors that have the scanned dim first, for all its places at once."""
        return at_all_places(lambda *ins: list(self.flat(*ins)), dim)

    def run(self, xp: Any, over: str, shapes: Sequence[Shape], a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        """Combine arrays whose first axis is the scanned dim; `shapes` are their other dims, in block sizes."""
        dim = Dim(over, a[0].shape[0])
        types = [Type((dim, *shape), x.dtype) for shape, x in zip(shapes, a, strict=True)]
        graph, _, _ = trace(self.along(dim), [*types, *types])
        return run_on(xp, graph, [*a, *b])


def _check_element(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    kinds, made = ([(set(names(x.dims)), x.dtype) for x in each] for each in (xs, ys))
    if made != kinds:
        raise ShapeError(
            f"the function of md.associative_scan combines {[x.type for x in xs]} into {[y.type for y in ys]}\n"
            "  it returns an element like those it takes"
        )


def combine_of(f: Callable[..., Any], structure: Any, types: Sequence[Type]) -> Combine:
    """Trace the user's function on the types of one element, a pytree of this structure, and check it."""

    def flat(*xs: Tensor) -> list[Tensor]:
        n = len(xs) // 2
        ys, _ = leaves_of(f(*(tree.tree_unflatten(structure, part) for part in (xs[:n], xs[n:]))))
        _check_element(xs[:n], ys)
        return [transpose(y, names(x.dims)) for x, y in zip(xs, ys, strict=False)]

    graph, captures, _ = trace(flat, [*types, *types])
    if captures:
        raise TraceError(
            f"the function of md.associative_scan uses a tensor from outside, {captures[0].type}\n"
            "  it runs on each device's blocks; pass what it needs as part of the elements"
        )
    loops = [eqn for eqn, _ in walk(graph) if eqn.control is not None and not isinstance(eqn.control, Call)]
    if loops:
        problem = TraceError(f"the function of md.associative_scan contains no loops or branches, like {loops[0].op}")
        raise at(problem, loops[0].where)
    dims = {d.name for t in types for d in t.dims}
    free = frozenset(name for name in dims if all(_passes(eqn, name) for eqn, _ in walk(graph)))
    name = getattr(f, "__name__", type(f).__name__)
    return Combine(flat, name, free, free == dims, max(1, len(graph.eqns)))


def _passes(eqn: Eqn, name: str) -> bool:
    """True if the equation treats the places of a dim independently and alike."""
    op, ins = eqn.operation, [v.type for v in eqn.ins]
    taken, given = ([name in names(v.dims) for v in side] for side in (eqn.ins, eqn.outs))
    if not any(taken + given) or isinstance(eqn.control, Call):
        return True
    kept = any(taken) and all(given)
    blocked = op.blocked(*ins, **eqn.params) if op.blocked is not None else ()
    if not kept or name in blocked or op.moves is not None or op.inside_blocks:
        return False
    if op.rule is None:
        return True
    labels = op.rule(*ins, **eqn.params)
    return all(names.get(name, name) == name for names in (*labels.ins, *labels.outs))
