"""Beam search, in two forms with equal results."""

from __future__ import annotations

from typing import Any

import jax

import meshdsl as md

from ..precision import DimLike, new_dim
from .steps import NO_SCORE, Empty, Step, run, steps_of

FORMS = ("flat", "reorder")


def beam_search(
    step: Step,
    empty: Empty,
    batch: DimLike,
    length: DimLike,
    beam: DimLike,
    *,
    form: str = "flat",
    alpha: float = 0.6,
    start: int = 1,
    end: int = 2,
    padding: int = 0,
    memory: str = "memory",
    dtype: str = "float32",
) -> tuple[md.Tensor, md.Tensor]:
    """Beam search: returns ids [batch, beam, length] and scores [batch, beam], best beam first.

    >>> import numpy as np
    >>> import meshdsl as md
    >>> table = md.tensor(np.log([[0.25] * 4, [0.1, 0.1, 0.3, 0.5], [0.25] * 4, [0.1, 0.1, 0.7, 0.1]]), "token vocab")
    >>> step = lambda tokens, cache, position, mask: (md.take(table, tokens, "token"), cache)
    >>> batch, length, beam = md.dims("batch:1 length:4 beam:2")
    >>> ids, scores = md.nn.decode.beam_search(step, lambda dims: (), batch, length, beam)
    >>> ids.numpy(), np.exp(scores.numpy() * [(7 / 6) ** 0.6, 1]).round(3)
    (array([[[3, 2, 0, 0],
            [2, 0, 0, 0]]], dtype=int32), array([[0.35, 0.3 ]]))

    A score is the sum of log-probabilities, accumulated in `dtype`, divided by ((5 + n) / 6) ** alpha, where n is the
    number of tokens including `end` (GNMT, Wu et al., 2016, section 7). Each position considers the best
    2 * beam.size continuations: those that end compete with the ended sequences, the others continue (as in
    Tensor2Tensor). If no sequence of a batch element has ended, its unfinished sequences are returned. A row without a
    sequence has score -1e30. `form` is "flat" or "reorder" (see `md.nn.decode`). Raises `ShapeError` for an unknown
    form, and for a vocabulary of size 1.
    """
    if form not in FORMS:
        raise md.ShapeError(f"unknown form of beam search {form!r}; known: {', '.join(FORMS)}")
    batch, length, beam = (new_dim(d, f"the {n}") for d, n in ((batch, "batch"), (length, "length"), (beam, "beam")))
    flat = form == "flat"
    memory_dim = md.Dim(memory, length.size * (beam.size if flat else 1))
    candidate = md.fresh_dim(md.Dim("candidate", 2 * beam.size), [batch, length, beam])

    def penalty(n: Any) -> Any:
        return ((5 + n) / 6) ** alpha

    def decode_position(carry: Any, t: md.Tensor) -> Any:
        alive, score, ended, ended_score, last, cache, seen = carry
        if flat:
            seen = seen | (md.broadcast(md.iota(memory_dim), [beam, memory_dim]) == t * beam.size + md.iota(beam))
        logits, vocab, cache = run(step, last, cache, t, seen if flat else md.iota(memory_dim) <= t)
        total = md.log_softmax(md.cast(logits, dtype), vocab) + score
        value, parent, token = _continuations(total, beam, vocab, candidate)
        is_position = md.broadcast(md.iota(length), [batch, candidate, length]) == t
        candidates = md.where(is_position, md.broadcast(token, is_position.dims), _select(alive, parent, beam))

        ends = token == end
        length_penalty = penalty(md.cast(t, dtype) + 1)
        just_ended = md.where(ends & (value > NO_SCORE / 2), value / length_penalty, NO_SCORE)
        ended_score, best = md.top_k(_concat_ended(ended_score, just_ended, beam, candidate), candidate.name, beam)
        ended = _select(_concat_ended(ended, candidates, beam, candidate), best, candidate)

        score, best = md.top_k(md.where(ends, NO_SCORE, value), candidate, beam)
        alive, last, parent = (_select(x, best, candidate) for x in (candidates, token, parent))
        if flat:
            seen = _select(seen, parent, beam)
        else:
            cache = jax.tree.map(lambda x: _move_to_parent(x, parent, beam), cache, is_leaf=_is_tensor)
        return (alive, score, ended, ended_score, last, cache, seen), None

    rows = [batch, beam]
    no_tokens = md.broadcast(md.cast(padding, "int32"), [*rows, length])
    start_tokens = md.broadcast(md.cast(start, "int32"), rows)
    start_scores = md.broadcast(md.cast(md.where(md.iota(beam) == 0, 0.0, NO_SCORE), dtype), rows)
    no_ancestors = md.broadcast(md.cast(False, "bool"), [*rows, memory_dim] if flat else [])
    cache = empty((batch, memory_dim) if flat else (batch, beam, memory_dim))
    no_scores = md.broadcast(md.cast(NO_SCORE, dtype), rows)
    carry = (no_tokens, start_scores, no_tokens, no_scores, start_tokens, cache, no_ancestors)
    steps = steps_of(length, carry)
    (alive, score, ended, ended_score, *_), _ = md.scan(decode_position, carry, md.iota(steps), over=steps)
    any_ended = md.broadcast(md.max(ended_score, beam) > NO_SCORE / 2, rows)
    score = md.where(any_ended, ended_score, score / penalty(length.size))
    return md.where(md.broadcast(any_ended, ended.dims), ended, alive), score


def _continuations(
    total: md.Tensor, beam: md.Dim, vocab: md.Dim, into: md.Dim
) -> tuple[md.Tensor, md.Tensor, md.Tensor]:
    """The best continuations of all beams: scores, parent beams and tokens, each [batch, into].

    Takes the top k of each beam before the top k of all beams, so that a sharded vocabulary is not gathered.
    """
    if vocab.size < 2:
        raise md.ShapeError(f"beam search needs a vocabulary of at least two tokens, got {vocab!r}")
    continuation = md.fresh_dim(md.Dim("continuation", min(into.size, vocab.size)), total.dims)
    every = md.fresh_dim(md.Dim("choice", beam.size * continuation.size), total.dims)
    value, token = (md.flatten(x, [beam, continuation], every) for x in md.top_k(total, vocab, continuation))
    value, choice = md.top_k(value, every, into)
    return value, choice // continuation.size, md.take(token, choice, every)


def _select(x: md.Tensor, index: md.Tensor, over: md.Dim) -> md.Tensor:
    """The slices of x along `over` at the indices `which`; the dims of `which` come first."""
    picked_from = md.fresh_dim(md.Dim("picked_from", over.size), x.dims, index.dims).name
    return md.take(md.rename(x, **{over.name: picked_from}), index, picked_from)


def _move_to_parent(x: md.Tensor, parent: md.Tensor, beam: md.Dim) -> md.Tensor:
    return md.transpose(_select(x, parent, beam), x.dims) if beam in x.dims else x


def _concat_ended(ended: md.Tensor, just_ended: md.Tensor, beam: md.Dim, candidate: md.Dim) -> md.Tensor:
    """Concatenates the sequences that ended earlier and those that ended at this position."""
    return md.concat([md.rename(ended, **{beam.name: candidate.name}), just_ended], candidate.name)


def _is_tensor(x: object) -> bool:
    return isinstance(x, md.Tensor)
