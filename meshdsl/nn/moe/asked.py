"""What one call of a router is asked: its arguments fitted to each other, or an error that says what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import meshdsl as md

from ..precision import dim_of, new_dim
from .options import resolve

__all__ = ["Asked", "asked_of"]


@dataclass(frozen=True)
class Asked:
    """The router with all its options, its dims, and its tensors: those dims are there, and these have no others.

    `gates` are float32 at least; of a router without gates `ids` has the expert of each token.
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


def asked_of(
    gates: md.Tensor | None,
    tokens: str | md.Dim,
    experts: str | md.Dim,
    capacity: str | md.Dim,
    router: str,
    uniforms: md.Tensor | None,
    nonpadding: md.Tensor | None,
    used: md.Tensor | None,
    options: Mapping[str, Any],
) -> Asked:
    """The arguments of `route`; raises `ShapeError` for those that do not go together."""
    name, chosen = resolve(router, options)
    slot = new_dim(capacity, "the capacity")
    by_id = name in ("hash", "random")
    if gates is None and not by_id:
        raise md.ShapeError(f"the router {name!r} needs gates [groups, token, expert]; only hash and random need none")
    if gates is None and not isinstance(experts, md.Dim) and ":" not in experts:
        raise md.ShapeError(f"without gates the number of experts is unknown; give experts as md.Dim({experts!r}, n)")
    if gates is not None and not jnp.issubdtype(_tensor("gates", gates).dtype, jnp.floating):
        raise md.ShapeError(f"gates are probabilities of a float dtype, got {gates.type}; cast them with md.cast")
    expert = new_dim(experts, "experts") if gates is None else dim_of(gates, experts)
    ids = _ids(name, chosen, expert) if by_id else None
    source = gates if gates is not None else ids
    assert source is not None
    token = dim_of(source, tokens)
    if token == expert:
        raise md.ShapeError(f"tokens and experts are two dims of {source.type}; {token!r} was given for both")
    places = tuple(d for d in source.dims if d != expert)
    if ids is not None:
        ids = md.broadcast(_within("the ids of the tokens", ids, places), places)
    if used is not None and (name not in ("switch", "top_k", "hash", "random") or chosen.get("k", 1) != 1):
        raise md.ShapeError(
            f"the router {name!r} cannot go on from slots that are used: which token comes first is known only for "
            "the whole batch\n  route the whole batch first, or take a router of one choice in token order: switch, "
            "hash, random, or top_k with k=1"
        )
    if gates is not None:
        gates = md.cast(gates, "float32") if gates.dtype.itemsize < 4 else gates
    real = None if nonpadding is None else md.cast(_within("nonpadding", nonpadding, places), "bool")
    coins = None if uniforms is None else _within("uniforms", uniforms, places)
    if used is not None:
        used = md.cast(_within("used", used, (*(d for d in places if d != token), expert)), "int32")
    return Asked(name, chosen, token, expert, slot, gates, ids, coins, real, used)


def _ids(router: str, options: Mapping[str, Any], expert: md.Dim) -> md.Tensor:
    """The expert of every token, for the routers that read no gates."""
    if router == "random":
        if options["ids"] is None:
            raise md.ShapeError("the router 'random' needs ids=, the expert of each token [groups, token] (int32)")
        return _integers("ids", options["ids"])
    if options["token_ids"] is None:
        raise md.ShapeError("the router 'hash' needs token_ids=, the id of each token [groups, token]")
    ids, table = _integers("token_ids", options["token_ids"]), options["table"]
    if table is None:
        return ids % expert.size
    if isinstance(table, np.ndarray) and table.ndim == 1:
        table = md.tensor(table, [md.Dim("token_id", len(table))])
    table = _integers("table", table)
    if len(table.dims) != 1:
        raise md.ShapeError(f"table= has one dim, the ids, and for each id its expert; got {table.type}")
    return md.take(table, ids, table.dims[0])


def _tensor(name: str, x: Any) -> md.Tensor:
    if not isinstance(x, md.Tensor):
        raise md.ShapeError(
            f"{name} is a tensor, got {type(x).__name__}\n  give an array's dims names with md.tensor(array, dims)"
        )
    return x


def _integers(name: str, x: Any) -> md.Tensor:
    """The ids in int32 at least, since there can be more experts than a narrow integer counts."""
    if not jnp.issubdtype(_tensor(name, x).dtype, jnp.integer):
        raise md.ShapeError(f"{name} holds numbers of experts or tokens, so integers; got {x.type}")
    return md.cast(x, "int32") if x.dtype.itemsize < 4 else x


def _within(name: str, x: Any, dims: tuple[md.Dim, ...]) -> md.Tensor:
    """The tensor, whose dims are some of these."""
    if any(d not in dims for d in _tensor(name, x).dims):
        there = " ".join(f"{d.name}={d.size}" for d in dims)
        raise md.ShapeError(f"{name} has dims of [{there}] and no others; got {x.type}")
    return x
