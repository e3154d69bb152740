"""Reasons why a program cannot run in parts along a dim, for errors about options without effect."""

from __future__ import annotations

from collections.abc import Iterator

from ..lowering.collectives import AllGather
from ..lowering.program import Program
from .split import Parts

SHOWN = 2  # equations that are named


def no_parts(program: Program, dim: str, n: int, parts: Parts) -> str:
    """The reason why no collective of a program runs in `n` parts along `dim`, given the program in parts."""
    blocks = sorted(set(_blocks(program, dim)))
    if not blocks:
        return f"{dim!r}: no tensor has this dim"
    if not any(size % n == 0 for size in blocks):
        return f"{dim!r}: a device's block of {' or '.join(map(str, blocks))} does not divide into {n} parts"
    if not parts.ends:
        return f"{dim!r}: it passes through no collective"
    ends = dict.fromkeys(f"{eqn.op} at {eqn.where}" for eqn in parts.ends)
    more = f" and {len(ends) - SHOWN} more" if len(ends) > SHOWN else ""
    return f"{dim!r}: its parts end before every collective, at {', '.join(list(ends)[:SHOWN])}{more}"


def no_rings(program: Program) -> str:
    """The reason why no gather of a program becomes a ring."""
    gathers = [eqn for eqn in program.eqns if isinstance(eqn.op, AllGather)]
    if not gathers:
        return "no operand of a product is gathered\n  use overlap='list' or 'halves', which move other collectives"
    shown = ", ".join(dict.fromkeys(f"'{eqn.op}' at {eqn.where}" for eqn in gathers[:SHOWN]))
    return (
        f"none of {len(gathers)} gathers is read only by products whose results are sharded over its axes ({shown})\n"
        "  use overlap='list', which moves gathers as they are"
    )


def no_skew(program: Program) -> str:
    """The reason why no loop of a program is skewed."""
    loops = [eqn for eqn in program.eqns if eqn.scan is not None]
    if not loops:
        return (
            "the program has no loop (md.scan, md.layers)\n  use overlap='list', which moves work across the whole step"
        )
    shown = ", ".join(dict.fromkeys(str(eqn.where) for eqn in loops[:SHOWN]))
    return (
        f"no loop gathers weights in its body, or has both a collective and a weight gradient in more than 2 trips "
        f"({len(loops)} loops, {shown})\n  use overlap='list', which unrolls loops"
    )


def nothing_beside(program: Program) -> str:
    """The reason why no plan runs anything between the start and the end of a collective."""
    first = next(record for record in program.collectives)
    return f"no computation is independent of a collective; the first is '{first.op}' at {first.where}"


def _blocks(program: Program, dim: str) -> Iterator[int]:
    """The sizes of the dim on one device, of all values that have it."""
    values = [*program.ins, *(v for eqn in program.eqns for v in eqn.outs)]
    for v in values:
        for d, size in zip(v.dims, program.local_shape(v), strict=True):
            if d.name == dim:
                yield size
