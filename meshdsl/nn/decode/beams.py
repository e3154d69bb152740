"""Beam search, in two forms with equal results."""

from __future__ import annotations

from typing import Any

import jax

import meshdsl as md

from ..precision import new_dim
from .steps import WORST, Empty, Step, run, steps_of

__all__ = ["FORMS", "beam_search"]

FORMS = ("flat", "reorder")


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
    batch, length, beam = (new_dim(d, f"the {n}") for d, n in ((batch, "batch"), (length, "length"), (beam, "beam")))
    flat = form == "flat"
    places = md.Dim(memory, length.size * (beam.size if flat else 1))
    twice = md.Dim("candidate", 2 * beam.size)

    def penalty(n: Any) -> Any:
        return ((5 + n) / 6) ** alpha

    def place(carry: Any, t: md.Tensor) -> Any:
        going, score, ended, ended_score, last, cache, seen = carry
        if flat:
            seen = seen | (md.broadcast(md.iota(places), [beam, places]) == t * beam.size + md.iota(beam))
        logits, vocab, cache = run(step, last, cache, t, seen if flat else md.iota(places) <= t)
        total = md.log_softmax(md.cast(logits, dtype), vocab) + score
        value, parent, token = _continuations(total, beam, vocab, twice)
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
    (going, score, ended, ended_score, *_), _ = md.scan(place, carry, md.iota(steps_of(length)), over="step")
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
