"""Checkpoints in meshdsl's own format: written by all processes, verified when read, restored onto any layout."""

from .checkpoints import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
