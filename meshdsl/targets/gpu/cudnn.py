"""The attention of cuDNN, through `jax.nn.dot_product_attention`, on the operands of one device.

JAX's public function keeps the residuals of its gradient to itself, so the backward pass runs the forward one again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (jax is only partly typed)

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...backend.jaxprs import call_outside
from ...ops.attention.arrays import Arrays
from ...ops.attention.kernels import Case, FusedKernel

FLASH = 8.0  # the compute capability of GPUs from which on cuDNN has a fused attention
HEADS = {FLASH: 128, 9.0: 256}  # the largest head, from a compute capability on


def forward(x: Arrays) -> tuple[Any, Any]:
    """(out, lse) like `blockwise.forward`; out has the dtype of v."""
    out, lse = call_outside(_attend(x, return_residual=True), _operands(x))
    return _restored(x, out)[..., : x.v.shape[-1]], jnp.moveaxis(lse, 1, -1).reshape(x.q.shape[:-1]).astype(x.wide)


def backward(x: Arrays, out: Any, lse: Any, ct: Any, lse_ct: Any) -> tuple[Any, Any, Any, None]:
    """The cotangents of q, k and v, like `blockwise.backward`; there is no bias."""
    assert lse_ct is None, "`kernels.choose` gives this kernel no part of the keys"

    def gradient(q: Any, k: Any, v: Any, ct: Any) -> Any:
        return jax.vjp(_attend(x, return_residual=False), q, k, v)[1](ct)

    dq, dk, dv = call_outside(gradient, [*_operands(x), _queries(x, _as_long(x, ct)).astype(x.q.dtype)])
    dk, dv = (jnp.moveaxis(y, 2, 1).reshape(*z.shape[:-1], -1) for y, z in ((dk, x.k), (dv, x.v)))
    return _restored(x, dq), dk, dv[..., : x.v.shape[-1]], None


def _attend(x: Arrays, return_residual: bool) -> Any:
    sees, window = x.how.sees, None
    if sees.window is not None:
        window = (sees.window - 1, 0 if sees.causal else sees.window - 1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, scale=x.how.scale, is_causal=sees.causal, local_window_size=window, implementation="cudnn",
            return_residual=return_residual,
        )  # fmt: skip

    return attend


def _queries(x: Arrays, y: Any) -> Any:
    """[*batch, *group, queries, n] as [batch, queries, group, n]: one head of keys for each batch element."""
    batch, group = math.prod(y.shape[: x.batch]), math.prod(y.shape[x.batch : -2])
    return jnp.moveaxis(y.reshape(batch, group, *y.shape[-2:]), 1, 2)


def _operands(x: Arrays) -> tuple[Any, Any, Any]:
    k, v = (y.reshape(math.prod(y.shape[:-2]), y.shape[-2], 1, y.shape[-1]) for y in (x.k, _as_long(x, x.v)))
    return _queries(x, x.q), k, v


def _as_long(x: Arrays, y: Any) -> Any:
    """Values, or cotangents of results, with zeros up to the length of a key: JAX's function takes equal lengths."""
    return jnp.pad(y, [*[(0, 0)] * (y.ndim - 1), (0, x.k.shape[-1] - y.shape[-1])])


def _restored(x: Arrays, y: Any) -> Any:
    """[batch, queries, group, n] as [*batch, *group, queries, n]."""
    return jnp.moveaxis(y, 2, 1).reshape(*x.q.shape[:-1], y.shape[-1])


def _refusal(case: Case, capability: float) -> str:
    largest = max((head for least, head in HEADS.items() if capability >= least), default=0)
    if case.how.extras:
        return f"is not used with {case.how.extras[0]}="
    if case.how.soft_cap:
        return "is not used with soft_cap=, which JAX's function does not take"
    if case.part:
        return "is not used on a part of the keys"
    if case.ahead:
        return "takes a window only with causal=True"
    if case.padded or case.apart or not case.queries:
        return "takes queries and keys of equal positions, without padding"
    if case.dtype.name not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {case.dtype.name}"
    if case.value > case.head or case.head % 8 or case.head > largest:
        return (
            f"takes keys of multiples of 8 up to {largest} elements on these devices, and values of at most as many, "
            f"not {case.head} and {case.value}"
        )
    return ""


CUDNN = FusedKernel("cudnn", _refusal, forward, backward, platform="gpu", capability=FLASH)
