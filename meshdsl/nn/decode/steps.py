"""What searches have in common: a step is run, and what it returns is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

__all__ = ["WORST", "Empty", "Step", "run", "steps_of"]

Step = Callable[[md.Tensor, Any, md.Tensor, md.Tensor], tuple[md.Tensor, Any]]
Empty = Callable[[tuple[md.Dim, ...]], Any]

WORST = -1e30  # the score of a beam that is not there


def run(step: Step, tokens: md.Tensor, cache: Any, t: md.Tensor, mask: md.Tensor) -> tuple[md.Tensor, md.Dim, Any]:
    """The logits of a step, their dim that the tokens lack, and the cache; raises `ShapeError` for other results."""
    found: Any = step(tokens, cache, t, mask)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], md.Tensor)):
        raise md.ShapeError(
            f"a step returns two things, its logits, which are a tensor, and its cache; got {type(found).__name__}"
            + (f" of {', '.join(type(x).__name__ for x in found)}" if isinstance(found, tuple) else "")
        )
    logits, cache = found
    more = [d for d in logits.dims if d not in tokens.dims]
    if len(more) != 1 or len(logits.dims) != len(tokens.dims) + 1:
        raise md.ShapeError(f"a step gives logits with the dims of its tokens and one more, got {logits.type}")
    return logits, more[0], cache


def steps_of(length: md.Dim) -> md.Dim:
    """The dim that a search goes along."""
    return md.Dim("step", length.size)
