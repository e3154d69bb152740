"""One sequence for each place of the batch: the likeliest token at each place, or one that is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

from ..precision import new_dim
from .steps import WORST, Empty, Step, run, steps_of

__all__ = ["greedy", "likely", "sample"]


def greedy(
    step: Step,
    empty: Empty,
    batch: md.Dim,
    length: md.Dim,
    *,
    start: int = 1,
    end: int = 2,
    padding: int = 0,
    memory: str = "memory",
) -> md.Tensor:
    """Ids [batch, length]: at each place the likeliest, up to `end`, then padding.

    >>> import numpy as np
    >>> import meshdsl as md
    >>> table = md.tensor(np.eye(5, k=-2, dtype=np.float32).T + np.eye(5, dtype=np.float32)[2] * 0.5, "token vocab")
    >>> step = lambda tokens, cache, position, mask: (md.take(table, tokens, "token"), cache)
    >>> md.nn.decode.greedy(step, lambda dims: (), md.Dim("batch", 1), md.Dim("length", 4)).numpy()
    array([[3, 2, 0, 0]], dtype=int32)
    """
    ends = (start, end, padding)
    return _each_place(step, empty, batch, length, lambda logits, vocab, t: md.argmax(logits, vocab), ends, memory)


def sample(
    step: Step,
    empty: Empty,
    batch: md.Dim,
    length: md.Dim,
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
    """Ids [batch, length], drawn place by place; the random numbers are the same under every layout.

    >>> import meshdsl as md
    >>> def step(tokens, cache, position, mask):
    ...     return md.broadcast(md.cast(md.iota("vocab:5"), "float32"), [*tokens.dims, md.Dim("vocab", 5)]), cache
    >>> batch, length = md.dims("batch:1 length:6")
    >>> md.nn.decode.sample(step, lambda dims: (), batch, length, md.random.key(0), top_k=2).numpy()
    array([[4, 4, 4, 3, 3, 4]], dtype=int32)

    Logits are divided by `temperature`; then all but the `top_k` largest are left out (Fan et al., 2018), then all but
    the fewest whose probabilities together reach `top_p` (Holtzman et al., 2020). Equal logits stay or go together.
    Raises `ShapeError` for a temperature, top_k or top_p that is not positive, and for top_p above 1.
    """
    if not temperature > 0:
        raise md.ShapeError(f"a temperature is positive, got {temperature}; md.nn.decode.greedy is what 0 tends to")
    if (top_k is not None and (not isinstance(top_k, int) or top_k < 1)) or not 0 < top_p <= 1:
        raise md.ShapeError(f"top_k is a whole number from 1, top_p lies above 0 and up to 1; got {top_k}, {top_p}")

    def choose(logits: md.Tensor, vocab: md.Dim, t: md.Tensor) -> md.Tensor:
        logits = likely(logits / temperature, vocab, top_k, top_p)
        noise = md.random.gumbel(md.random.fold_in(key, t), logits.dims, dtype=logits.dtype)
        return md.argmax(logits + noise, vocab)

    return _each_place(step, empty, batch, length, choose, (start, end, padding), memory)


def likely(logits: md.Tensor, vocab: md.Dim, top_k: int | None, top_p: float) -> md.Tensor:
    """The logits, WORST where top_k or top_p leave them out."""
    if top_k is not None and top_k < vocab.size:
        values, _ = md.top_k(logits, vocab, md.Dim("kept", top_k))
        logits = md.where(logits >= md.min(values, "kept"), logits, WORST)
    if top_p < 1:
        falling = -md.sort(-logits, vocab)
        before = md.cumsum(md.softmax(falling, vocab), vocab, exclusive=True)
        least = md.min(md.where(before < top_p, falling, -WORST), vocab)
        logits = md.where(logits >= least, logits, WORST)
    return logits


def _each_place(
    step: Step,
    empty: Empty,
    batch: md.Dim,
    length: md.Dim,
    choose: Callable[[md.Tensor, md.Dim, md.Tensor], md.Tensor],
    ends: tuple[int, int, int],
    memory: str,
) -> md.Tensor:
    """One sequence for each place of the batch, by `choose(logits, vocab, position)`."""
    batch, length = new_dim(batch, "the batch"), new_dim(length, "the length")
    start, end, padding = ends
    places = md.Dim(memory, length.size)

    def place(carry: Any, t: md.Tensor) -> Any:
        last, done, cache = carry
        logits, vocab, cache = run(step, last, cache, t, md.iota(places) <= t)
        token = choose(_wide(logits), vocab, t)
        token = md.where(done, padding, token)
        return (token, done | (token == end), cache), token

    first = md.broadcast(md.cast(start, "int32"), [batch])
    carry = (first, first == end, empty((batch, places)))
    _, tokens = md.scan(place, carry, md.iota(steps_of(length)), over="step")
    return md.rename(md.transpose(tokens, [batch, steps_of(length)]), step=length.name)


def _wide(logits: md.Tensor) -> md.Tensor:
    return md.cast(logits, "float32") if logits.dtype.itemsize < 4 else logits
