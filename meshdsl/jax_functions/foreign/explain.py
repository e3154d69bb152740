"""What the blocks of a value are of a value that one device computes: the same, its parts, terms of a sum, or nothing.

Values are compared with all values of the one-device run, whatever line computed them, so a reference may be written
in another way: an explanation needs equal numbers, up to an order of axes and a reshape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .collectives import Array
from .simulate import Blocks, Run

REPLICATED, PARTIAL, EXTREME = "replicated", "partial", "extreme"
_EXTREMES = {"reduce_max", "max", "pmax"}
FEW = 16  # so few integers may be the terms of a sum by chance
ROTATED = 16  # axes of at most so many devices are tried in every cyclic order


@dataclass(frozen=True)
class Explanation:
    """The sharding that explains a value, and its scale: times what one device computes.

    `over` has for each mesh axis `replicated`, the number of the axis that it splits, `partial` (the value is the sum
    over devices) or `extreme` (their maximum).
    """

    over: dict[str, str | int]
    scale: float = 1.0
    turned: bool = False  # the blocks lie in a cyclic order, as in a ring
    is_mean: bool = False  # partial, and each device has the mean of its part

    @property
    def partial(self) -> tuple[str, ...]:
        return tuple(a for a, how in self.over.items() if how in (PARTIAL, EXTREME))

    @property
    def is_right(self) -> bool:
        return self.scale == 1.0 or self.is_mean

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Of several explanations, the largest is the likeliest."""
        return self.is_right, not self.turned, self.scale == 1.0

    def text(self, names: Sequence[str] = ()) -> str:
        """For people; `names` are the dims of the value's axes."""
        parts = list[str]()
        for axis, how in self.over.items():
            if how == PARTIAL:
                parts.append(f"a partial {'mean' if self.is_mean else 'sum'} over {axis!r}")
            elif how == EXTREME:
                parts.append(f"a partial maximum over {axis!r}")
            elif isinstance(how, int):
                dim = f"{names[how]!r}" if how < len(names) and names[how] else f"axis {how}"
                parts.append(f"{'in turn ' if self.turned else ''}split along {dim} over {axis!r}")
        text = ", ".join(parts) or "whole on every device"
        return text if self.is_right else f"{text}, {self.scale:g} times what one device computes"


class Reference:
    """The values of a run on one device, found by their numbers."""

    def __init__(self, run: Run, inputs: Sequence[Blocks], scales: Sequence[float], tolerance: float) -> None:
        self.tolerance, self.scales = tolerance, [1.0, *scales]
        self.known = dict[int, list[tuple[float, Array]]]()  # by size: what is left of a value without its scale
        seen = set[int]()
        for value in [*inputs, *(out for step in run.steps for out in step.outs)]:
            x = value.array
            if not isinstance(x, np.ndarray) or id(x) in seen or value.is_literal or not x.any():
                continue
            seen.add(id(x))
            self.known.setdefault(x.size, []).append((_shape_of_numbers(x), x[0]))
        for own in self.known.values():
            own.sort(key=lambda pair: pair[0])

    def explained(self, value: Blocks, only: Array | None = None) -> Explanation | None:
        """The sharding under which `value` is one of the reference, or is `only`; the one nearest to right."""
        x, mesh = value.array, value.mesh
        if not isinstance(x, np.ndarray) or value.is_literal or not x.size:
            return Explanation(dict.fromkeys(mesh, REPLICATED))
        best, extremes = None, value.maker is not None and value.maker.primitive in _EXTREMES
        grid = x.reshape(*mesh.values(), *x.shape[1:])
        for over, whole, turned in self.candidates(grid, list(mesh), extremes) if x.any() else ():
            scale = self.scale(whole, only)
            if scale is None:
                continue
            count = math.prod(n for a, n in mesh.items() if over[a] == PARTIAL)
            found = Explanation({a: over[a] for a in mesh}, scale, turned, scale == count > 1)
            if found.scale == 1.0 and not turned:
                return found
            if best is None or found.rank > best.rank:
                best = found
        return best

    def candidates(
        self, grid: Array, axes: list[str], extremes: bool
    ) -> Iterator[tuple[dict[str, str | int], Array, bool]]:
        """Every value that blocks [axes ..., block ...] may be the parts of, from the last mesh axis to the first."""
        if not axes:
            yield {}, grid, False
            return
        *rest, axis = axes
        at = len(rest)
        blocks = list(np.moveaxis(grid, at, 0))
        options = list[tuple[str | int, Array, bool]]()
        if all(close(block, blocks[0], self.tolerance) for block in blocks[1:]):
            options.append((REPLICATED, blocks[0], False))
        else:
            options += [(d, np.concatenate(blocks, at + d), False) for d in range(grid.ndim - 1 - at)]
            if grid.dtype.kind in "fc" or (grid.dtype.kind in "iu" and blocks[0].size >= FEW):
                options.append((PARTIAL, np.sum(blocks, 0), False))
            if extremes:
                options.append((EXTREME, np.max(blocks, 0), False))
            for turn in range(1, len(blocks)) if len(blocks) <= ROTATED else ():
                turned = blocks[turn:] + blocks[:turn]
                options += [(d, np.concatenate(turned, at + d), True) for d in range(grid.ndim - 1 - at)]
        for how, whole, turned in options:
            for over, result, more in self.candidates(whole, rest, extremes):
                yield {**over, axis: how}, result, turned or more

    def scale(self, x: Array, only: Array | None) -> float | None:
        """`x` over an equal value of the reference; None if there is none, under any order of axes."""
        known, mark = self.known.get(x.size, []), _shape_of_numbers(x[None])
        if only is not None:
            known = [(mark, only)] if only.shape == x.shape else []
        near = [
            y
            for other, y in known
            if abs(other - mark) <= 1e-6 * max(1.0, abs(mark)) or (other != other and mark != mark)
        ]
        best = None
        for y in near:
            for turned in _orders(y, x.shape):
                if close(x, turned, self.tolerance):
                    return 1.0
                if best is None and x.dtype.kind in "fc" and (ratio := _ratio(x, turned)) is not None:
                    best = next(
                        (s for s in self.scales if abs(ratio / s - 1) < 1e-6 and close(x, turned * s, self.tolerance)),
                        None,
                    )
        return best


def scales_of(sizes: Sequence[int]) -> list[float]:
    """The factors by which sums over mesh axes and loops of these sizes may be wrong, nearest to 1 first."""
    products = {math.prod(own) for n in range(1, len(sizes) + 1) for own in itertools.combinations(sizes, n)}
    powers = {p**e for p in map(float, products) for e in (1, -1, 2, -2)}
    return sorted(powers - {1.0}, key=lambda s: abs(math.log(s)))


def _orders(y: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """`y` in the shape, under every order of its axes that gives the shape or a reshape of it."""
    yield y.reshape(shape)
    if sorted(y.shape) == sorted(shape) and 1 < y.ndim <= 5:
        for order in itertools.permutations(range(y.ndim)):
            if order != tuple(range(y.ndim)) and tuple(y.shape[i] for i in order) == shape:
                yield y.transpose(order)


def _ratio(x: Array, y: Array) -> float | None:
    at = np.unravel_index(np.argmax(np.abs(np.nan_to_num(y, posinf=0, neginf=0))), y.shape)
    ratio = x[at] / y[at] if y[at] else np.nan
    return float(ratio.real) if np.isfinite(ratio) and ratio.real > 0 else None


def _shape_of_numbers(x: Array) -> float:
    """A number that any order of the elements, and any scale, leaves as it is."""
    finite = np.abs(np.where(np.isfinite(x), x, 0)).astype(float)
    square = float(np.sqrt((finite**2).sum()))
    return float(finite.sum()) / square if square else np.nan


def close(x: Array, y: Array, tolerance: float, slack: float = 0.0) -> bool:
    """True for equal integers, and for floats that differ by at most `tolerance` of the largest, and `slack`; NaN
    equals NaN."""
    if x.shape != y.shape:
        return False
    if x.dtype.kind not in "fc":
        return bool(np.array_equal(x, y))
    with np.errstate(all="ignore"):
        finite = np.isfinite(y)
        largest = np.abs(y[finite]).max(initial=0)
        same = (x == y) | ((x != x) & (y != y)) | (np.abs(x - y) <= tolerance * largest + slack)
    return bool(same.all())
