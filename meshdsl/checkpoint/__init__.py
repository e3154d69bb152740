"""Checkpoints in meshdsl's own format: written by every process, trusted by none, restored onto any layout."""

from .store import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
