"""Mixture of experts: routing, dispatch, and the layer made of both.

Nothing here knows a mesh axis. A layout such as `batch:rows; expert:rows` splits the groups where tokens are and the
experts where experts are; between the two the compiler puts an all_to_all.
"""

from .dispatch import Dispatch, dispatch_by
from .layer import moe_layer
from .options import PRESETS, Preset, balanced_table, capacity_of
from .routing import Assignment, Choice, Picks, Routing, assign, route

__all__ = [
    "route", "Routing", "assign", "Assignment", "Choice", "Picks",
    "dispatch_by", "Dispatch", "moe_layer",
    "PRESETS", "Preset", "capacity_of", "balanced_table",
]  # fmt: skip
