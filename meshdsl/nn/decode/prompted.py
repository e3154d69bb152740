"""The continuation of prompts: a prompt is computed at once, then one token after the other with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

from ..precision import DimLike, dim_of, new_dim
from .single import at_least_float32, chooser


def generate(
    step: Callable[[md.Tensor, Any, Any], tuple[md.Tensor, Any]],
    empty: Callable[[tuple[md.Dim, ...]], Any],
    prompt: md.Tensor,
    key: md.Tensor | None = None,
    *,
    tokens: DimLike,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    end: int | None = None,
    padding: int = 0,
    length: DimLike = "length",
    memory: str = "memory",
) -> md.Tensor:
    """Continues each prompt [batch, length] by `tokens` ids: [batch, tokens]. Greedy without a key, sampled with one.

    >>> import meshdsl as md
    >>> def step(ids, cache, position):  # the next token is one more
    ...     return md.one_hot((ids + 1) % 5, md.Dim("vocab", 5)), cache
    >>> prompt = md.tensor([[3, 1], [0, 3]], "batch length")
    >>> md.nn.decode.generate(step, lambda dims: (), prompt, tokens="token:4").numpy()
    array([[2, 3, 4, 0],
           [4, 0, 1, 2]], dtype=int32)

    `step(ids, cache, position) -> (logits, cache)` takes the prompt, at position 0, or ids [batch] of one position; its
    logits have one dim more than the ids. `empty(dims)` makes the cache for the dims of the batch and `memory`, which
    has the size of prompt and tokens. `temperature`, `top_k` and `top_p` are those of `sample`; the results are the
    same under every layout. After the id `end`, the rest is `padding`. Raises `ShapeError` for a prompt of size 0.
    """
    length_dim, token = dim_of(prompt, length), new_dim(tokens, "tokens")
    rows = tuple(d for d in prompt.dims if d != length_dim)
    if not length_dim.size or not token.size:
        raise md.ShapeError(f"the prompt and the tokens must not be empty; got {length_dim!r} and {token!r}")
    if key is not None and not temperature > 0:
        raise md.ShapeError(f"temperature must be positive, got {temperature}; without a key, the search is greedy")
    choose = chooser(key, temperature, top_k, top_p)

    def next_token(logits: md.Tensor, dims: tuple[md.Dim, ...], t: Any) -> md.Tensor:
        vocab = next(d for d in logits.dims if d not in dims)
        return choose(at_least_float32(logits), vocab, t)

    logits, cache = step(prompt, empty((*rows, md.Dim(memory, length_dim.size + token.size))), 0)
    last = md.reshape(
        md.slice(logits, length_dim.name, length_dim.size - 1, 1),
        [d for d in logits.dims if d != length_dim],
    )
    first = next_token(last, rows, md.cast(length_dim.size - 1, "int32"))

    def one(carry: Any, t: md.Tensor) -> Any:
        ids, done, cache = carry
        done = done if end is None else done | (ids == end)
        logits, cache = step(ids, cache, t)
        chosen = md.where(done, padding, next_token(logits, rows, t))
        return (chosen, done, cache), ids

    never = md.broadcast(md.cast(False, "bool"), rows)
    positions = md.iota(token) + length_dim.size
    _, ids = md.scan(one, (first, never, cache), positions, over=token.name)
    return md.transpose(ids, [*rows, token])
