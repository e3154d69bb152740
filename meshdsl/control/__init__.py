"""Loops, branches and rematerialisation are equations that hold graphs."""

from .accumulate import accumulate
from .branch import cond, while_loop
from .loops import SCAN, scan
from .remat import BARRIER, KEEP, checkpoint, name

__all__ = ["BARRIER", "KEEP", "SCAN", "accumulate", "checkpoint", "cond", "name", "scan", "while_loop"]
