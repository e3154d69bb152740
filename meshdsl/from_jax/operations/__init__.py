"""Each primitive of JAX as operations of meshdsl: `new_replay` has the handlers of all."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl import jax_functions

from ..replay import Replay
from . import elementwise, indices, keys, loops, products, shapes, windows
from .fallback import through_local
from .registry import HANDLERS

MODULES = (elementwise, indices, keys, loops, products, shapes, windows)  # each adds its handlers
AS_THEY_ARE = dict.fromkeys(sorted(jax_functions.ELEMENTWISE), elementwise.any_function)


def new_replay(prefer: Sequence[str] = ()) -> Replay:
    return Replay({**AS_THEY_ARE, **HANDLERS}, through_local, prefer)
