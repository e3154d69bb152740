"""Searches for a sequence, one place at a time, by a step function that keeps what it has computed.

    step(tokens, cache, position, mask) -> (logits, cache)

tokens, of dims batch and in beam search also beam, are those of the place before; `position` counts places from 0. The
cache is a pytree of tensors; `mask` says which places of the memory each token may read, its own included. A search
asks for an empty cache with `empty(dims)`, dims being those with which keys and values are kept: batch and memory, and
where each beam has a memory of its own, beam. A step of `md.nn.cached_attention` fits all of them.

Beam search has two forms with equal results. "reorder" gives each beam a memory and moves it whenever a beam goes on
from another one. "flat" (GShard, Lepikhin et al., 2020, appendix A.1) lays the beams of a sequence into one memory,
place by place; nothing kept ever moves, only the mask [batch, beam, memory], which holds each beam's ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import meshdsl as md

__all__ = ["FORMS", "beam_search", "greedy", "sample"]

Step = Callable[[md.Tensor, Any, md.Tensor, md.Tensor], tuple[md.Tensor, Any]]
Empty = Callable[[tuple[md.Dim, ...]], Any]

WORST = -1e30  # the score of a beam that is not there
FORMS = ("flat", "reorder")


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
    if (top_k is not None and top_k < 1) or not 0 < top_p <= 1:
        raise md.ShapeError(f"top_k is a number from 1, top_p lies above 0 and up to 1; got {top_k} and {top_p}")

    def choose(logits: md.Tensor, vocab: md.Dim, t: md.Tensor) -> md.Tensor:
        logits = _likely(logits / temperature, vocab, top_k, top_p)
        noise = md.random.gumbel(md.random.fold_in(key, t), logits.dims, dtype=logits.dtype)
        return md.argmax(logits + noise, vocab)

    return _each_place(step, empty, batch, length, choose, (start, end, padding), memory)


def _likely(logits: md.Tensor, vocab: md.Dim, top_k: int | None, top_p: float) -> md.Tensor:
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
    start, end, padding = ends
    places = md.Dim(memory, length.size)

    def place(carry: Any, t: md.Tensor) -> Any:
        last, done, cache = carry
        logits, cache = step(last, cache, t, md.iota(places) <= t)
        token = choose(_wide(logits), _vocab(logits, last), t)
        token = md.where(done, padding, token)
        return (token, done | (token == end), cache), token

    first = md.broadcast(md.cast(start, "int32"), [batch])
    carry = (first, first == end, empty((batch, places)))
    _, tokens = md.scan(place, carry, md.iota(_steps(length)), over="step")
    return md.rename(md.transpose(tokens, [batch, _steps(length)]), step=length.name)


def beam_search(
    step: Step,
    empty: Empty,
    batch: md.Dim,
    length: md.Dim,
    beam: md.Dim,
    *,
    form: str = "flat",
    alpha: float = 0.6,
    start: int = 1,
    end: int = 2,
    padding: int = 0,
    memory: str = "memory",
    dtype: str = "float32",
) -> tuple[md.Tensor, md.Tensor]:
    """The best sequences, best first: ids [batch, beam, length] and scores [batch, beam].

    >>> import numpy as np
    >>> import meshdsl as md
    >>> table = md.tensor(np.log([[0.25] * 4, [0.1, 0.1, 0.3, 0.5], [0.25] * 4, [0.1, 0.1, 0.7, 0.1]]), "token vocab")
    >>> step = lambda tokens, cache, position, mask: (md.take(table, tokens, "token"), cache)
    >>> batch, length, beam = md.dims("batch:1 length:4 beam:2")
    >>> ids, scores = md.nn.decode.beam_search(step, lambda dims: (), batch, length, beam)
    >>> ids.numpy(), np.exp(scores.numpy() * [(7 / 6) ** 0.6, 1]).round(3)
    (array([[[3, 2, 0, 0],
            [2, 0, 0, 0]]], dtype=int32), array([[0.35, 0.3 ]]))

    A score is the sum of log-probabilities over ((5 + places) / 6) ** alpha, the end being one of the places (GNMT,
    Wu et al., 2016, section 7), added up in `dtype`. At each place the best 2 beam continuations are taken; those
    that end compete with what has ended before, the others go on (as in Tensor2Tensor). Where nothing has ended, the
    result is what goes on, without an end. A row that is not there has a score of -1e30. `form` is "flat" or
    "reorder". Raises `ShapeError` for another form, and for a vocabulary of fewer than two.
    """
    if form not in FORMS:
        raise md.ShapeError(f"beam search has no form {form!r}; there are: {', '.join(FORMS)}")
    flat = form == "flat"
    places = md.Dim(memory, length.size * (beam.size if flat else 1))
    twice = md.Dim("candidate", 2 * beam.size)

    def penalty(n: Any) -> Any:
        return ((5 + n) / 6) ** alpha

    def place(carry: Any, t: md.Tensor) -> Any:
        going, score, ended, ended_score, last, cache, seen = carry
        if flat:
            seen = seen | (md.broadcast(md.iota(places), [beam, places]) == t * beam.size + md.iota(beam))
        logits, cache = step(last, cache, t, seen if flat else md.iota(places) <= t)
        total = md.log_softmax(md.cast(logits, dtype), _vocab(logits, last)) + score
        value, parent, token = _continuations(total, beam, _vocab(logits, last), twice)
        here = md.broadcast(md.iota(length), [batch, twice, length]) == t
        made = md.where(here, md.broadcast(token, here.dims), _picked(going, parent, beam))

        ends = token == end
        long = penalty(md.cast(t, dtype) + 1)
        just = md.where(ends & (value > WORST / 2), value / long, WORST)
        ended_score, best = md.top_k(_joined(ended_score, just, beam, twice), twice.name, beam)
        ended = _picked(_joined(ended, made, beam, twice), best, twice)

        score, best = md.top_k(md.where(ends, WORST, value), twice, beam)
        going, last, parent = (_picked(x, best, twice) for x in (made, token, parent))
        if flat:
            seen = _picked(seen, parent, beam)
        else:
            cache = jax.tree.map(lambda x: _moved(x, parent, beam), cache, is_leaf=_is_tensor)
        return (going, score, ended, ended_score, last, cache, seen), None

    rows = [batch, beam]
    none = md.broadcast(md.cast(padding, "int32"), [*rows, length])
    first = md.broadcast(md.cast(start, "int32"), rows)
    one = md.broadcast(md.cast(md.where(md.iota(beam) == 0, 0.0, WORST), dtype), rows)
    nothing = md.broadcast(md.cast(False, "bool"), [*rows, places] if flat else [])
    cache = empty((batch, places) if flat else (batch, beam, places))
    carry = (none, one, none, md.broadcast(md.cast(WORST, dtype), rows), first, cache, nothing)
    (going, score, ended, ended_score, *_), _ = md.scan(place, carry, md.iota(_steps(length)), over="step")
    any_ended = md.broadcast(md.max(ended_score, beam) > WORST / 2, rows)
    score = md.where(any_ended, ended_score, score / penalty(length.size))
    return md.where(md.broadcast(any_ended, ended.dims), ended, going), score


def _continuations(
    total: md.Tensor, beam: md.Dim, vocab: md.Dim, into: md.Dim
) -> tuple[md.Tensor, md.Tensor, md.Tensor]:
    """The best continuations of all beams: their scores, the beams they come from and their tokens, [batch, into].

    Of each beam first, so that a vocabulary that is split is not gathered.
    """
    if vocab.size < 2:
        raise md.ShapeError(f"beam search chooses among tokens, and {vocab!r} has fewer than two")
    each = md.Dim("continuation", min(into.size, vocab.size))
    value, token = (md.flatten(x, [beam, each], "choice") for x in md.top_k(total, vocab, each))
    value, choice = md.top_k(value, "choice", into)
    return value, choice // each.size, md.take(token, choice, "choice")


def _picked(x: md.Tensor, which: md.Tensor, over: md.Dim) -> md.Tensor:
    """The slices of x along `over` that `which` says, its dims first."""
    return md.take(md.rename(x, **{over.name: "picked_from"}), which, "picked_from")


def _moved(x: md.Tensor, parent: md.Tensor, beam: md.Dim) -> md.Tensor:
    return md.transpose(_picked(x, parent, beam), x.dims) if beam in x.dims else x


def _joined(ended: md.Tensor, just: md.Tensor, beam: md.Dim, twice: md.Dim) -> md.Tensor:
    """What has ended before, and after it what has just ended."""
    return md.concat([md.rename(ended, **{beam.name: twice.name}), just], twice.name)


def _is_tensor(x: object) -> bool:
    return isinstance(x, md.Tensor)


def _steps(length: md.Dim) -> md.Dim:
    return md.Dim("step", length.size)


def _wide(logits: md.Tensor) -> md.Tensor:
    return md.cast(logits, "float32") if logits.dtype.itemsize < 4 else logits


def _vocab(logits: md.Tensor, tokens: md.Tensor) -> md.Dim:
    """The dim of the logits that the tokens lack."""
    more = [d for d in logits.dims if d not in tokens.dims]
    if len(more) != 1 or len(logits.dims) != len(tokens.dims) + 1:
        raise md.ShapeError(f"a step gives logits with the dims of its tokens and one more, got {logits.type}")
    return more[0]
