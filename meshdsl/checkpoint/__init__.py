"""Checkpoints in meshdsl's own format: written by every process, trusted by none, restored onto any layout."""

from .restore import Restored
from .store import Checkpoints

__all__ = ["Checkpoints", "Restored"]
