"""Checkpoints in meshdsl's own format: written by all processes, verified when read, restored onto any layout."""

from .restore import Restored
from .store import Checkpoints

__all__ = ["Checkpoints", "Restored"]
