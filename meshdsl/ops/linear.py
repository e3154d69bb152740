"""The operands in which an operation is linear, as its record says."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Eqn, Linear, Var
from .dtypes import widens


def is_linear(eqn: Eqn, v: Var) -> bool:
    """True if the operation is linear in this operand, whatever the others are; those that go together, as one."""
    match eqn.operation.linear:
        case Linear.JOINT:
            return True
        case Linear.PADDED:
            return eqn.params["value"] == 0
        case Linear.EACH:
            return sum(x is v for x in eqn.ins) == 1
        case Linear.FIRST | Linear.RATIO:
            return eqn.ins[0] is v and v not in eqn.ins[1:]
        case Linear.SECOND:
            return eqn.ins[1] is v and eqn.ins[0] is not v
        case Linear.UPDATE:
            return v in eqn.ins[:2] and v not in eqn.ins[2:]
        case Linear.BRANCHES:
            return eqn.ins[0] is not v
        case Linear.WIDENING:
            return widens(v.dtype, eqn.outs[0].dtype)
        case _:
            return False


def together(eqn: Eqn) -> Sequence[Var]:
    """The operands in which the operation is linear as one; none of an operation that is linear in a single one."""
    match eqn.operation.linear:
        case Linear.JOINT | Linear.PADDED:
            return eqn.ins
        case Linear.UPDATE:
            return eqn.ins[:2]
        case Linear.BRANCHES:
            return eqn.ins[1:]
        case _:
            return ()
