"""Search for plans: all candidates are estimated at once, and the most promising are costed by the compiler.

space, roles, knobs            the dims and meshes of layouts, sets of dims that share an axis, values of other choices
digest, screen, estimate       what is read of a graph, seconds of equations as arrays over candidates, of whole plans
guesses, plans                 the plans worth costing, corrected by exact costs; the phases of a search
variants, costed               the step of each plan, the exact costs so far
floor                          the least work of any plan
"""

from .api import search
from .result import SearchProgress, SearchResult

__all__ = ["SearchProgress", "SearchResult", "search"]
