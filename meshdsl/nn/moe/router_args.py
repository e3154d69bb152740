"""The checked arguments of one router call: `router_args` fills in defaults and raises errors for bad combinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import meshdsl as md

from ..precision import DimLike, dim_of, new_dim
from .options import resolve


@dataclass(frozen=True)
class RouterArgs:
    """A router, all its options, and its dims and tensors; each tensor has only the dims that the router expects.

    `gates` are at least float32. `ids` are the expert of each token, for the routers that take no gates. `real` is
    false for padding tokens.
    """

    router: str
    options: Mapping[str, Any]
    token: md.Dim
    expert: md.Dim
    capacity: md.Dim
    gates: md.Tensor | None
    ids: md.Tensor | None
    uniforms: md.Tensor | None
    real: md.Tensor | None
    used: md.Tensor | None


def router_args(
    gates: md.Tensor | None,
    tokens: DimLike,
    experts: DimLike,
    capacity: DimLike,
    router: str,
    uniforms: md.Tensor | None,
    nonpadding: md.Tensor | None,
    used: md.Tensor | None,
    options: Mapping[str, Any],
) -> RouterArgs:
    """Checks the arguments of `route`; raises `ShapeError` if they do not fit together."""
    name, resolved = resolve(router, options)
    slot = new_dim(capacity, "the capacity")
    by_id = name in ("hash", "random")
    if gates is None and not by_id:
        raise md.ShapeError(
            f"the router {name!r} needs gates [groups, token, expert]; only 'hash' and 'random' work without"
        )
    gates, expert = _gates(gates, experts)
    ids = _ids(name, resolved, expert) if by_id else None
    source = gates if gates is not None else ids
    assert source is not None
    token = dim_of(source, tokens)
    if token == expert:
        raise md.ShapeError(f"tokens and experts must be two different dims of {source.type}; got {token!r} for both")
    token_dims = tuple(d for d in source.dims if d != expert)
    if ids is not None:
        ids = md.broadcast(_check_dims("the token ids", ids, token_dims), token_dims)
    real = None if nonpadding is None else md.cast(_check_dims("nonpadding", nonpadding, token_dims), "bool")
    coin = None if uniforms is None else _check_dims("uniforms", uniforms, token_dims)
    if used is not None:
        if not passes_capacity(name, resolved):
            raise md.ShapeError(
                f"the router {name!r} does not support used=: it orders tokens over the whole batch\n"
                "  route the whole batch at once, or use a router with one choice in token order: switch, hash, "
                "random, or top_k with k=1"
            )
        used = md.cast(_check_dims("used", used, (*(d for d in token_dims if d != token), expert)), "int32")
    return RouterArgs(name, resolved, token, expert, slot, gates, ids, coin, real, used)


def _gates(gates: md.Tensor | None, experts: DimLike) -> tuple[md.Tensor | None, md.Dim]:
    """The gates in at least float32, if there are any, and the dim of the experts."""
    if gates is None:
        if not isinstance(experts, md.Dim) and ":" not in experts:
            raise md.ShapeError(f"without gates the number of experts is unknown; pass experts=md.Dim({experts!r}, n)")
        return None, new_dim(experts, "experts")
    if not jnp.issubdtype(_tensor("gates", gates).dtype, jnp.floating):
        raise md.ShapeError(f"gates must have a float dtype, got {gates.type}; cast them with md.cast")
    return md.cast(gates, "float32") if gates.dtype.itemsize < 4 else gates, dim_of(gates, experts)


def passes_capacity(router: str, options: Mapping[str, Any]) -> bool:
    """True if a router has one choice per token, in token order, so that parts of a group can be routed in turn."""
    return router in ("switch", "top_k", "hash", "random") and options.get("k", 1) == 1


def _ids(router: str, options: Mapping[str, Any], expert: md.Dim) -> md.Tensor:
    """The expert of each token, for the routers without gates."""
    if router == "random":
        if options["ids"] is None:
            raise md.ShapeError("the router 'random' needs ids=, the expert of each token: [groups, token], int32")
        return _integers("ids", options["ids"])
    if options["token_ids"] is None:
        raise md.ShapeError("the router 'hash' needs token_ids=, the id of each token: [groups, token]")
    ids, table = _integers("token_ids", options["token_ids"]), options["table"]
    if table is None:
        return ids % expert.size
    if isinstance(table, np.ndarray) and table.ndim == 1:
        table = md.tensor(table, [md.fresh_dim(md.Dim("token_id", len(table)), ids.dims)])
    table = _integers("table", table)
    if len(table.dims) != 1:
        raise md.ShapeError(f"table= must have one dim, the token id, and hold experts; got {table.type}")
    return md.take(table, ids, table.dims[0], drop=True)


def _tensor(name: str, x: Any) -> md.Tensor:
    if not isinstance(x, md.Tensor):
        raise md.ShapeError(
            f"{name} must be a tensor, got {type(x).__name__}\n  name an array's dims with md.tensor(array, dims)"
        )
    return x


def _integers(name: str, x: Any) -> md.Tensor:
    """The ids cast to at least int32, because a narrow integer cannot count all experts."""
    if not jnp.issubdtype(_tensor(name, x).dtype, jnp.integer):
        raise md.ShapeError(f"{name} must have an integer dtype, got {x.type}; cast it with md.cast")
    return md.cast(x, "int32") if x.dtype.itemsize < 4 else x


def _check_dims(name: str, x: Any, dims: tuple[md.Dim, ...]) -> md.Tensor:
    """The tensor x; raises `ShapeError` if it has a dim outside `dims`."""
    if any(d not in dims for d in _tensor(name, x).dims):
        shown = " ".join(f"{d.name}={d.size}" for d in dims)
        raise md.ShapeError(f"{name} may only have dims among [{shown}], got {x.type}")
    return x
