"""Sequence decoding: greedy search, sampling and beam search, one position at a time, with a cache.

Each search calls a step function of yours:

    step(tokens, cache, position, mask) -> (logits, cache)

`tokens` are the tokens of the previous position, with dim batch (beam search: batch and beam). `position` counts from
0. `cache` is a pytree of tensors. `mask` is true for the memory positions that each token may attend to, including its
own. A search creates the cache by calling `empty(dims)`, where `dims` are batch and memory, and also beam if each beam
has its own memory. A step that uses `md.nn.cached_attention` works with every search.

Beam search has two forms with equal results. "reorder" gives each beam its own cache, and copies the parent's cache
when a beam continues another one. "flat" (GShard, Lepikhin et al., 2020, appendix A.1) interleaves the beams of a
sequence in one cache, which is never copied; the mask [batch, beam, memory] selects each beam's ancestors.

The first token given to a step is `start`; a sequence ends with the token `end`, and `padding` follows. `memory` is the
name of the dim of positions in the cache.

`generate` continues a prompt. Its step also takes a whole prompt, so that the prompt is computed at once.
"""

from .beams import FORMS, beam_search
from .prompted import generate
from .single import greedy, sample

__all__ = ["FORMS", "beam_search", "generate", "greedy", "sample"]
