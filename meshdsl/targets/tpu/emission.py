"""Kernels and stacks as the TPU compiler needs them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's signatures are only partly typed)

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...backend import Block
from ...backend.grouped import grouped_dot
from ...backend.jax import JaxFunctions
from ...dims import Dim
from ...ir import Eqn
from ...lowering.emit import Emission
from .tiling import LANES

WIDE = 2**22  # elements; a smaller kernel takes about as long with dims of local size 1
LONG = 2048  # elements of a softmax that is computed in the kernel of the product (2,048 yes, 4,096 no)


def left_out(eqn: Eqn, blocks: Sequence[Block]) -> Set[Dim]:
    """The dims of local size 1 that a kernel need not see. The compiler fuses a large softmax only without them.

    Gradients of weights, and other products without a dim that both operands and the result have, are in no softmax;
    nor are those whose only such dims have local size 1, as the stages of a pipeline: these dims are left out.
    Of a longer softmax than `LONG` that it recognises, the compiler stores the exponentials (see `softmaxes`).
    """
    if not eqn.operation.by_name or max(math.prod(one.sizes) for one in blocks) < WIDE:
        return frozenset()
    of_blocks = [set(zip(one.dims, one.sizes, strict=True)) for one in blocks]
    if eqn.operation.product:
        shared = set.intersection(*of_blocks)
        if all(n == 1 for _, n in shared):
            return {dim for dim, _ in shared}
    sizes = set.union(*of_blocks)
    if max((n for _, n in sizes), default=1) > LONG:
        return frozenset()
    return {dim for dim, n in sizes if n == 1} - {dim for dim, n in sizes if n != 1} - {*eqn.params.get("over", ())}


def _narrow_first(formula: str, x: Sequence[int], y: Sequence[int]) -> str:
    """The formula with its operands exchanged if the first is wide and the second narrow; else "".

    It is for products that sum over the leading dims, as gradients of weights do. If the result has at most 128 columns
    (one tile), the compiler transposes the first operand in memory: that is a copy, so the narrow one comes first.
    """
    (left, right), out = formula.partition("->")[0].split(","), formula.partition("->")[2]
    summed = [n for n in left if n in right and n not in out]
    if left[:1] != right[:1] or left[:1] not in summed or any(n in left and n in right for n in out):
        return ""
    rows, columns = [n for n in out if n in left], [n for n in out if n in right]
    wide, narrow = (
        math.prod(dict(zip(names, shape, strict=True))[n] for n in kept)
        for names, shape, kept in ((left, x, rows), (right, y, columns))
    )
    return f"{right},{left}->{''.join(columns + rows)}" if narrow <= LANES < wide else ""


def dot_ragged(x: Any, w: Any, sizes: Any, dtype: Any) -> Any:
    """Sorted rows times the matrices of their groups, by JAX's operation; 0 for the rows after all groups."""
    product = lax.ragged_dot(x, w, sizes, preferred_element_type=dtype)
    return jnp.where(np.arange(x.shape[0], dtype=np.int32)[:, None] < sizes.sum(), product, 0)


class _Functions(JaxFunctions):
    """Those of JAX, with wide operands of narrow products second, and JAX's grouped product.

    The compiler has a kernel for it, which multiplies each run of equal groups by its matrix.
    """

    @staticmethod
    def einsum(formula: str, *xs: Any, dtype: Any) -> Any:
        narrow = len(xs) == 2 and _narrow_first(formula, xs[0].shape, xs[1].shape)
        if not narrow:
            return JaxFunctions.einsum(formula, *xs, dtype=dtype)
        y = JaxFunctions.einsum(narrow, *reversed(xs), dtype=dtype)
        return jnp.einsum(f"{narrow.partition('->')[2]}->{formula.partition('->')[2]}", y)

    @staticmethod
    def grouped_dot(x: Any, w: Any, group: Any, dtype: Any, few: bool = False) -> Any:
        return grouped_dot(x, w, group, dtype, dot_ragged)


EMISSION = Emission(_Functions(), left_out, late_stacks=WIDE)
