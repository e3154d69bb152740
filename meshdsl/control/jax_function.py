"""A JAX function with the dims of its operands and results, and the check that it may run on blocks of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from ..dims import Dim, Shape, names, show
from ..errors import ShapeError
from ..ir import Type
from ..jaxprs import Problem, Sized, check, resembles

__all__ = ["JaxFunction", "refusal"]


@dataclass(frozen=True, eq=False)
class JaxFunction:
    """A JAX function of arrays, the dims of its operands and results, and how it treats them.

    `flat` returns a list of arrays. `sizes` are those of the whole operands. `checked`: its places are compared at
    every size at which it is traced.
    """

    flat: Callable[..., Any]
    name: str
    operands: tuple[Type, ...]
    results: tuple[Shape, ...]
    split: tuple[str, ...]
    contract: tuple[str, ...]
    checked: bool
    cost: float | None = None  # floating-point operations on whole operands, if the caller gives them

    @property
    def __name__(self) -> str:  # the name in printed programs
        return self.name

    def __call__(self, *arrays: Any) -> Any:
        return self.flat(*arrays)

    @functools.cached_property
    def blocks(self) -> dict[tuple[Type, ...], Any]:
        """The jaxprs by types of operands."""
        return {}

    @property
    def shown(self) -> dict[str, str | None]:
        """Parameters for printed programs."""
        return {"split": ",".join(self.split) or None, "contract": ",".join(self.contract) or None}

    def traced(self, types: Sequence[Type]) -> Any:
        key = tuple(types)
        if key not in self.blocks:
            structs = [jax.ShapeDtypeStruct(tuple(d.size for d in t.dims), t.dtype) for t in types]
            self.blocks[key] = jax.make_jaxpr(self.flat)(*structs)
        return self.blocks[key]

    @functools.cached_property
    def problems(self) -> dict[tuple[Type, ...], Problem | None]:
        return {}

    def problem(self, full: Sequence[Type], block: Sequence[Type]) -> Problem | None:
        """The reason why the function may not run on blocks of this type; None if it may."""
        key = (*full, *block)
        if key not in self.problems:
            self.problems[key] = self._compare(full, block)
        return self.problems[key]

    def _compare(self, full: Sequence[Type], block: Sequence[Type]) -> Problem | None:
        ins, outs = [names(t.dims) for t in full], [names(shape) for shape in self.results]
        cut = {d.name for a, b in zip(full, block, strict=True) for d, e in zip(a.dims, b.dims, strict=True) if d != e}
        split, contract = cut & set(self.split), cut & set(self.contract)
        try:
            whole, small = self.traced(full), self.traced(block)
        except Exception as error:  # of the function itself, which cannot handle these sizes
            return Problem("", f"fails for other sizes of {' '.join(sorted(cut))}: {_first_line(error)}")
        problem = check(whole, small, ins, outs, split, contract)
        if problem and any(d.size == 1 and d.name in cut for t in block for d in t.dims):
            # at one element JAX leaves out broadcasts and batch dims; apart from those, both must do the same
            return self._at_one_element(full, block) if self.problem(*self.twice()) is None else problem
        return problem

    def _at_one_element(self, full: Sequence[Type], block: Sequence[Type]) -> Problem | None:
        shares = {
            d.name: Fraction(e.size, d.size)
            for a, b in zip(full, block, strict=True)
            for d, e in zip(a.dims, b.dims, strict=True)
            if d != e
        }
        doubled = [Sized(self.traced(_longer(full, {name})), share) for name, share in shares.items()]
        return resembles(self.traced(full), self.traced(block), doubled)

    def twice(self) -> tuple[list[Type], list[Type]]:
        """Operands with split dims twice as long, and the operands: sizes at which every split dim differs."""
        cut = {*self.split, *self.contract}
        return _longer(self.operands, cut), list(self.operands)


def _longer(types: Sequence[Type], cut: Collection[str]) -> list[Type]:
    """Types with these dims twice as long, unless they have one element."""
    return [
        Type(tuple(Dim(d.name, 2 * d.size if d.name in cut and d.size > 1 else d.size) for d in t.dims), t.dtype)
        for t in types
    ]


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__)[:160]


def refusal(f: JaxFunction, problem: Problem) -> ShapeError:
    what = f"{problem.primitive} {problem.what}" if problem.primitive else problem.what
    line = f" ({problem.where})" if problem.where else ""
    declared = "; ".join(
        f"{how}={' '.join(dims)!r}" for how, dims in (("split", f.split), ("contract", f.contract)) if dims
    )
    return ShapeError(
        f"md.local was called with {declared}, and {f.name} does not treat blocks like the whole: "
        f"{what.rstrip(',')}{line}\n"
        f"  its operands are {', '.join(show(t.dims) for t in f.operands)}\n"
        "  leave the dim out of split= and contract=, so that it is gathered first; if you know that blocks give the "
        "same result, pass unchecked=True"
    )
