"""Mixture of experts: routing, dispatch, and the layer made of both.

Nothing here knows a mesh axis. A layout such as `batch:rows; expert:rows` splits the groups where tokens are and the
experts where experts are; between the two the compiler puts an all_to_all.
"""

from .assignment import Assignment, Choice, Picks, assign
from .dispatch import INDEX_FROM, Dispatch, dispatch_by
from .layer import moe_layer
from .options import PRESETS, Preset, balanced_table, capacity_of
from .routing import Routing, route

__all__ = [
    "route", "Routing", "assign", "Assignment", "Choice", "Picks",
    "dispatch_by", "Dispatch", "INDEX_FROM", "moe_layer",
    "PRESETS", "Preset", "capacity_of", "balanced_table",
]  # fmt: skip
