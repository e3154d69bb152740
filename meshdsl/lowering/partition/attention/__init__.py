"""Lower attention and its gradient: local, around a ring, or with another dim split instead of the positions."""

from .lower import lower_attention

__all__ = ["lower_attention"]
