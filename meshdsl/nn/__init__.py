"""Layers, written in the language: functions that make their parameters where they use them, inside `md.model`.

Dims are passed as `md.Dim` where a layer introduces them and by name where the input has them. No layer knows a mesh
axis; where two dims of one tensor may compete for one, the layer says which matters with `md.prefer`.
"""

from . import decode, moe
from .attention import multi_head_attention, rotary
from .cached import attention_to, cached_attention, keys_and_values
from .dropout import dropout
from .linear import dense, embedding, feed_forward, learned_positions
from .losses import softmax_cross_entropy
from .moe import moe_layer
from .norms import layer_norm, rms_norm
from .precision import Precision

__all__ = [
    "Precision",
    "dense", "embedding", "feed_forward", "learned_positions",
    "layer_norm", "rms_norm", "dropout",
    "multi_head_attention", "rotary",
    "keys_and_values", "attention_to", "cached_attention", "decode",
    "softmax_cross_entropy",
    "moe", "moe_layer",
]  # fmt: skip
