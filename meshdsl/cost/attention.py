"""The work of an attention by its kernel, and the scores that a fused one does not store.

The kernel of `md.attention` on a machine is the one that a compilation for the machine's platform chooses.

Scores are the result of a batched product, queries by keys, whose softmax is taken. Their dims identify them, also in
the backward pass: every value with exactly these dims is scores, their gradient, or a mask of their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ir import Eqn, Fuses, Op, Product, Var, operations, walk
from ..lowering import Program
from ..ops.attention.kernels import BLOCKWISE, AttentionKernel, Case
from ..ops.attention.records import ATTENTION_GRAD
from ..ops.attention.spec import wide_dtype
from ..ops.attention.turns import ATTENTION_TURN_GRAD
from ..ops.dtypes import CAST
from ..targets import Target
from ..targets.kernel_choice import case_of, choose, is_attention
from .scores import names

# FLOPs of a fused attention kernel over those of the plain formula: half of the pairs, since a causal kernel skips the
# masked ones, and seven products in forward and backward pass for six, since it computes the scores again
PLAIN = 7 / 12

# Passes over the scores in float32 that blocks in JAX take the memory time of, forward and backward. They fit what the
# TPU compiler estimates for v5e at length 4,096 (benchmarks.attention), skipped blocks computed.
PASSES = {False: 6, True: 8}


@dataclass(frozen=True)
class AttentionWork:
    """The work of one attention on a device, blockwise, and the sizes that its kernel depends on."""

    case: Case
    asked: str
    flops: float  # of the pairs in blocks that are computed; the ledger's are those of pairs that are seen
    score_bytes: float  # that go through memory, blockwise

    def is_fused(self, target: Target) -> bool:
        """True if a fused kernel computes it on this target."""
        return choose(self.case, self.asked, target).fused


def work_of_attention(program: Program, eqn: Eqn) -> AttentionWork | None:
    """The work of an attention; None for any other equation."""
    if not is_attention(eqn):
        return None
    kernel: AttentionKernel = eqn.params.get("kernel") or BLOCKWISE
    case, how = case_of(program, eqn), eqn.params["how"]
    blocks = min(how.block, case.queries or 1), min(how.block, case.keys or 1)
    flops = operations(eqn.replace(params={**eqn.params, "blocks": blocks}), program.local_shape)
    gradient = eqn.op in (ATTENTION_GRAD, ATTENTION_TURN_GRAD)
    heads, values = (3, 2) if gradient else (1, 1)
    pairs = flops / (2 * (heads * case.head + values * case.value))
    wide = wide_dtype(case.dtype).itemsize
    return AttentionWork(case, kernel.asked, flops, pairs * wide * PASSES[gradient])


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
    score_dims = _score_dims(program)
    return bool(score_dims) and names(v) in score_dims


@lru_cache(maxsize=8)  # asked for every value
def _score_dims(program: Program) -> frozenset[frozenset[str]]:
    products: set[frozenset[str]] = set()
    softmax: set[frozenset[str]] = set()
    exponentials: set[Var] = set()
    for eqn, _ in walk(program):
        if not isinstance(eqn.op, Op):
            continue
        (out, *_) = eqn.outs
        if eqn.op.product is Product.MATMUL and len(eqn.ins) == 2:
            if frozenset.intersection(*map(names, (*eqn.ins, out))):  # batched: queries by keys, not rows by weights
                products.add(names(out))
        elif eqn.op.transcendental or (eqn.op is CAST and eqn.ins[0] in exponentials):  # sums are in float32
            exponentials.add(out)
        elif eqn.op.fuses is Fuses.REDUCE:
            softmax.update(names(v) for v in eqn.ins if v in exponentials)
    return frozenset(products & softmax)
