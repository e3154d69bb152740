"""Greedy search and sampling: one sequence per batch element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

from ..precision import DimLike, new_dim
from .steps import NO_SCORE, Empty, Step, run, steps_of

Choose = Callable[[md.Tensor, md.Dim, md.Tensor], md.Tensor]


def greedy(
    step: Step,
    empty: Empty,
    batch: DimLike,
    length: DimLike,
    *,
    start: int = 1,
    end: int = 2,
    padding: int = 0,
    memory: str = "memory",
) -> md.Tensor:
    """Greedy search: ids [batch, length], the most likely token at each position up to `end`, then padding.

    >>> import numpy as np
    >>> import meshdsl as md
    >>> table = md.tensor(np.eye(5, k=-2, dtype=np.float32).T + np.eye(5, dtype=np.float32)[2] * 0.5, "token vocab")
    >>> step = lambda tokens, cache, position, mask: (md.take(table, tokens, "token"), cache)
    >>> md.nn.decode.greedy(step, lambda dims: (), md.Dim("batch", 1), md.Dim("length", 4)).numpy()
    array([[3, 2, 0, 0]], dtype=int32)
    """
    ends = (start, end, padding)
    return _decode(step, empty, batch, length, lambda logits, vocab, t: md.argmax(logits, vocab), ends, memory)


def sample(
    step: Step,
    empty: Empty,
    batch: DimLike,
    length: DimLike,
    key: md.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    start: int = 1,
    end: int = 2,
    padding: int = 0,
    memory: str = "memory",
) -> md.Tensor:
    """Samples ids [batch, length], one position at a time; the samples are the same under every layout.

    >>> import meshdsl as md
    >>> def step(tokens, cache, position, mask):
    ...     return md.broadcast(md.cast(md.iota("vocab:5"), "float32"), [*tokens.dims, md.Dim("vocab", 5)]), cache
    >>> batch, length = md.dims("batch:1 length:6")
    >>> md.nn.decode.sample(step, lambda dims: (), batch, length, md.random.key(0), top_k=2).numpy()
    array([[4, 4, 4, 3, 3, 4]], dtype=int32)

    Logits are divided by `temperature`. Then only the `top_k` largest are kept (Fan et al., 2018), and of these only
    the smallest set whose probabilities sum to at least `top_p` (Holtzman et al., 2020). Equal logits are kept or
    removed together. Raises `ShapeError` unless `temperature` and `top_k` are positive and 0 < top_p <= 1.
    """
    if not temperature > 0:
        raise md.ShapeError(
            f"temperature must be positive, got {temperature}; for temperature 0 use md.nn.decode.greedy"
        )
    choose = chooser(key, temperature, top_k, top_p)
    return _decode(step, empty, batch, length, choose, (start, end, padding), memory)


def chooser(key: md.Tensor | None, temperature: float, top_k: int | None, top_p: float) -> Choose:
    """The function `(logits, vocab, position) -> token`: the most likely one without a key, else a sample."""
    if (top_k is not None and (not isinstance(top_k, int) or top_k < 1)) or not 0 < top_p <= 1:
        raise md.ShapeError(f"top_k must be an integer from 1 and top_p in (0, 1]; got {top_k=}, {top_p=}")
    if key is None:
        return lambda logits, vocab, t: md.argmax(logits, vocab)

    def choose(logits: md.Tensor, vocab: md.Dim, t: md.Tensor) -> md.Tensor:
        logits = filter_logits(logits / temperature, vocab, top_k, top_p)
        noise = md.random.gumbel(md.random.fold_in(key, t), logits.dims, dtype=logits.dtype)
        rows = [d for d in logits.dims if d != vocab]
        noise = md.prefer(noise, *rows) if rows else noise  # a layout may map the vocabulary to the axis of the batch
        return md.argmax(logits + noise, vocab)

    return choose


def filter_logits(logits: md.Tensor, vocab: md.Dim, top_k: int | None, top_p: float) -> md.Tensor:
    """The logits, with those that top_k or top_p removes set to NO_SCORE."""
    if top_k is not None and top_k < vocab.size:
        kept = md.fresh_dim(md.Dim("kept", top_k), logits.dims)
        values, _ = md.top_k(logits, vocab, kept)
        logits = md.where(logits >= md.min(values, kept), logits, NO_SCORE)
    if top_p < 1:
        sorted_logits = -md.sort(-logits, vocab)
        preceding = md.cumsum(md.softmax(sorted_logits, vocab), vocab, exclusive=True)
        threshold = md.min(md.where(preceding < top_p, sorted_logits, -NO_SCORE), vocab)
        logits = md.where(logits >= threshold, logits, NO_SCORE)
    return logits


def _decode(
    step: Step,
    empty: Empty,
    batch: DimLike,
    length: DimLike,
    choose: Choose,
    ends: tuple[int, int, int],
    memory: str,
) -> md.Tensor:
    """One sequence per batch element; `choose(logits, vocab, position)` returns the next token."""
    batch, length = new_dim(batch, "the batch"), new_dim(length, "the length")
    start, end, padding = ends
    memory_dim = md.Dim(memory, length.size)

    def decode_position(carry: Any, t: md.Tensor) -> Any:
        last, done, cache = carry
        logits, vocab, cache = run(step, last, cache, t, md.iota(memory_dim) <= t)
        token = choose(at_least_float32(logits), vocab, t)
        token = md.where(done, padding, token)
        return (token, done | (token == end), cache), token

    first = md.broadcast(md.cast(start, "int32"), [batch])
    carry = (first, first == end, empty((batch, memory_dim)))
    steps = steps_of(length, carry)
    _, tokens = md.scan(decode_position, carry, md.iota(steps), over=steps)
    return md.rename(md.transpose(tokens, [batch, steps]), **{steps.name: length.name})


def at_least_float32(logits: md.Tensor) -> md.Tensor:
    """The logits, cast to float32 if their dtype is narrower."""
    return md.cast(logits, "float32") if logits.dtype.itemsize < 4 else logits
