"""Neural-network layers: functions that create their own parameters, called inside `md.model`.

Pass a new dim as `md.Dim`, and a dim of the input by its name. Layers do not mention mesh axes. If a layout maps two
dims of one tensor to the same axis, the layer's `md.prefer` decides which dim is sharded.

What layers have in common: `name` is the scope of a layer's parameters, the first part of their paths. `init` is the
initialisation of its weights, by default a normal one scaled by the size of the inputs. `precision` is the `Precision`
of its parameters, products and sums. `bias` and `scale` say whether the layer has these parameters. `over` names the
dims of the input that the layer sums over. `eps` is added to the variance, so that the divisor is not zero.
`activation` is the name of an elementwise function of `md`, such as "gelu". `memory` is the dim of the positions of
keys and values.
"""

import meshdsl as md

from . import decode, moe
from .adapters import lora, merged
from .batch_norm import batch_norm, group_norm
from .cached import attention_to, cached_attention, keys_and_values, write_cache
from .convolution import causal_conv, conv
from .dropout import dropout
from .linear import dense, embedding, feed_forward, learned_positions, linear
from .losses import softmax_cross_entropy
from .moe import moe_layer
from .multi_head import multi_head_attention, rotary
from .norms import layer_norm, rms_norm
from .precision import Precision
from .recurrent import gru, lstm, state_space
from .relative import relative_bias
from .selective import selective_scan

attention = md.attention

__all__ = [
    "Precision",
    "dense", "linear", "conv", "causal_conv", "embedding", "feed_forward", "learned_positions",
    "layer_norm", "rms_norm", "batch_norm", "group_norm", "dropout",
    "lstm", "gru", "state_space", "selective_scan",
    "attention", "multi_head_attention", "relative_bias", "rotary",
    "keys_and_values", "attention_to", "cached_attention", "write_cache", "decode",
    "softmax_cross_entropy",
    "lora", "merged",
    "moe", "moe_layer",
]  # fmt: skip
