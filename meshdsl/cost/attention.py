"""A fused attention kernel: its work, and the scores that it does not store.

Scores are the result of a batched product, queries by keys, whose softmax is taken. Their dims identify them, also in
the backward pass: every value with exactly these dims is scores, their gradient, or a mask of their size.
"""

from __future__ import annotations

from ..ir import Eqn, Fuses, Op, Product, Var, walk
from ..lowering import Program

__all__ = ["PLAIN", "is_attention", "is_scores"]

# FLOPs of a fused attention kernel over those of the plain formula: half of the pairs, since a causal kernel skips the
# masked ones, and seven products in forward and backward pass for six, since it computes the scores again
PLAIN = 7 / 12


def is_attention(eqn: Eqn) -> bool:
    """True for `md.attention` and its gradient, one operation each."""
    return isinstance(eqn.op, Op) and eqn.op.product is Product.ATTENTION


def is_scores(program: Program, v: Var) -> bool:
    """True if a value has the dims of attention scores.

    >>> import meshdsl as md
    >>> def attend(q, k):
    ...     return md.softmax(md.einsum(q, k, out="batch query key"), "key")
    >>> step = md.compile(attend, "rows:2", "batch:rows")
    >>> program = step.program(md.spec("batch:8 query:64 head:4"), md.spec("batch:8 key:64 head:4"))
    >>> [is_scores(program, v) for v in (*program.ins, *program.outs)]
    [False, False, True]
    """
    found: frozenset[frozenset[str]] | None = program.__dict__.get("_score_dims")  # cached: asked for every value
    if found is None:
        found = _score_dims(program)
        object.__setattr__(program, "_score_dims", found)
    return bool(found) and _names(v) in found


def _score_dims(program: Program) -> frozenset[frozenset[str]]:
    products: set[frozenset[str]] = set()
    softmax: set[frozenset[str]] = set()
    exponentials: set[Var] = set()
    for eqn, _ in walk(program):
        if not isinstance(eqn.op, Op):
            continue
        (out, *_) = eqn.outs
        if eqn.op.product is Product.MATMUL and len(eqn.ins) == 2:
            if frozenset.intersection(*map(_names, (*eqn.ins, out))):  # batched: queries by keys, not rows by weights
                products.add(_names(out))
        elif eqn.op.transcendental:
            exponentials.add(out)
        elif eqn.op.fuses is Fuses.REDUCE:
            softmax.update(_names(v) for v in eqn.ins if v in exponentials)
    return frozenset(products & softmax)


def _names(v: Var) -> frozenset[str]:
    return frozenset(d.name for d in v.shape)
