"""The collectives of JAX inside `jax.shard_map`: their axes and groups, what they do to blocks, what they send.

Blocks of all devices are one array [devices, ...], devices in the row-major order of the mesh.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import jax_functions

Axes = Mapping[str, int]  # mesh axis -> size, major to minor
Array = np.ndarray[Any, Any]

# Each result is its operand; only its type changes, or what a compiler may do with it.
CASTS = {
    "copy", "copy_p", "md_named", "mesh_cast", "meshdsl_invariant", "name", "optimization_barrier", "pbroadcast",
    "pcast", "pvary", "reshard", "sharding_constraint", "stop_gradient",
}  # fmt: skip
_CALLS = jax_functions.CALLS | {"meshdsl_blocks"}
# primitive -> the kind that the reports, the ledger and the machine files know
KINDS = {
    "psum": "all_reduce", "psum_invariant": "all_reduce", "pmax": "all_reduce", "pmin": "all_reduce",
    "all_gather": "all_gather", "all_gather_invariant": "all_gather", "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all", "ppermute": "permute",
}  # fmt: skip
SUMS = {"psum", "psum_invariant", "reduce_scatter"}


def called(eqn: Any) -> Any:
    """The jaxpr that an equation only calls; None for an equation that does something."""
    bodies = jax_functions.inner(eqn)
    return bodies[0] if bodies and eqn.primitive.name in _CALLS else None


def scan_parts(eqn: Any, body: Any) -> tuple[int, int]:
    """The numbers of constants and of carries among the operands of a scan; the others are its rows."""
    rows = sum(len(v.aval.shape) > len(w.aval.shape) for v, w in zip(eqn.invars, body.invars, strict=True))
    carries = sum(len(v.aval.shape) == len(w.aval.shape) for v, w in zip(eqn.outvars, body.outvars, strict=True))
    return len(eqn.invars) - rows - carries, carries


def axes_of(eqn: Any) -> tuple[str, ...]:
    """The mesh axes of a collective or of `axis_index`, as the program names them."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))


def split_over(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """The mesh axes over which each axis of an array is split."""
    names = [() if own is None else (own,) if isinstance(own, str) else tuple(own) for own in spec]
    return names + [()] * (rank - len(names))


def groups(mesh: Axes, axes: Sequence[str], parts: Sequence[Sequence[int]] | None = None) -> Array:
    """The device numbers [group, member] of the groups along `axes`; `parts` are the `axis_index_groups`.

    >>> groups({"rows": 2, "cols": 3}, ("cols",)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    >>> groups({"rows": 4}, ("rows",), [[0, 2], [1, 3]]).tolist()
    [[0, 2], [1, 3]]
    """
    names = list(mesh)
    order = [i for i, a in enumerate(names) if a not in axes] + [names.index(a) for a in axes]
    table = np.arange(math.prod(mesh.values())).reshape(*mesh.values()).transpose(order)
    table = table.reshape(-1, math.prod(mesh[a] for a in axes))
    return table if parts is None else table[:, np.asarray(parts)].reshape(-1, len(parts[0]))


def apply(eqn: Any, mesh: Axes, x: Array) -> Array:
    """The blocks [devices, ...] after a collective of the blocks `x`."""
    name, p = eqn.primitive.name, eqn.params
    if over := tuple(1 + a for a in p.get("axes", ()) if isinstance(a, int)):  # the axis of a jax.vmap
        x = _REDUCE[name](x, axis=over)
    axes = axes_of(eqn)
    if not axes:
        return x
    members = groups(mesh, axes, p.get("axis_index_groups"))
    blocks = x[members]  # [group, member, ...]
    with np.errstate(all="ignore"):  # infinities of a mask
        result = _APPLY[name](blocks, p)
    out = np.empty((len(x), *result.shape[2:]), result.dtype)
    out[members] = result
    return out


def positions(eqn: Any, mesh: Axes) -> Array:
    """The `axis_index` of each device."""
    members = groups(mesh, axes_of(eqn))
    out = np.empty(members.size, np.int32)
    out[members] = np.arange(members.shape[1])
    return out


def _everywhere(f: Callable[..., Array]) -> Callable[[Array, Any], Array]:
    return lambda x, p: np.broadcast_to(f(x, axis=1, keepdims=True), x.shape)


def _gather(x: Array, p: Any) -> Array:
    parts, d = list(np.moveaxis(x, 1, 0)), 1 + p["all_gather_dimension"]
    whole = np.concatenate(parts, d) if p["tiled"] else np.stack(parts, d)
    return np.broadcast_to(whole[:, None], (whole.shape[0], x.shape[1], *whole.shape[1:]))


def _reduce_scatter(x: Array, p: Any) -> Array:
    d = 1 + p["scatter_dimension"]
    pieces = np.split(x.sum(1), x.shape[1], d)
    return np.stack(pieces if p["tiled"] else [np.squeeze(piece, d) for piece in pieces], 1)


def _all_to_all(x: Array, p: Any) -> Array:
    n, split, joined = x.shape[1], 1 + p["split_axis"], 1 + p["concat_axis"]
    pieces = [np.split(x[:, i], n, split) for i in range(n)]
    return np.stack([np.concatenate([pieces[i][j] for i in range(n)], joined) for j in range(n)], 1)


def _permute(x: Array, p: Any) -> Array:
    out, n = np.zeros_like(x), x.shape[1]
    for source, target in p["perm"]:
        if source < n and target < n:  # else it is of a larger axis; see `Run.guessed`
            out[:, target] = x[:, source]
    return out


_REDUCE = {"psum": np.sum, "psum_invariant": np.sum, "pmax": np.max, "pmin": np.min}
_APPLY: dict[str, Callable[[Array, Any], Array]] = {
    **{name: _everywhere(f) for name, f in _REDUCE.items()},
    "all_gather": _gather, "all_gather_invariant": _gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "ppermute": _permute,
}  # fmt: skip
