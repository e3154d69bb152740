"""Windows: each element along an output dim reads only a window of elements along an input dim.

A `Window` describes one such dim completely, for convolution and pooling. Output index o reads the
positions `o * stride - low + k * dilation`, k < size, of the input with `base_dilation - 1` holes between elements.
A hole or an out-of-range position has the operation's identity: 0 for a sum, -inf for a maximum. Strides, padding,
kernel dilation (window dilation) and input dilation (base dilation) are defined as in XLA
(openxla.org/xla/operation_semantics, ConvWithGeneralPadding and ReduceWindow). GShard (Lepikhin et al., 2021, section
3.3 and appendix A.4) lists the neighbour exchanges that each needs when the dim is sharded.

The gradients are in the same family: those of a convolution are convolutions, that of a pooled sum is a pooled sum.
Each uses the window `transposed(window)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dims import Dim, Shape, find, name_of
from ..errors import ShapeError


@dataclass(frozen=True)
class Window:
    """The window of one output dim over one input dim. `repr` omits default values.

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
        """The number of positions from the first to the last that a window reads, inclusive."""
        return _spread(self.size, self.dilation)

    def span(self, n: int) -> int:
        """The number of positions of n input elements, including holes between them."""
        return _spread(n, self.base_dilation)

    def out_size(self, n: int) -> int:
        """The number of windows that fit into n input elements plus padding; the size of the output dim."""
        return max(0, (self.low + self.span(n) + self.high - self.extent) // self.stride + 1)

    def __repr__(self) -> str:
        usual = {"stride": 1, "dilation": 1, "base_dilation": 1, "low": 0, "high": 0}
        parts = [f"{name}={getattr(self, name)}" for name in usual if getattr(self, name) != usual[name]]
        to = "" if self.out_dim == self.dim else f"->{self.out_dim}"
        return f"{self.dim}{to}[{','.join([str(self.size), *parts])}]"


def _spread(n: int, dilation: int) -> int:
    return (n - 1) * dilation + 1 if n else 0


def transposed(window: Window, n: int, m: int) -> Window:
    """The window of the gradient: it reads the cotangent (m elements) and gives the input's n elements.

    Window o reads the element at position p as its element k if `p = o * stride - low + k * dilation`. Solved for o,
    stride and base dilation are exchanged, and k counts from the other end.

    >>> transposed(Window("height", "height", 3, stride=2, low=1, high=1), 7, 4)
    height[3,base_dilation=2,low=1,high=1]
    """
    gradient = dataclasses.replace(
        window,
        dim=window.out_dim,
        out_dim=window.dim,
        stride=window.base_dilation,
        base_dilation=window.stride,
        low=(window.size - 1) * window.dilation - window.low,
    )
    return sized(gradient, m, n)


def sized(window: Window, n: int, m: int) -> Window:
    """The same window with the high padding (possibly negative) that gives m output elements for n input elements."""
    return dataclasses.replace(window, high=(m - 1) * window.stride + window.extent - window.span(n) - window.low)


def numbers(name: str, what: str, value: Any, over: Sequence[str]) -> dict[str, int]:
    """One number per dim, from a single number or from numbers by dim name; 1 for a dim not named.

    Raises `ShapeError` for a dim without a window, and for anything but integers from 1.
    """
    by_name = _by_dim(name, what, value, over)
    for d, n in by_name.items():
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
            raise ShapeError(f"md.{name} takes whole numbers from 1 for its {what}, got {n!r} for dim {d!r}")
    return {d: by_name[d].__index__() if d in by_name else 1 for d in over}


def _by_dim(name: str, what: str, value: Any, over: Sequence[str]) -> dict[str, Any]:
    """The values by dim name, from one value for all dims or from a mapping, which may leave out some."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(over, value)
    by_name = {name_of(d): each for d, each in value.items()}
    stray = [d for d in by_name if d not in over]
    if stray:
        raise ShapeError(
            f"md.{name} is given a {what} for dim {stray[0]!r}, which is not in its window\n"
            f"  the window's dims are {', '.join(over) or 'none'}"
        )
    return by_name


def by_name(name: str, window: Any, example: str) -> dict[str, Any]:
    if not isinstance(window, Mapping):
        raise ShapeError(f"md.{name} names the dims it slides over, for example window={example}; got {window!r}")
    return {name_of(d): value for d, value in window.items()}


def pads_of(name: str, padding: Any, usual: str, over: Sequence[str]) -> dict[str, Any]:
    """The padding of each dim: "same", "valid" or (low, high); `usual` for a dim not named."""
    by_name = _by_dim(name, "padding", padding, over)
    for d, p in by_name.items():
        pair = isinstance(p, tuple | list) and len(p) == 2 and all(hasattr(n, "__index__") for n in p)
        if not pair and not (isinstance(p, str) and p in ("same", "valid")):
            raise ShapeError(f"md.{name} pads with 'same', 'valid' or a pair (low, high), got {p!r} for dim {d!r}")
    return {d: by_name.get(d, usual) for d in over}


def padded(window: Window, n: int, padding: Any) -> Window:
    """The window with numeric padding; "same" gives one window per `stride` input positions (XLA's SAME)."""
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
