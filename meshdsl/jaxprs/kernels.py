"""Pallas kernels: a split dim passes if every grid step reads and writes its own blocks of it.

Either a grid axis counts the blocks of the dim, in its order, in every operand and result that has the dim; or every
step has the whole axis. Inside the kernel, the places of a block are checked like those of a value; a block of one
element has no places to mix.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from .factors import Axis, Factor, MixesError, Value, dims_of, free, join, plain, sizes, tied
from .primitives import inner
from .rules import RULES, Equation

__all__ = ["REFS", "pallas"]


class _Window(NamedTuple):
    """The blocks of one axis under a grid: block size at both traces (0 if none), and the grid axis."""

    full: int
    block: int
    grid: int | None


def pallas(e: Equation, ins: Sequence[Value], sums: frozenset[str], run: Any) -> list[Value]:
    """The results of a Pallas kernel."""
    if any(x.partial for x in ins):
        raise MixesError("reads a sum that is not complete")
    a, b = e.params["grid_mapping"], e.block.params["grid_mapping"]
    if not any(tied(axis) for x in ins for axis in x.axes):
        return [Value(axes) for axes in RULES[""](e, [x.axes for x in ins])]
    if a.num_index_operands or a.num_dynamic_grid_bounds or a.num_scratch_operands or e.params["input_output_aliases"]:
        raise MixesError("keeps values from one grid step to the next, or computes its blocks, which is not checked,")
    windows = [_windows(x, y) for x, y in zip(a.block_mappings, b.block_mappings, strict=True)]
    operands, results = windows[: len(ins)], windows[len(ins) :]
    counted = _counted(a.grid, b.grid, ins, operands)
    for x, own in [*zip([x.axes for x in ins], operands, strict=True), *((None, own) for own in results)]:
        _reads_own_blocks(x, own, counted)
    refs: list[Value | None] = [
        Value(tuple(_inside(axis, w) for axis, w in zip(x.axes, own, strict=True) if w.full))
        for x, own in zip(ins, operands, strict=True)
    ]
    body, other = e.params["jaxpr"], e.block.params["jaxpr"]
    _own_steps(body, set(counted))
    inside = [None] * len(results)
    if not any(tied(axis) for ref in refs if ref is not None for axis in ref.axes) and str(body) != str(other):
        raise MixesError("has another kernel for another size")
    if any(dims_of(ref.axes) for ref in refs if ref is not None):
        inside = _run_kernel(body, other, [*refs, *inside], sums, run)[len(refs) :]
    return [
        Value(tuple(_outside(e, k, own, value, counted)))
        for k, (own, value) in enumerate(zip(results, inside, strict=True))
    ]


def _windows(a: Any, b: Any) -> list[_Window]:
    windows: list[_Window] = []
    for i, (x, y) in enumerate(zip(a.block_shape, b.block_shape, strict=True)):
        pair = [getattr(size, "block_size", size if isinstance(size, int) else 0) for size in (x, y)]
        index, jaxpr = a.index_map_jaxpr.jaxpr.outvars[i], a.index_map_jaxpr.jaxpr
        if type(x).__name__ not in ("Blocked", "Squeezed", "NoneType", "int"):
            raise MixesError(f"has blocks of the kind {type(x).__name__}, which is not checked,")
        if isinstance(index, Literal):
            grid = None if int(index.val) == 0 else -1
        else:
            grid = jaxpr.invars.index(index) if index in jaxpr.invars else -1  # -1: computed from the grid's indices
        windows.append(_Window(pair[0], pair[1], grid))
    return windows


def _counted(
    full: Sequence[Any], block: Sequence[Any], ins: Sequence[Value], windows: Sequence[Sequence[_Window]]
) -> dict[int, Factor]:
    """The grid axes that count the blocks of a split dim, each with the dim."""
    counted: dict[int, Factor] = {}
    for x, own in zip(ins, windows, strict=True):
        for axis, w in zip(x.axes, own, strict=True):
            if not tied(axis) or (
                (w.full, w.block) == sizes(axis) and (w.grid is None or (full[w.grid], block[w.grid]) == (1, 1))
            ):
                continue
            step = max(w.full, 1)
            if w.grid is None or w.grid < 0 or len(axis) != 1 or max(w.block, 1) != step:
                raise MixesError(f"reads other blocks of {' '.join(dims_of([axis]))} than its own")
            if (full[w.grid] * step, block[w.grid] * step) != sizes(axis):
                raise MixesError(f"does not count the blocks of {axis[0].kind}")
            factor = Factor(axis[0].kind, step, step)
            if counted.setdefault(w.grid, factor) != factor:
                raise MixesError(f"counts blocks of {factor.kind} and {counted[w.grid].kind} by one grid axis")
    for g, pair in enumerate(zip(full, block, strict=True)):
        if g not in counted and pair[0] != pair[1]:
            raise MixesError("has a grid that depends on the size of a block")
    return counted


def _reads_own_blocks(axes: Sequence[Axis] | None, windows: Sequence[_Window], counted: dict[int, Factor]) -> None:
    """Raise `MixesError` if an operand without a dim is read by the number of its blocks, or a result is not."""
    used = {w.grid for w in windows}
    if -1 in used:
        raise MixesError("computes which block it reads, which is not checked,")
    if axes is None:
        missing = [f.kind for g, f in counted.items() if g not in used]
        if missing:
            raise MixesError(f"writes one result from several blocks of {missing[0]}")
        return
    for axis, w in zip(axes, windows, strict=True):
        if w.grid in counted and dims_of([axis]) != [counted[w.grid].kind]:
            raise MixesError(f"reads by the number of a block of {counted[w.grid].kind}")


def _inside(axis: Axis, w: _Window) -> Axis:
    """An axis of an operand's block in the kernel."""
    if not tied(axis) or (w.full, w.block) == sizes(axis):
        return axis if tied(axis) else plain(w.full, w.block)
    return (Factor(axis[0].kind, w.full, w.block),) if w.full > 1 else plain(1, 1)


def _outside(
    e: Equation, k: int, windows: Sequence[_Window], value: Value | None, counted: dict[int, Factor]
) -> list[Axis]:
    """The axes of result k, from how the grid walks it and what the kernel wrote into a block."""
    written = iter(value.axes if value is not None else [])
    result: list[Axis] = []
    for size, w in zip(e.outs(k), windows, strict=True):
        own = next(written, None) if w.full else None
        if w.grid in counted:
            factor = counted[w.grid]
            if max(w.full, 1) != factor.full or (
                own is not None and factor.full > 1 and dims_of([own]) != [factor.kind]
            ):
                raise MixesError(f"writes other blocks of {factor.kind} than its own")
            result.append((Factor(factor.kind, *size),))
        elif own is not None and dims_of([own]) and sizes(own) == size:
            result.append(own)
        else:
            free(own or ())
            result.append(plain(*size))
    return result


def _own_steps(jaxpr: Any, counted: set[int]) -> None:
    """Raise `MixesError` if a kernel reads which block of a split dim it has."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs") and int(eqn.params["axis"]) in counted:
            raise MixesError("reads the number of its block")
        for body, _ in inner(eqn):
            _own_steps(body, counted)


REFS = {"get", "swap"}


def _run_kernel(full: Any, block: Any, refs: list[Value | None], sums: frozenset[str], run: Any) -> list[Value | None]:
    """The refs after the kernel's body; those of results are known once something is written to them."""
    env: dict[Any, Value] = {}
    known: dict[Any, Value | None] = dict(zip(full.invars, refs, strict=True))
    pairs = dict(zip(block.invars, full.invars, strict=True))
    if len(full.eqns) != len(block.eqns):
        raise MixesError("does something else on a block")
    for a, b in zip(full.eqns, block.eqns, strict=True):
        name = a.primitive.name
        pairs.update(zip(b.outvars, a.outvars, strict=True))
        if name not in REFS:
            if any(v in known for v in a.invars if not isinstance(v, Literal)):
                raise MixesError(f"uses {name} on a reference, which is not checked,")
            env.update(zip(a.outvars, run.equation(env, pairs, a, b, sums), strict=True))
            continue
        ref, shape = a.invars[0], tuple(a.invars[0].aval.shape)
        value = run.read(env, pairs, a.invars[1], b.invars[1]) if name == "swap" else known[ref]
        partly = len(a.invars) > (2 if name == "swap" else 1) or tuple(a.outvars[0].aval.shape) != shape
        if value is None or value.partial or (partly and any(map(tied, (value.axes)))):
            raise MixesError(f"uses {name} on part of a block, which is not checked,")
        if name == "swap":
            before = known[ref]
            known[ref] = value if before is None else Value(tuple(map(join, before.axes, value.axes)))
        env[a.outvars[0]] = value
    return [known[v] for v in full.invars]
