"""Products of wide copies of narrow values read the narrow values instead: same numbers, faster matrix units.

The gradient of a product of bfloat16 values with a float32 sum multiplies one operand by a float32 cotangent, and
promotes that operand to float32. If the cotangent is only a copy of a bfloat16 value, both enter the product as
bfloat16. The dtype of the sum does not change.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Eqn, Graph, Linear, Reduce, Var, rewritten
from ..ops.dtypes import CAST, widens


def narrow_products(graph: Graph) -> Graph:
    """The graph in which products whose operands are all copies of values of one narrower float read those values."""
    return rewritten(graph, _narrowed) if CAST in graph.kinds else graph


def _narrowed(eqn: Eqn, producers: Mapping[Var, Eqn]) -> list[Eqn]:
    sources = eqn.ins
    if eqn.operation.linear is Linear.EACH and eqn.operation.reduce is Reduce.SUM:
        sources = tuple(_source(v, producers) for v in eqn.ins)
    return [eqn.replace(ins=sources) if len({v.dtype for v in sources}) == 1 else eqn]


def _source(v: Var, producers: Mapping[Var, Eqn]) -> Var:
    """The value of which v is a wider copy, or v itself."""
    eqn = producers.get(v)
    return eqn.ins[0] if eqn is not None and eqn.op is CAST and widens(eqn.ins[0].dtype, v.dtype) else v
