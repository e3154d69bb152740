"""Layout search: the compiler costs candidate layouts, and lower bounds exclude the rest.

space, candidates   the layouts of a mesh, and the status of each
bound, screen       lower bounds of a cost: from rules alone, and with loops lowered
evaluate, search    the cost of one layout; the best-first loop over candidates
overrides           splits of single parameters beyond a layout's rules
"""

from .api import search
from .result import Progress, SearchResult

__all__ = ["Progress", "SearchResult", "search"]
