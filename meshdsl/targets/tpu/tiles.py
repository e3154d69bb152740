"""Bytes of the arrays that convolutions read and write, in tiles of the TPU compiler's layout.

It stores such an array with its channels in the 128 lanes of a tile and its batch in the 8 rows, or the other way
round, and pads both: 64 channels take the memory of 128; 32 images of 3 colors are stored with the batch in the lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...cost.scores import names
from ...ir import Eqn, Op, Product, Var, walk
from ...lowering import Program

LANES, ROWS = 128, 8
Roles = dict[frozenset[str], tuple[frozenset[str], frozenset[str]]]  # dims of an array -> its batch and channel dims


def padding(program: Program) -> Callable[[Var], float]:
    """An array's bytes in tiles, divided by its bytes without padding; 1 if no convolution reads or writes its dims."""
    roles: Roles = {}
    for eqn, _ in walk(program):
        if _is_convolution(eqn):
            roles.update(_roles(eqn))
    if not roles:
        return lambda v: 1.0

    def of(v: Var) -> float:
        candidates = (names(v), *(names(v) - {d.name} for d in v.dims))  # the last ones: a stack of such arrays
        role = next((roles[dims] for dims in candidates if dims in roles), None)
        if role is None:
            return 1.0
        sizes = dict(zip((d.name for d in v.dims), program.local_shape(v), strict=True))
        batch, channels = (math.prod(sizes[d] for d in dims) for dims in role)
        in_tiles = min(_up(channels, LANES) * _rows(batch), _up(batch, LANES) * _rows(channels))
        return in_tiles / (batch * channels) if batch * channels else 1.0

    return of


def read_by_convolutions(program: Program) -> set[Var]:
    """The arrays over which a kernel slides."""
    return {eqn.ins[0] for eqn in program.eqns if _is_convolution(eqn)}


def _is_convolution(eqn: Eqn) -> bool:
    return isinstance(eqn.op, Op) and eqn.op.product is Product.CONV


def _roles(eqn: Eqn) -> Roles:
    """Batch and channel dims of the operand that a kernel slides over, and of the result."""
    x, w, out = *map(names, eqn.ins), names(eqn.outs[0])
    slid = {v.dim for v in eqn.params["window"]}, {v.out_dim for v in eqn.params["window"]}
    batch = x - w - slid[0]
    return {x: (batch, (x & w) - slid[0]), out: (batch & out, out - batch - slid[1])}


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _rows(n: int) -> int:
    """Rows of a tile: of at most 4 elements the next power of two, else a multiple of 8."""
    return _up(n, ROWS) if n > ROWS // 2 else 1 << max(n - 1, 0).bit_length()
