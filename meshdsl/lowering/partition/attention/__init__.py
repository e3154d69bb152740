"""Lower attention and its gradient: local, around a ring, or with another dim split instead of the positions."""

from .lower import lower_attention
from .turn import ATTENTION_TURN_GRAD

__all__ = ["ATTENTION_TURN_GRAD", "lower_attention"]
