"""Functions of functions: loops, branches and rematerialisation, whose equations contain graphs; gradients; `md.vmap`.

`params` has models, functions that declare parameters; `layers` stacks these, and `vmap` maps them.
"""

from .accumulate import accumulate
from .associative import associative_scan, cumlogsumexp, cummax, cummin, cumprod
from .branch import cond, switch, while_loop
from .loops import SCAN, scan
from .remat import BARRIER, KEEP, checkpoint, name

__all__ = [
    "BARRIER", "KEEP", "SCAN", "accumulate", "associative_scan", "checkpoint", "cond", "cumlogsumexp", "cummax",
    "cummin", "cumprod", "name", "scan", "switch", "while_loop",
]  # fmt: skip
