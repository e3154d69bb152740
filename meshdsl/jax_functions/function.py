"""A JAX function with the dims of its operands and results, and the check that it may run on blocks of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..dims import Dim, Shape, names, show
from ..errors import ShapeError
from ..ir import Type
from .counting import flops
from .trial import differs, outline
from .walk import Problem, check

TESTED = "tested, not proven"  # in printed programs
_TRIED = 3e8  # floating-point operations of one run on the whole; a trial has about twelve, in a second
Types = tuple[Type, ...]


def _powers_of_two(n: int) -> list[int]:
    """The powers of two, smaller than n and from 2 on, that divide it."""
    return [2**k for k in range(1, 30) if 2**k < n and n % 2**k == 0]


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
    def blocks(self) -> dict[Types, Any]:
        """The jaxprs by types of operands."""
        return {}

    @functools.cached_property
    def steps(self) -> dict[tuple[str, Types, Types], Problem | str]:
        """The reason why a dim may not have a block size, or how it was found that it may; by dim and types."""
        return {}

    @property
    def stated(self) -> dict[str, str | None]:
        """Parameters for printed programs."""
        return {
            "split": ",".join(self.split) or None,
            "contract": ",".join(self.contract) or None,
            "check": TESTED if self.tested() else None,
        }

    def tested(self, blocks: Sequence[Type] | None = None) -> bool:
        """True if the check of blocks of these types was a trial."""
        return self.checked and "tested" in map(self.steps.get, self._steps(blocks))

    def traced(self, types: Sequence[Type]) -> Any:
        key = tuple(types)
        if key not in self.blocks:
            structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
            self.blocks[key] = jax.make_jaxpr(self.flat)(*structs)
        return self.blocks[key]

    def problem(self, blocks: Sequence[Type] | None = None) -> Problem | None:
        """The reason why the function may not run on blocks of these types; None if it may.

        Without types, the dims of the operands are compared with dims twice as long.
        """
        for step in self._steps(blocks):
            if step not in self.steps:
                self.steps[step] = self._step(*step)
            found = self.steps[step]
            if isinstance(found, Problem):
                return found
        return None

    def require(self, blocks: Sequence[Type] | None = None) -> None:
        """Raise `ShapeError` if the function is checked and may not run on blocks of these types; see `problem`."""
        problem = self.problem(blocks) if self.checked else None
        if problem is None:
            return
        what = f"{problem.primitive} {problem.what}" if problem.primitive else problem.what
        line = f" ({problem.where})" if problem.where else ""
        declared = "; ".join(
            f"{how}={' '.join(dims)!r}" for how, dims in (("split", self.split), ("contract", self.contract)) if dims
        )
        raise ShapeError(
            f"md.local was called with {declared}, and {self.name} does not treat blocks like the whole: "
            f"{what.rstrip(',')}{line}\n"
            f"  its operands are {', '.join(show(t.dims) for t in self.operands)}\n"
            "  leave the dim out of split= and contract=, so that it is gathered first; if you know that blocks give "
            "the same result, pass unchecked=True"
        )

    def _steps(self, blocks: Sequence[Type] | None) -> list[tuple[str, Types, Types]]:
        """The comparisons of a check: of types with one dim at its full size, and at that of a block."""
        dims = (*self.split, *self.contract)
        full, steps = self.operands, []
        if blocks is None:
            sizes = {d.name: d.size for t in full for d in t.dims}
            return [(name, _sized(full, {name: 2 * sizes[name]}), full) for name in dims if sizes[name] > 1]
        sizes = {d.name: d.size for t in blocks for d in t.dims}
        for name in dims:
            cut = _sized(full, {name: sizes[name]})
            steps += [(name, full, cut)] if cut != full else []
            full = cut
        return steps

    def _step(self, name: str, full: Types, block: Types) -> Problem | str:
        """Prove that blocks of one dim give the same, or try it where the table cannot tell."""
        try:
            whole, small = self.traced(full), self.traced(block)
        except Exception as error:  # of the function itself, which cannot handle these sizes
            return Problem("", f"fails for other sizes of {name}: {_first_line(error)}")
        ins, outs = self._axes(name, full)
        size, own = (next(d.size for t in types for d in t.dims if d.name == name) for types in (full, block))
        problem = check(whole, small, ins, outs, name, (size, own), name in self.contract)
        # at one element JAX leaves out broadcasts and batch dims; with more elements the function was proven
        if problem is None or not (problem.unknown or (own == 1 and self.problem() is None)):
            return problem or "proven"
        try:
            how = self._try(name, full, block, size // own)
        except Exception as error:
            how = f"it fails: {_first_line(error)}"
        if how and own == 1:
            return Problem("", f"does something else on a block of one element; on random data, {how}", problem.where)
        tried = f"on random data, with blocks of {own} of {size} elements of {name}, {how}"
        return problem._replace(what=f"{problem.what}; {tried}") if how else "tested"

    def _axes(self, name: str, types: Types) -> tuple[list[int | None], list[int | None]]:
        """The axes of a dim in the operands and in the results."""
        return [_axis(t.dims, name) for t in types], [_axis(shape, name) for shape in self.results]

    def _try(self, name: str, full: Types, block: Types, count: int) -> str:
        """How the function differs on random data, on at most three blocks, with other dims as small as it takes."""
        sizes = {d.name: d.size for t in block for d in t.dims}
        outlines = outline(self.traced(full)), outline(self.traced(block))

        def pair(sizes: Mapping[str, int], count: int) -> tuple[Any, Any] | None:
            types = [_sized(full, {**sizes, name: n * sizes[name]}) for n in (count, 1)]
            try:
                jaxprs = tuple(map(self.traced, types))
            except Exception:  # of the function itself, which does not take these sizes
                return None
            return jaxprs if tuple(map(outline, jaxprs)) == outlines else None

        few = min(max(count, 2), 3)
        count = few if pair(sizes, few) else count
        jaxprs = pair(sizes, count)
        for other in sorted(sizes, key=lambda other: -sizes[other]):
            for n in _powers_of_two(sizes[other]) if jaxprs is not None and flops(jaxprs[0]) > _TRIED else ():
                if fitting := pair({**sizes, other: n}, count):
                    jaxprs, sizes = fitting, {**sizes, other: n}
                    break
        if jaxprs is None or flops(jaxprs[0]) > _TRIED:
            return "it is too large to be run"
        ins, outs = self._axes(name, full)
        return differs(*jaxprs, ins, outs, count, name in self.contract)


def _axis(shape: Shape, name: str) -> int | None:
    return names(shape).index(name) if name in names(shape) else None


def _sized(types: Sequence[Type], sizes: Mapping[str, int]) -> Types:
    """The types with other sizes of these dims."""
    return tuple(Type(tuple(Dim(d.name, sizes.get(d.name, d.size)) for d in t.dims), t.dtype) for t in types)


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__)[:160]
