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

from .beams import FORMS, beam_search
from .single import greedy, sample

__all__ = ["FORMS", "beam_search", "greedy", "sample"]
