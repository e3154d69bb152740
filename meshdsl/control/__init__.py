"""Loops, branches and rematerialisation. Each is one equation that contains graphs."""

from .accumulate import accumulate
from .branch import cond, while_loop
from .loops import SCAN, scan
from .remat import BARRIER, KEEP, checkpoint, name

__all__ = ["BARRIER", "KEEP", "SCAN", "accumulate", "checkpoint", "cond", "name", "scan", "while_loop"]
