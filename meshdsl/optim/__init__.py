"""Optimizers: pure functions of pytrees of tensors, written with md operations.

    optimizer = md.optim.adam(learning_rate=1e-3)
    state = optimizer.init(params)
    params, state = optimizer.update(grads, state, params)

The updates of sgd, momentum and Adam are elementwise: they run on each device's shard and send nothing. Adafactor,
LARS, LAMB and clipping need norms or means over whole weights, so their partial sums are all-reduced. Muon multiplies
matrices.

What they have in common: `learning_rate` is a number, or a schedule, a function of the step. `b1` and `b2` are the
decays of the first and the second moment. `eps` is added to a divisor, so that it is not zero. `weight_decay` shrinks
the weights for which `decays(path)` is true, by default all, and `adapts(path)` chooses the weights
with a trust ratio.
"""

from .adafactor import adafactor
from .clipping import clip_by_global_norm, global_norm, with_clipping
from .muon import muon
from .optax import from_optax
from .optimizers import Optimizer, adam, adamw, momentum, sgd
from .schedules import constant, inverse_sqrt, linear, rsqrt, warmup_cosine
from .trust_ratio import lamb, lars
from .wrappers import with_accumulation, with_average, with_frozen

__all__ = [
    "Optimizer",
    "sgd", "momentum", "adam", "adamw", "adafactor", "lamb", "lars", "muon", "from_optax",
    "clip_by_global_norm", "global_norm", "with_clipping", "with_accumulation", "with_average", "with_frozen",
    "constant", "inverse_sqrt", "linear", "rsqrt", "warmup_cosine",
]  # fmt: skip
