"""Choose the kernel of every attention of a program, for a target.

The choice is a parameter of the equation. A program with the kernels of one target can be given those of another,
because the choice tells what was asked for.
"""

from __future__ import annotations

import functools

from ..errors import LayoutError, at
from ..ir import Eqn, Op, Product
from ..lowering.program import Program
from ..ops.attention.kernels import AttentionKernel, Case
from ..ops.attention.records import ATTENTION, ATTENTION_GRAD
from ..ops.attention.spec import AttentionSpec, value_dim
from . import FUSED, Target


def is_attention(eqn: Eqn) -> bool:
    """True for `md.attention`, its gradient, and the parts into which they are lowered."""
    return isinstance(eqn.op, Op) and eqn.op.product is Product.ATTENTION


def with_kernels(program: Program, target: Target, requested: str | None = None) -> Program:
    """The program with the kernels for a target; itself if it has them already.

    `requested` is "auto" or the name of a kernel (default: the earlier request). Raises `LayoutError`, with the user's
    line, if a kernel that is asked for cannot take a case.

    >>> import meshdsl as md
    >>> from meshdsl.targets.tpu import TPU
    >>> x = md.spec("length:512 heads:8 head:64", "bfloat16")
    >>> program = md.compile(lambda q, k, v: md.attention(q, k, v), "rows:4", "heads:rows").program(x, x, x)
    >>> [str(p.eqns[0].params["kernel"]) for p in (program, with_kernels(program, TPU))]
    ['blockwise', 'pallas:512x512']
    """

    def chosen(eqn: Eqn) -> Eqn:
        if is_attention(eqn):
            return _chosen(program, eqn, target, requested)
        return eqn.map_graphs(lambda body: with_kernels(body, target, requested))

    if not any(isinstance(op, Op) and op.product is Product.ATTENTION for op in program.kinds):
        return program
    return program.replace(eqns=tuple(chosen(eqn) for eqn in program.eqns))


def _chosen(program: Program, eqn: Eqn, target: Target, requested: str | None) -> Eqn:
    before: AttentionKernel | None = eqn.params.get("kernel")
    requested = requested or (before.asked if before else "auto")
    kernel = choose(case_of(program, eqn), requested, target)
    if not kernel.name:
        raise at(
            LayoutError(
                f"attention_kernel={requested!r} cannot compute this attention: {kernel.reason}\n"
                "  'auto' takes a fused kernel where there is one, and 'blockwise' computes every attention"
            ),
            eqn.where,
        )
    return eqn if kernel == before else eqn.replace(params={**eqn.params, "kernel": kernel})


@functools.lru_cache(maxsize=4096)
def choose(case: Case, asked: str, target: Target) -> AttentionKernel:
    """The kernel for a case on a target. One that is asked for and cannot take the case has the name "" and a reason.

    >>> import numpy as np
    >>> from meshdsl.targets import target_named
    >>> from meshdsl.ops.attention.spec import AttentionSpec
    >>> case = Case(4096, 4096, 128, 128, np.dtype("float32"), AttentionSpec("head", "length", "length", "memory"))
    >>> print(choose(case, "auto", target_named("tpu")))
    pallas:512x512
    >>> choose(case, "auto", target_named("cpu"))
    AttentionKernel(name='blockwise', asked='auto', reason='no fused kernel for cpu', queries=0, keys=0)
    """
    if asked == "blockwise":
        return AttentionKernel("blockwise", asked)
    fused = next(iter(target.kernels), None) if asked == "auto" else FUSED[asked]
    if fused is None:
        return AttentionKernel("blockwise", asked, f"no fused kernel for {target.name}")
    wrong = "takes operands with elements" if case.empty else fused.refusal(case, target.capability)
    if fused.platform not in ("", target.name):
        wrong = f"runs on {fused.platform}, not on {target.name}"
    if wrong:
        return AttentionKernel("blockwise" if asked == "auto" else "", asked, f"{fused.name} {wrong}")
    most = case.how.block
    sizes = (fused.block(case.queries, most), fused.block(case.keys, most)) if fused.block else (0, 0)
    return AttentionKernel(fused.name, asked, "", *sizes, by=fused)


def case_of(program: Program, eqn: Eqn) -> Case:
    """The properties of this attention for the choice of a kernel: local sizes, and parts on other devices."""
    how: AttentionSpec = eqn.params["how"]
    q, k, v = eqn.ins[:3]
    queries, keys = (dict(zip([d.name for d in x.dims], program.local_shape(x), strict=True)) for x in (q, k))
    runs = 2 if eqn.params.get("zigzag") else 1  # of consecutive positions
    split = k.sharding.axes(how.keys)
    size = {d.name: d.size for d in (*q.dims, *k.dims)}
    value = value_dim(k.dims, v.dims, how)
    return Case(
        queries=queries.get(how.length, 0) // runs,
        keys=keys[how.keys] // runs,
        head=queries[how.over],
        value=program.local_shape(v)[v.dims.index(value)],
        dtype=q.dtype,
        how=how,
        empty=0 in (*program.local_shape(q), *program.local_shape(v)),
        part=bool(split) or eqn.op not in (ATTENTION, ATTENTION_GRAD),
        padded=keys[how.keys] * program.mesh.count(split) > size[how.keys],
        ahead=how.sees.window is not None and not how.sees.causal,
        apart=how.sees.compares and queries.get(how.length) != keys[how.keys],
    )
