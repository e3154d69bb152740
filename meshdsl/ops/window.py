"""Windows: each element along an output dim reads a window of elements along an input dim, and nothing else.

A `Window` says all there is to say of one such dim, for every operation of the family alike: output index o reads the
positions `o * stride - low + k * dilation`, k < size, of the input with `base_dilation - 1` holes after each element.
A position that is a hole or outside is the operation's identity: 0 of a sum, -inf of a max. Strides, paddings, and
dilations of the kernel (window dilation) and of the input (base dilation) are XLA's
(openxla.org/xla/operation_semantics, ConvWithGeneralPadding and ReduceWindow); GShard (Lepikhin et al., 2021, section
3.3 and appendix A.4) lists what each asks of neighbours when the dim is split.

The family is closed under gradients: a convolution's are convolutions, a pooled sum's is a pooled sum, and `unfold`
and `fold` are each other's. In all of them a window's gradient is `transposed(window)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dims import Dim, DimLike, Shape, find
from ..errors import ShapeError
from ..ir import Type

__all__ = [
    "Window", "by_name", "name_of", "numbers", "numeric", "padded", "pads_of", "pairs", "sized", "touched",
    "transposed", "windows",
]  # fmt: skip


@dataclass(frozen=True)
class Window:
    """How one output dim reads one input dim; printed without what is usual.

    >>> Window("height", "height", 3, stride=2, low=1, high=1)
    height[3,stride=2,low=1,high=1]
    >>> Window("height", "height", 3, stride=2, low=1, high=1).out_size(7)
    4
    """

    dim: str
    out_dim: str
    size: int
    stride: int = 1
    dilation: int = 1
    base_dilation: int = 1
    low: int = 0
    high: int = 0

    @property
    def extent(self) -> int:
        """The positions from the first that a window reads to its last, both counted."""
        return _spread(self.size, self.dilation)

    def span(self, n: int) -> int:
        """The positions that n input elements take, holes between them included."""
        return _spread(n, self.base_dilation)

    def out_size(self, n: int) -> int:
        """The windows that fit into n input elements and the padding; 0 when none does."""
        return max(0, (self.low + self.span(n) + self.high - self.extent) // self.stride + 1)

    def __repr__(self) -> str:
        usual = {"stride": 1, "dilation": 1, "base_dilation": 1, "low": 0, "high": 0}
        parts = [f"{name}={getattr(self, name)}" for name in usual if getattr(self, name) != usual[name]]
        to = "" if self.out_dim == self.dim else f"->{self.out_dim}"
        return f"{self.dim}{to}[{','.join([str(self.size), *parts])}]"


def _spread(n: int, apart: int) -> int:
    return (n - 1) * apart + 1 if n else 0


def windows(*types: Type, window: tuple[Window, ...], **params: Any) -> tuple[Window, ...]:
    """How an equation of this family reads its first operand, one record for each dim along which it does.

    `fold` takes what it reads at place k of a window from index `size - 1 - k` of the dim that is folded.
    """
    return window


def transposed(window: Window, n: int, m: int) -> Window:
    """The window with which the cotangent (m elements) of what reads `window` is read back into n elements.

    The element at position p is read by window o at its place k where `p = o * stride - low + k * dilation`. Solved
    for o: strides and base dilation change places, and places are counted from the other end.

    >>> transposed(Window("height", "height", 3, stride=2, low=1, high=1), 7, 4)
    height[3,base_dilation=2,low=1,high=1]
    """
    there = dataclasses.replace(
        window,
        dim=window.out_dim,
        out_dim=window.dim,
        stride=window.base_dilation,
        base_dilation=window.stride,
        low=(window.size - 1) * window.dilation - window.low,
    )
    return sized(there, m, n)


def sized(window: Window, n: int, m: int) -> Window:
    """With the high padding (perhaps negative) that makes exactly m of n elements."""
    return dataclasses.replace(window, high=(m - 1) * window.stride + window.extent - window.span(n) - window.low)


def numbers(name: str, what: str, given: Any, over: Sequence[str]) -> dict[str, int]:
    """A number for each dim: one for all of them, or by name, 1 where it is not named."""
    by_name: dict[str, Any] = dict.fromkeys(over, given)
    if isinstance(given, Mapping):
        by_name = {name_of(d): n for d, n in given.items()}
    _check_named(name, what, by_name, over)
    for d, n in by_name.items():
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
            raise ShapeError(f"md.{name} takes whole numbers from 1 for its {what}, got {n!r} for dim {d!r}")
    return {d: by_name[d].__index__() if d in by_name else 1 for d in over}


def _check_named(name: str, what: str, given: Iterable[str], over: Sequence[str]) -> None:
    stray = [d for d in given if d not in over]
    if stray:
        raise ShapeError(
            f"md.{name} is given a {what} for dim {stray[0]!r}, which is not in its window\n"
            f"  the window's dims are {', '.join(over) or 'none'}"
        )


def by_name(name: str, window: Any, example: str) -> dict[str, Any]:
    if not isinstance(window, Mapping):
        raise ShapeError(f"md.{name} names the dims it slides over, for example window={example}; got {window!r}")
    return {name_of(d): value for d, value in window.items()}


def name_of(dim: DimLike) -> str:
    return dim.name if isinstance(dim, Dim) else dim


def pads_of(name: str, padding: Any, usual: str, over: Sequence[str]) -> dict[str, Any]:
    """For each dim "same", "valid" or (low, high)."""
    by_name = {name_of(d): p for d, p in padding.items()} if isinstance(padding, Mapping) else {}
    _check_named(name, "padding", by_name, over)
    if not isinstance(padding, Mapping):
        by_name = dict.fromkeys(over, padding)
    for d, p in by_name.items():
        pair = isinstance(p, tuple | list) and len(p) == 2 and all(hasattr(n, "__index__") for n in p)
        if p not in ("same", "valid") and not pair:
            raise ShapeError(f"md.{name} pads with 'same', 'valid' or a pair (low, high), got {p!r} for dim {d!r}")
    return {d: by_name.get(d, usual) for d in over}


def padded(window: Window, n: int, padding: Any) -> Window:
    """The window with its padding as numbers; "same" makes one window for each `stride` positions (XLA's SAME)."""
    if padding == "valid":
        return window
    if padding == "same":
        span = window.span(n)
        total = max((-(-span // window.stride) - 1) * window.stride + window.extent - span, 0)
        padding = total // 2, total - total // 2
    low, high = padding
    return dataclasses.replace(window, low=low.__index__(), high=high.__index__())


def pairs(window: tuple[Window, ...], x: Shape) -> list[tuple[Window, Dim]]:
    """Each window with the input dim it reads."""
    return [(v, find(v.dim, x, "dim to slide a window over")) for v in window]


def numeric(v: Window) -> tuple[int, ...]:
    return v.size, v.stride, v.dilation, v.base_dilation, v.low, v.high


def touched(window: tuple[Window, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for v in window for name in (v.dim, v.out_dim)))
