"""Runs one step of a search and checks the step's results; shared by all searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import meshdsl as md

Step = Callable[[md.Tensor, Any, md.Tensor, md.Tensor], tuple[md.Tensor, Any]]
Empty = Callable[[tuple[md.Dim, ...]], Any]

NO_SCORE = -1e30  # the score of a beam that holds no sequence


def run(step: Step, tokens: md.Tensor, cache: Any, t: md.Tensor, mask: md.Tensor) -> tuple[md.Tensor, md.Dim, Any]:
    """Calls the step: its logits, the vocabulary dim of the logits, and its cache.

    Raises `ShapeError` unless the step returns (logits, cache) and the logits have the tokens' dims and one more.
    """
    result: Any = step(tokens, cache, t, mask)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], md.Tensor)):
        raise md.ShapeError(
            f"a step must return (logits, cache), with logits a tensor; got {type(result).__name__}"
            + (f" of {', '.join(type(x).__name__ for x in result)}" if isinstance(result, tuple) else "")
        )
    logits, cache = result
    new_dims = [d for d in logits.dims if d not in tokens.dims]
    if len(new_dims) != 1 or len(logits.dims) != len(tokens.dims) + 1:
        raise md.ShapeError(
            f"the logits of a step must have the dims of its tokens and one more dim; tokens are {tokens.type}, "
            f"logits are {logits.type}"
        )
    return logits, new_dims[0], cache


def steps_of(length: md.Dim, carry: Any) -> md.Dim:
    """The scan dim of a search with this state, which lacks it."""
    leaves = jax.tree.leaves(carry, is_leaf=lambda x: isinstance(x, md.Tensor))
    return md.fresh_dim(md.Dim("step", length.size), *(x.dims for x in leaves))
