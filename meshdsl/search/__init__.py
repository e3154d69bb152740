"""Search for layouts: the compiler partitions and costs candidates, lower bounds exclude the others.

space, candidates   the layouts of a mesh, and what became of each
bound, screen       lower bounds of a cost: by rules, and with loops lowered
evaluate, search    the cost of one layout; the loop over candidates, best first
overrides           splits of single parameters beyond a layout's rules
"""

from .api import search, search_overrides
from .override_result import OverrideResult
from .result import Progress, SearchResult

__all__ = ["OverrideResult", "Progress", "SearchResult", "search", "search_overrides"]
