"""Optimizers, written in the language: pure functions of pytrees of tensors.

    optimizer = md.optim.adam(learning_rate=1e-3)
    state = optimizer.init(params)
    params, state = optimizer.update(grads, state, params)

An update is elementwise, so it runs wherever the parameter lies and costs no communication.
"""

from .clipping import clip_by_global_norm, global_norm, with_clipping
from .optimizers import Optimizer, adam, adamw, momentum, sgd
from .schedules import constant, linear, rsqrt, warmup_cosine

__all__ = [
    "Optimizer",
    "sgd", "momentum", "adam", "adamw",
    "clip_by_global_norm", "global_norm", "with_clipping",
    "constant", "linear", "rsqrt", "warmup_cosine",
]  # fmt: skip
