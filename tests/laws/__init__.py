"""One row per operation: a call, its operands and a plain reference. Every law about operations tests this table.

`rows()` lists the rows. A row makes its operands for any sizes (`row.make(rng, sizes)`), so laws can draw sizes of 1,
primes, and sizes that a mesh does not divide. `row.call(*tensors)` uses public names only and takes every size from its
operands.
"""

from __future__ import annotations

from .attention import attentions
from .contraction import contractions
from .control import associatives, choices, controls
from .elementwise import binaries, unaries
from .evaluate import gradient, operations, run
from .indexing import alongs, indices
from .placement import placements, randoms
from .row import INDEX, INDICES, SIZES, In, Row, leaves, looped, widest
from .scattering import scatters
from .shape import shapes
from .window import windows

__all__ = [
    "FAMILIES", "INDEX", "INDICES", "SIZES", "In", "Row", "gradient", "leaves", "looped", "operations", "rows", "run",
    "widest",
]  # fmt: skip

FAMILIES = {  # by title, in the order of docs/operations.md
    "Elementwise, one operand": unaries,
    "Elementwise, several operands": binaries,
    "Contractions and reductions": contractions,
    "Shape": shapes,
    "Indices and order": indices,
    "Indices along a dim": alongs,
    "Scatters, and indexing by name": scatters,
    "Windows": windows,
    "Attention": attentions,
    "Placement": placements,
    "Random numbers": randoms,
    "Loops, branches, rematerialisation": controls,
    "Associative scans": associatives,
    "Bounded loops and switches": choices,
}


def rows(composed: bool | None = False) -> list[Row]:
    """The rows of the table that are not composed of others; those that are; or, for None, all."""
    found = [row for family in FAMILIES.values() for row in family()]
    assert len({row.name for row in found}) == len(found)
    return [row for row in found if composed in (None, row.composed)]
