"""Search for plans: the compiler costs candidates, and local search chooses them.

space                          the layouts of a mesh
plan_layouts, moves            the fastest layouts of a mesh, and the neighbours of a plan
local_search, knobs, plans     changes of one choice at a time; the values of each; the phases of a search
evaluate, costed, floor        the cost of one plan, those costed so far, and the least work of any plan
"""

from .api import search
from .result import SearchProgress, SearchResult

__all__ = ["SearchProgress", "SearchResult", "search"]
