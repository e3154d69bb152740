"""Choose the kernel of every attention of a program, for a platform.

The choice is a parameter of the equation. A program with the kernels of one platform can be given those of another,
because the choice tells what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..backend.attention import Case, Kernel, choose
from ..errors import LayoutError, at
from ..ir import Eqn, Graph, Op, Product
from ..lowering.program import Program
from ..ops.attention.blocks import Names, value_dim
from ..ops.attention.records import ATTENTION, ATTENTION_GRAD

__all__ = ["case_of", "is_attention", "platform_of", "with_kernels"]

FLASH = 8.0  # the compute capability of GPUs from which on cuDNN has a fused attention


def is_attention(eqn: Eqn) -> bool:
    """True for `md.attention`, its gradient, and the parts into which they are lowered."""
    return isinstance(eqn.op, Op) and eqn.op.product is Product.ATTENTION


def with_kernels(program: Program, platform: str, requested: str | None = None) -> Program:
    """The program with the kernels for a platform; itself if it has them already.

    `requested` is "auto" or the name of a kernel (default: the earlier request). Raises `LayoutError`, with the user's
    line, if a kernel that is asked for cannot take a case.

    >>> import meshdsl as md
    >>> x = md.spec("length:512 heads:8 head:64", "bfloat16")
    >>> program = md.compile(lambda q, k, v: md.attention(q, k, v), "rows:4", "heads:rows").program(x, x, x)
    >>> [str(p.eqns[0].params["kernel"]) for p in (program, with_kernels(program, "tpu"))]
    ['blockwise', 'pallas:512x512']
    """

    def choose_in(graph: Graph) -> Graph:
        return with_kernels(graph, platform, requested) if isinstance(graph, Program) else graph

    def chosen(eqn: Eqn) -> Eqn:
        return _chosen(program, eqn, platform, requested) if is_attention(eqn) else eqn.map_graphs(choose_in)

    return program.replace(eqns=tuple(chosen(eqn) for eqn in program.eqns))


def platform_of(devices: Iterable[Any]) -> str:
    """The platform of devices: "cpu", "tpu", "gpu"; with its compute capability if cuDNN has no kernel for that GPU."""
    device = next(iter(devices))
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    old = capability is not None and float(capability) < FLASH
    return f"gpu of compute capability {capability}" if old else device.platform


def _chosen(program: Program, eqn: Eqn, platform: str, requested: str | None) -> Eqn:
    before: Kernel | None = eqn.params.get("kernel")
    requested = requested or (before.asked if before else "auto")
    kernel = choose(case_of(program, eqn), requested, platform)
    if not kernel.name:
        raise at(
            LayoutError(
                f"attention_kernel={requested!r} cannot compute this attention: {kernel.reason}\n"
                "  'auto' takes a fused kernel where there is one, and 'blockwise' computes every attention"
            ),
            eqn.where,
        )
    return eqn if kernel == before else eqn.replace(params={**eqn.params, "kernel": kernel})


def case_of(program: Program, eqn: Eqn) -> Case:
    """The properties of this attention for the choice of a kernel: local sizes, and parts on other devices."""
    how: Names = eqn.params["how"]
    q, k, v = eqn.ins[:3]
    queries, keys = (dict(zip([d.name for d in x.dims], program.local_shape(x), strict=True)) for x in (q, k))
    runs = 2 if eqn.params.get("zigzag") else 1  # of consecutive positions
    split = k.sharding.axes(how.keys)
    size = {d.name: d.size for d in (*q.dims, *k.dims)}
    positions = eqn.params["causal"] or eqn.params["window"] is not None
    value = value_dim(k.dims, v.dims, how)
    return Case(
        queries=queries.get(how.length, 0) // runs,
        keys=keys[how.keys] // runs,
        head=queries[how.over],
        value=program.local_shape(v)[v.dims.index(value)],
        dtype=q.dtype,
        block=how.block,
        extras=how.extras,
        empty=0 in (*program.local_shape(q), *program.local_shape(v)),
        part=bool(split) or eqn.op not in (ATTENTION, ATTENTION_GRAD),
        padded=keys[how.keys] * program.mesh.count(split) > size[how.keys],
        ahead=eqn.params["window"] is not None and not eqn.params["causal"],
        apart=positions and queries.get(how.length) != keys[how.keys],
    )
