"""What the processes of one program agree on. Requires that all of them call the same functions in the same order,
from their main threads; with one process nothing is sent.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["count", "everywhere", "from_first", "index"]


def index() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def from_first(words: bytes, size: int) -> bytes:
    """What process 0 says, at most `size` bytes; what the others pass is ignored."""
    if count() == 1:
        return words
    sent = np.zeros(size + 1, np.uint8)
    sent[0] = len(words)
    sent[1 : 1 + len(words)] = np.frombuffer(words, np.uint8)
    got = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return got[1 : 1 + int(got[0])].tobytes()


def everywhere(holds: bool) -> bool:
    """Whether it holds in every process."""
    if count() == 1:
        return holds
    return bool(np.all(multihost_utils.process_allgather(np.array([holds], np.uint8))))
