"""Low-rank adapters (LoRA, Hu et al., 2021): a weight w becomes w + scale * a b, and only a and b are trained."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import meshdsl as md

_A, _B = "lora_a", "lora_b"
_Base = TypeVar("_Base", md.Model, md.Workload)
Match = str | Callable[[str], bool]


def lora(base: _Base, *, rank: int, match: Match, alpha: float | None = None, stacked: str = "layer expert") -> _Base:
    """A model, or a workload, whose weights that `match` have adapters of this `rank`; a workload trains them alone.

    >>> import meshdsl as md
    >>> plain = md.model(lambda x: md.dot(x, md.param("w", "io:8 out:8"), "io"))
    >>> x = md.ones("batch:2 io:8")
    >>> tuned = md.nn.lora(plain, rank=2, match="w")
    >>> params = tuned.init(md.random.key(0), x)
    >>> {path: p.dims for path, p in params.items()}
    {'w': (io=8, out=8), 'w/lora_a': (io=8, rank=2), 'w/lora_b': (rank=2, out=8)}
    >>> bool((tuned(params, x) == plain({"w": params["w"]}, x)).numpy().all())  # b starts at zero
    True

    The parameters are those of the base with the same paths, plus `PATH/lora_a` and `PATH/lora_b`. `match` is patterns
    of paths with `*`, or a function of a path. The dims of a weight are cut in two where a and b have the fewest
    elements together; dims in `stacked` are those of separate weights, and both have them. `alpha` is LoRA's: the
    product is scaled by alpha / rank (default: 1). `md.nn.merged` returns the weights with their adapters added.

    A step computes a b and the gradient of the whole weight, one layer at a time, but stores no gradient, moment or
    update of it, and sends none. Raises `ShapeError` if no weight of two dims or more matches, when parameters are
    made.
    """
    chosen = match if callable(match) else functools.partial(_matches, match.split())
    if isinstance(base, md.Model):
        return _model(base, rank, chosen, alpha, frozenset(stacked.split()))

    def on_merged(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda config, *more: lambda params, *args: function(config, *more)(merged(params, alpha), *args)

    table = base.hugging_face and dataclasses.replace(base.hugging_face, merged=lambda params: merged(params, alpha))
    return dataclasses.replace(
        base,
        hugging_face=table,
        model=lambda config: lora(base.model(config), rank=rank, match=chosen, alpha=alpha, stacked=stacked),
        loss=on_merged(base.loss),
        eval_loss=None if base.eval_loss is None else on_merged(base.eval_loss),
        decoder=None if base.decoder is None else on_merged(base.decoder),
        optimizer=lambda config: md.optim.with_frozen(base.optimizer(config), lambda path: not _is_adapter(path)),
    )


def merged(params: Mapping[str, md.Tensor], alpha: float | None = None) -> dict[str, md.Tensor]:
    """The parameters without adapters, each weight plus the product of its own; `alpha` is that of `md.nn.lora`.

    >>> import meshdsl as md
    >>> w = {"w": md.zeros("i:1 o:1"), "w/lora_a": md.ones("i:1 rank:2"), "w/lora_b": md.ones("rank:2 o:1")}
    >>> md.nn.merged(w)
    {'w': tensor(float32[i=1 o=1], [[2.]])}
    """
    return {path: _sum(path, x, params, alpha) for path, x in params.items() if not _is_adapter(path)}


def _sum(path: str, x: md.Tensor, params: Mapping[str, md.Tensor], alpha: float | None) -> md.Tensor:
    if f"{path}/{_A}" not in params:
        return x
    a, b = params[f"{path}/{_A}"], params[f"{path}/{_B}"]
    rank = next(d for d in a.dims if d not in x.dims)
    return x + md.cast(md.einsum(a, b, out=x.dims) * (1.0 if alpha is None else alpha / rank.size), x.dtype)


def _matches(patterns: list[str], path: str) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _is_adapter(path: str) -> bool:
    return path.endswith((f"/{_A}", f"/{_B}"))


def _model(
    base: md.Model, rank: int, chosen: Callable[[str], bool], alpha: float | None, stacked: frozenset[str]
) -> md.Model:
    def adapted(*inputs: Any, **kwargs: Any) -> Any:
        params = dict[str, md.Tensor]()
        for path, d in base.declarations(*inputs, **kwargs).items():
            params[path] = _param(path, d.dims, d.init, d.dtype)
            if chosen(path) and (parts := _parts(d.dims, stacked)) is not None:
                new = md.fresh_dim(md.Dim("rank", rank), d.dims)
                outer, first, rest = parts
                init = md.init.normal(1 / math.sqrt(math.prod(e.size for e in first)))
                params[f"{path}/{_A}"] = _param(f"{path}/{_A}", (*outer, *first, new), init, d.dtype)
                params[f"{path}/{_B}"] = _param(f"{path}/{_B}", (*outer, new, *rest), md.init.zeros(), d.dtype)
        if not any(_is_adapter(path) for path in params):
            raise md.ShapeError(f"no weight matches for md.nn.lora; the parameters are {', '.join(params)}")
        return base(merged(params, alpha), *inputs, **kwargs)

    return md.model(adapted)


def _param(path: str, dims: Any, init: Any, dtype: Any) -> md.Tensor:
    scope, _, name = path.rpartition("/")
    if not scope:
        return md.param(name, dims, init=init, dtype=dtype)
    with md.scope(scope):
        return md.param(name, dims, init=init, dtype=dtype)


def _parts(dims: tuple[md.Dim, ...], stacked: frozenset[str]) -> tuple[Any, Any, Any] | None:
    """The stacked dims, and the others cut in two; None for a vector."""
    outer = tuple(d for d in dims if d.name in stacked)
    inner = tuple(d for d in dims if d not in outer)
    if len(inner) < 2:
        return None

    def size(k: int) -> int:
        return math.prod(d.size for d in inner[:k]) + math.prod(d.size for d in inner[k:])

    k = min(range(1, len(inner)), key=size)
    return outer, inner[:k], inner[k:]
