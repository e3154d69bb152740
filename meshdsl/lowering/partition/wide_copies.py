"""Values that are wider copies of others: casts to a wider dtype and broadcasts, also scaled and reshaped.

A copy that another sharding is asked of need not cross the network: its narrow source does, with the scale, and each
device computes the copy again. A quantised weight is thus gathered in its narrow form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ...ir import Eqn, Fuses, Graph, Var
from ...ops.dtypes import CAST
from ...ops.reductions import BROADCAST
from ...ops.reshape import RESHAPE, TRANSPOSE

SMALL = 16  # a scale has at most this fraction of the elements


class Copy(NamedTuple):
    """A wide value: the narrow one that it is computed from, the scales, and the equations, in order.

    The dims in `whole`, which a reshape joins or divides, must not be split.
    """

    source: Var
    scales: tuple[Var, ...] = ()
    eqns: tuple[Eqn, ...] = ()
    whole: frozenset[str] = frozenset()


@lru_cache(maxsize=64)
def wide_copies(graph: Graph) -> Mapping[Var, Copy]:
    """The wide copies among the values of a graph."""
    makers: dict[Var, Eqn] = {}
    copies: dict[Var, Copy] = {}
    for eqn in graph.eqns:
        makers.update(dict.fromkeys(eqn.outs, eqn))
        x = eqn.ins[0] if eqn.ins else None
        wider = eqn.op is CAST and x is not None and x.dtype.itemsize < eqn.outs[0].dtype.itemsize
        if x is not None and x.dims and (wider or eqn.op is BROADCAST):
            copy = copies.get(x, Copy(x))
            copies[eqn.outs[0]] = copy._replace(eqns=(*copy.eqns, eqn))
        elif eqn.op in (RESHAPE, TRANSPOSE) and x in copies:
            copy, changed = copies[x], set(x.dims) ^ set(eqn.outs[0].dims)
            whole = copy.whole.union(d.name for d in changed)
            copies[eqn.outs[0]] = copy._replace(eqns=(*copy.eqns, eqn), whole=whole)
        elif (copy := _scaled(eqn, makers, copies)) is not None:
            copies[eqn.outs[0]] = copy
    return copies


def _scaled(eqn: Eqn, makers: Mapping[Var, Eqn], copies: Mapping[Var, Copy]) -> Copy | None:
    """The copy that an equation computes from a copy and a scale; else None."""
    wide = [v for v in eqn.ins if v in copies and v.dims == eqn.outs[0].dims]
    if eqn.control is not None or eqn.operation.fuses is not Fuses.MAP or len(eqn.ins) != 2 or len(wide) != 1:
        return None
    copy = copies[wide[0]]
    scale = eqn.ins[1] if eqn.ins[0] is wide[0] else eqn.ins[0]
    maker = makers.get(scale)
    spread = (maker,) if maker is not None and maker.op is BROADCAST else ()
    small = spread[0].ins[0] if spread else scale
    if _elements(small) * SMALL > _elements(eqn.outs[0]):
        return None
    return copy._replace(scales=(*copy.scales, small), eqns=(*copy.eqns, *spread, eqn))


def _elements(v: Var) -> int:
    return math.prod(d.size for d in v.dims)
