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
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, DimsLike, Shape, find, merge, pick, show, split_items
from ..errors import ShapeError, located
from ..ir import Op, Type
from ..trace import Tensor, as_tensor, bind1, tensor
from .contraction import broadcast, einsum, sum
from .elementwise import as_dtype, cast, equal, kind, promote
from .masking import identity
from .reshape import blocked_kernel, transpose
from .slicing import reverse

__all__ = ["FOLD", "UNFOLD", "Window", "avg_pool", "conv", "max_pool", "sum_pool", "transposed", "windows"]


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
    return _sized(there, m, n)


def _sized(window: Window, n: int, m: int) -> Window:
    """With the high padding (perhaps negative) that makes exactly m of n elements."""
    return dataclasses.replace(window, high=(m - 1) * window.stride + window.extent - window.span(n) - window.low)


def _numbers(name: str, what: str, given: Any, over: Sequence[str]) -> dict[str, int]:
    """A number for each dim: one for all of them, or by name, 1 where it is not named."""
    by_name: dict[str, Any] = dict.fromkeys(over, given)
    if isinstance(given, Mapping):
        by_name = {_name(d): n for d, n in given.items()}
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


def _by_name(name: str, window: Any, example: str) -> dict[str, Any]:
    if not isinstance(window, Mapping):
        raise ShapeError(f"md.{name} names the dims it slides over, for example window={example}; got {window!r}")
    return {_name(d): value for d, value in window.items()}


def _name(dim: DimLike) -> str:
    return dim.name if isinstance(dim, Dim) else dim


def _pads(name: str, padding: Any, usual: str, over: Sequence[str]) -> dict[str, Any]:
    """For each dim "same", "valid" or (low, high)."""
    by_name = {_name(d): p for d, p in padding.items()} if isinstance(padding, Mapping) else {}
    _check_named(name, "padding", by_name, over)
    if not isinstance(padding, Mapping):
        by_name = dict.fromkeys(over, padding)
    for d, p in by_name.items():
        pair = isinstance(p, tuple | list) and len(p) == 2 and all(hasattr(n, "__index__") for n in p)
        if p not in ("same", "valid") and not pair:
            raise ShapeError(f"md.{name} pads with 'same', 'valid' or a pair (low, high), got {p!r} for dim {d!r}")
    return {d: by_name.get(d, usual) for d in over}


def _padded(window: Window, n: int, padding: Any) -> Window:
    """The window with its padding as numbers; "same" makes one window for each `stride` positions (XLA's SAME)."""
    if padding == "valid":
        return window
    if padding == "same":
        span = window.span(n)
        total = max((-(-span // window.stride) - 1) * window.stride + window.extent - span, 0)
        padding = total // 2, total - total // 2
    low, high = padding
    return dataclasses.replace(window, low=low.__index__(), high=high.__index__())


def _pairs(window: tuple[Window, ...], x: Shape) -> list[tuple[Window, Dim]]:
    """Each window with the input dim it reads."""
    return [(v, find(v.dim, x, "dim to slide a window over")) for v in window]


@dataclass(frozen=True)
class _Parts:
    """The dims of a convolution by what becomes of them; what a window reads apart."""

    batch: Shape  # of x alone
    summed: Shape  # of x and w, not of the result
    group: Shape  # of x, w and the result
    features: Shape  # of w alone


def _parts(x: Shape, w: Shape, out: Shape, window: tuple[Window, ...], kernel: tuple[str, ...]) -> _Parts:
    x = tuple(d for d in x if d.name not in {v.dim for v in window})
    w = tuple(d for d in w if d.name not in kernel)
    there = {d.name for d in out}
    both = tuple(d for d in x if d in w)
    return _Parts(
        batch=tuple(d for d in x if d not in w),
        summed=tuple(d for d in both if d.name not in there),
        group=tuple(d for d in both if d.name in there),
        features=tuple(d for d in w if d not in x),
    )


def _conv_type(
    x: Type, w: Type, *, window: tuple[Window, ...], kernel: tuple[str, ...], out: Shape, dtype: np.dtype
) -> Type:
    if kind(x.dtype) not in "fci" or x.dtype != w.dtype:
        raise ShapeError(f"md.conv takes two tensors of numbers of one dtype, got {x} and {w}")
    if kind(x.dtype) == "c" and kind(dtype) != "c":
        raise ShapeError(f"md.conv of {x.dtype.name} cannot be a {dtype.name}: the imaginary part would be lost")
    operands = f"  the operands are {show(x.shape)} and {show(w.shape)}"
    reads = {v.dim for v in window}
    rest_x = tuple(d for d in x.shape if d.name not in reads)
    rest_w = tuple(d for d in w.shape if d.name not in kernel)
    known = merge([rest_x, rest_w])
    if len(set(kernel)) < len(kernel):
        raise ShapeError(f"md.conv slides one dim of w over several of x: {', '.join(kernel)}; each needs its own")
    for v, k in zip(window, kernel, strict=True):
        if v.dim in {d.name for d in rest_w} or k in {d.name for d in rest_x}:
            name, has = (v.dim, "w") if v.dim in {d.name for d in rest_w} else (k, "x")
            raise ShapeError(
                f"dim {name!r} is part of the window {v.dim!r}: {k!r} of md.conv, and {has} has it too\n{operands}\n"
                f"  rename one of the two, for example md.rename({has}, {name}='{name}_2')"
            )
        if v.out_dim in known:
            raise ShapeError(f"md.conv makes dim {v.out_dim!r} from {v.dim!r}, and an operand has it too\n{operands}")
        if find(k, w.shape).size != v.size:
            raise ShapeError(f"the window over {v.dim!r} has size {v.size}, and dim {k!r} of w {find(k, w.shape).size}")
        known[v.out_dim] = Dim(v.out_dim, v.out_size(find(v.dim, x.shape).size))
    if pick(out, known.values(), what="output dim") != out:
        raise ShapeError(f"md.conv makes {show(known.values())}, not {show(out)}")
    parts = _parts(x.shape, w.shape, out, window, kernel)
    made = {v.out_dim for v in window}
    lost = [d for d in (*parts.batch, *parts.features) if d not in out]
    lost += [d for name, d in known.items() if name in made and d not in out]
    if lost:
        raise ShapeError(
            f"md.conv would lose dim {lost[0].name!r}\n{operands}, and the result's dims are {show(out)}\n"
            "  a dim of one operand stays, and so do the window's; name it in out=, or sum over it first with md.sum"
        )
    return Type(out, dtype)


def _conv_kernel(
    c: Local, x: Any, w: Any, *, window: tuple[Window, ...], kernel: tuple[str, ...], out: Shape, dtype: np.dtype
) -> Any:
    """Dims of equal fate are merged into one, without a transpose where they are stored side by side."""
    x_dims, w_dims = c.ins[0].shape, c.ins[1].shape
    parts = _parts(x_dims, w_dims, out, window, kernel)
    reads = {v.dim: str(i) for i, v in enumerate(window)}
    slides = {k: str(i) for i, k in enumerate(kernel)}
    makes = {v.out_dim: str(i) for i, v in enumerate(window)}
    sizes = {d.name: n for d, n in zip((*w_dims, *x_dims), (*w.shape, *x.shape), strict=True)}
    made = {v.out_dim: v.out_size(x.shape[c.ins[0].position(v.dim)]) for v in window}
    stored = [made[d.name] if d.name in made else sizes[d.name] for d in out]
    if 0 in (*x.shape, *w.shape, *stored):
        return c.xp.zeros(stored, dtype)
    lhs, x = _merged(c, x, x_dims, reads, {"N": parts.batch, "C": (*parts.group, *parts.summed)})
    rhs, w = _merged(c, w, w_dims, slides, {"O": (*parts.group, *parts.features), "I": parts.summed})
    to, names = _order(out, makes, {"N": parts.batch, "C": (*parts.group, *parts.features)})
    groups = math.prod(sizes[d.name] for d in parts.group)
    y = c.xp.conv(x, w, (lhs, rhs, to), [_numeric(v) for v in window], groups, dtype).astype(dtype)
    y = y.reshape([made[name] if name in made else sizes[name] for name in names])
    order = [names.index(d.name) for d in out]
    return y if order == sorted(order) else c.xp.transpose(y, order)


def _order(shape: Shape, places: Mapping[str, str], parts: Mapping[str, Shape]) -> tuple[str, list[str]]:
    """Letters of the merged dims in storage order, and the names of the dims they consist of."""
    letter = {**places, **{d.name: part for part, dims in parts.items() for d in dims}}
    within = {part: [d.name for d in dims] for part, dims in parts.items()} | {p: [name] for name, p in places.items()}
    found = "".join(dict.fromkeys(letter[d.name] for d in shape))
    found += "".join(part for part in parts if part not in found)  # nothing is merged into it: its size is 1
    return found, [name for one in found for name in within[one]]


def _merged(c: Local, x: Any, shape: Shape, places: Mapping[str, str], parts: Mapping[str, Shape]) -> tuple[str, Any]:
    found, names = _order(shape, places, parts)
    sizes = {d.name: n for d, n in zip(shape, x.shape, strict=True)}
    order = [next(i for i, d in enumerate(shape) if d.name == name) for name in names]
    x = x if order == sorted(order) else c.xp.transpose(x, order)
    place = {p: name for name, p in places.items()}
    merged = [sizes[place[p]] if p in place else math.prod(sizes[d.name] for d in parts[p]) for p in found]
    return found, x.reshape(merged)


def _numeric(v: Window) -> tuple[int, ...]:
    return v.size, v.stride, v.dilation, v.base_dilation, v.low, v.high


def _conv_vjp(
    ct: Tensor, x: Tensor, w: Tensor, window: tuple[Window, ...], kernel: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """Of x: ct read back by the same kernel, reversed. Of w: x read by ct, each in its operand's own dim order."""
    back, along, flipped = [], [], w
    for v, k in zip(window, kernel, strict=True):
        n, m = find(v.dim, x.dims).size, find(v.out_dim, ct.dims).size
        back.append(transposed(v, n, m))
        step = dataclasses.replace(v, out_dim=k, size=m, stride=v.dilation, dilation=v.stride)
        along.append(_sized(step, n, v.size))
        flipped = reverse(flipped, k) if v.size > 1 else flipped
    outs = [v.out_dim for v in window]
    return _conv(ct, flipped, back, kernel, x.dims, x.dtype), _conv(x, ct, along, outs, w.dims, w.dtype)


def _conv(x: Tensor, w: Tensor, window: Sequence[Window], kernel: Sequence[str], out: Shape, dtype: Any) -> Tensor:
    """`conv` with every number given."""
    return conv(
        x,
        w,
        {v.dim: (k, v.out_dim) for v, k in zip(window, kernel, strict=True)},
        out,
        stride={v.dim: v.stride for v in window},
        padding={v.dim: (v.low, v.high) for v in window},
        dilation={v.dim: v.dilation for v in window},
        base_dilation={v.dim: v.base_dilation for v in window},
        dtype=dtype,
    )


def _conv_flops(ins: Any, outs: Any, *, shapes: Any, out: Shape, kernel: tuple[str, ...], **_: Any) -> float:
    """A multiplication and an addition for each element of the result and of the kernel that it is summed over."""
    there = {d.name for d in out}
    summed = [n for d, n in zip(shapes[1], ins[1], strict=True) if d.name in kernel or d.name not in there]
    return 2.0 * math.prod(outs[0]) * math.prod(summed)


CONV = Op(
    "conv",
    type=_conv_type,
    kernel=blocked_kernel(_conv_kernel),
    vjp=_conv_vjp,
    flops=_conv_flops,
    linear="each",
    reduce="sum",
    mask=0,
    fuses="reduce",
    blocked=lambda x, w, *, window, kernel, **_: (*_touched(window), *kernel),
)


def _touched(window: tuple[Window, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for v in window for name in (v.dim, v.out_dim)))


def conv(
    x: Any,
    w: Any,
    window: Mapping[DimLike, DimLike | tuple[DimLike, DimLike]],
    out: DimsLike,
    stride: int | Mapping[DimLike, int] = 1,
    padding: Any = "same",
    dilation: int | Mapping[DimLike, int] = 1,
    base_dilation: int | Mapping[DimLike, int] = 1,
    *,
    dtype: Any = None,
) -> Tensor:
    """A kernel w slid over dims of x: `window` says which dim of w (its value) slides over which of x (its key).

    >>> import meshdsl as md
    >>> x, w = md.tensor([1.0, 2.0, 3.0], "length"), md.tensor([[1.0, 1.0, 0.0]], "feature kernel")
    >>> md.conv(x, w, window={"length": "kernel"}, out="length feature", padding={"length": (1, 1)})
    tensor(float32[length=3 feature=1], [[1.]
     [3.]
     [5.]])

    Any number of dims may slide; with none it is an einsum. Other dims follow from their names: one that only x has
    (batch) or only w (channels out) stays; one that both have is summed over (channels in), or, where `out` names it,
    keeps apart groups with kernels of their own. `out` lists the result's dims in storage order; a dim that was slid
    over keeps its name and takes its new size, or takes another name: `window={"length": ("kernel", "moved")}`.

    As in XLA the kernel is not flipped: element o of the result is the sum over k of
    `x[o * stride - low + k * dilation] * w[k]`, with zeros outside x, and `base_dilation - 1` zeros between its
    elements. `padding` is "valid" (none), "same" (one element for each `stride` positions of x, zeros in between
    counted, the odd zero at the high end) or `{dim: (low, high)}`; negative numbers cut off. `stride`, `dilation` and
    `base_dilation` are numbers for every dim, or by name, 1 and "same" for a dim not named. A kernel longer than x
    with its padding gives size 0. `dtype` is that of the sum (default: the operands' common one).

    Raises `ShapeError` for a window over what is not there, for operands that share a name in different roles, and
    when `out` would lose a dim.
    """
    x, w = promote(x, w)

    def resolve() -> tuple[tuple[Window, ...], tuple[str, ...], Shape, np.dtype]:
        roles = {d: _kernel_and_name(d, k) for d, k in _by_name("conv", window, "{'height': 'kh'}").items()}
        over = tuple(roles)
        strides, dilations = _numbers("conv", "stride", stride, over), _numbers("conv", "dilation", dilation, over)
        bases = _numbers("conv", "base dilation", base_dilation, over)
        pads, found = _pads("conv", padding, "same", over), []
        for d, (k, name) in roles.items():
            n, size = find(d, x.dims, "dim to slide over").size, find(k, w.dims, "kernel dim").size
            found.append(_padded(Window(d, name, size, strides[d], dilations[d], bases[d]), n, pads[d]))
        slid, kernel = tuple(found), tuple(k for k, _ in roles.values())
        sum_dtype = as_dtype(dtype or x.dtype)
        shape = _named_out(x.dims, w.dims, slid, kernel, out)
        _conv_type(x.type, w.type, window=slid, kernel=kernel, out=shape, dtype=sum_dtype)
        return slid, kernel, shape, sum_dtype

    slid, kernel, shape, sum_dtype = located(resolve)
    if not slid:
        return einsum(x, w, out=shape, dtype=sum_dtype)
    return bind1(CONV, x, w, window=slid, kernel=kernel, out=shape, dtype=sum_dtype)


def _kernel_and_name(dim: DimLike, value: Any) -> tuple[str, str]:
    kernel, name = value if isinstance(value, tuple) else (value, dim)
    return _name(kernel), _name(name)


def _named_out(x: Shape, w: Shape, window: tuple[Window, ...], kernel: tuple[str, ...], out: DimsLike) -> Shape:
    """The output dims asked for; a dim that is slid over may be given as x has it, and gets its new size."""
    read = {v.dim: v.out_size(find(v.dim, x).size) for v in window}
    made = {v.out_dim: Dim(v.out_dim, read[v.dim]) for v in window}
    rest = [d for d in x if d.name not in read] + [d for d in w if d.name not in kernel]
    known = {d.name: d for d in rest} | made
    asked = [d.name if isinstance(d, Dim) and d.name in made and d in x else d for d in split_items(out)]
    return pick(asked, known.values(), what="output dim")


def _slid_type(x: Type, *, window: tuple[Window, ...]) -> Type:
    """The type of what only moves a window over x."""
    sizes = {v.dim: Dim(v.out_dim, v.out_size(d.size)) for v, d in _pairs(window, x.shape)}
    return Type(tuple(sizes.get(d.name, d) for d in x.shape), x.dtype)


def _pool_kernel(reduce: str) -> Callable[..., Any]:
    def run(c: Local, x: Any, *, window: tuple[Window, ...]) -> Any:
        fill = identity({"max": "low", "add": 0}[reduce], np.dtype(x.dtype))
        along = {c.ins[0].position(v.dim): _numeric(v) for v in window}
        return c.xp.pool(x, reduce, fill, along)

    return run


def _pool_flops(ins: Any, outs: Any, *, window: tuple[Window, ...], **_: Any) -> float:
    return float(math.prod(outs[0]) * math.prod(v.size for v in window))


def _back(window: tuple[Window, ...], x: Shape, out: Shape) -> tuple[Window, ...]:
    return tuple(transposed(v, d.size, find(v.out_dim, out).size) for v, d in _pairs(window, x))


SUM_POOL = Op(
    "sum_pool",
    type=_slid_type,
    kernel=blocked_kernel(_pool_kernel("add")),
    vjp=lambda ct, x, window: (bind1(SUM_POOL, ct, window=_back(window, x.dims, ct.dims)),),
    flops=_pool_flops,
    linear="joint",
    mask=0,
    blocked=lambda x, *, window: _touched(window),
)


def _max_pool_vjp(ct: Tensor, x: Tensor, out: Tensor, window: tuple[Window, ...]) -> tuple[Tensor]:
    """Equal shares to all that tie for the maximum of a window; padding is NaN here, which equals nothing."""
    places = tuple(Dim(f"{v.dim}_place", v.size) for v in window)
    unfolded = bind1(UNFOLD, x, window=window, places=places, value=math.nan)
    ties = cast(equal(unfolded, broadcast(out, unfolded.dims)), ct.dtype)
    shares = ties * broadcast(ct, ties.dims) / broadcast(sum(ties, places), ties.dims)  # NaN where the maximum is
    return (bind1(FOLD, shares, window=_back(window, x.dims, ct.dims), places=places),)


MAX_POOL = Op(
    "max_pool",
    type=_slid_type,
    kernel=blocked_kernel(_pool_kernel("max")),
    vjp=_max_pool_vjp,
    flops=_pool_flops,
    mask="low",
    blocked=lambda x, *, window: _touched(window),
)


def _unfold_type(x: Type, *, window: tuple[Window, ...], places: Shape, value: Any) -> Type:
    slid = _slid_type(x, window=window)
    return Type((*slid.shape, *places), x.dtype)


def _unfold_kernel(c: Local, x: Any, *, window: tuple[Window, ...], places: Shape, value: Any) -> Any:
    for v in window:
        axis = c.ins[0].position(v.dim)
        x = c.xp.stack([c.xp.window_slice(x, axis, k, _numeric(v), value) for k in range(v.size)], -1)
    return x


UNFOLD = Op(
    "unfold",
    type=_unfold_type,
    kernel=blocked_kernel(_unfold_kernel),
    vjp=lambda ct, x, window, places: (bind1(FOLD, ct, window=_back(window, x.dims, ct.dims), places=places),),
    flops=lambda *_, **__: 0,
    linear="padded",
    blocked=lambda x, *, window, places, value: (*_touched(window), *(d.name for d in places)),
)


def _fold_type(x: Type, *, window: tuple[Window, ...], places: Shape) -> Type:
    slid = _slid_type(x, window=window)
    return Type(tuple(d for d in slid.shape if d not in places), x.dtype)


def _fold_kernel(c: Local, x: Any, *, window: tuple[Window, ...], places: Shape) -> Any:
    order = [c.ins[0].position(d) for d in (*(d for d in c.ins[0].shape if d not in places), *places)]
    names = [d.name for d in c.ins[0].shape if d not in places]
    x = x if order == sorted(order) else c.xp.transpose(x, order)
    for v in reversed(window):
        axis = names.index(v.dim)
        total = None
        for k in range(v.size):
            part = c.xp.window_slice(x[..., v.size - 1 - k], axis, k, _numeric(v), 0)
            total = part if total is None else total + part
        x = total
    return x


def _fold_vjp(ct: Tensor, x: Tensor, window: tuple[Window, ...], places: Shape) -> tuple[Tensor]:
    back = _back(window, x.dims, ct.dims)
    return (transpose(bind1(UNFOLD, ct, window=back, places=places, value=0), x.dims),)


FOLD = Op(
    "fold",
    type=_fold_type,
    kernel=blocked_kernel(_fold_kernel),
    vjp=_fold_vjp,
    flops=lambda ins, outs, **_: float(math.prod(ins[0])),
    linear="joint",
    mask=0,
    blocked=lambda x, *, window, places: (*_touched(window), *(d.name for d in places)),
)


def _pool_windows(name: str, x: Tensor, window: Mapping[DimLike, int], stride: Any, padding: Any) -> tuple[Window, ...]:
    sizes = _by_name(name, window, "{'height': 2}")
    over = tuple(sizes)
    sizes = _numbers(name, "window", sizes, over)
    strides = sizes if stride is None else _numbers(name, "stride", stride, over)
    pads = _pads(name, padding, "valid", over)
    return tuple(
        _padded(Window(d, d, sizes[d], strides[d]), find(d, x.dims, "dim to slide a window over").size, pads[d])
        for d in over
    )


def max_pool(x: Any, window: Mapping[DimLike, int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The maximum of each window, `{dim: size}`, over one dim or several; they keep their names.

    >>> import meshdsl as md
    >>> md.max_pool(md.tensor([1.0, 3.0, 2.0, 4.0, 0.0], "length"), window={"length": 2})
    tensor(float32[length=2], [3. 4.])

    `stride` (default: the window, so that windows lie side by side) is a number for every dim, or by name; `padding`
    is "valid", "same" or `{dim: (low, high)}`, as in `md.conv`, and never wins: it is -inf (the lowest integer), which
    is also the result of a window that holds nothing else. NaN if any element is. The gradient is shared equally
    among ties. Raises `ShapeError` for a dim that x lacks, and for booleans and complex numbers.
    """
    x = as_tensor(x)

    def resolve() -> tuple[Window, ...]:
        if kind(x.dtype) not in "fi":
            raise ShapeError(f"md.max_pool needs numbers that have an order, got {x.dtype.name}")
        return _pool_windows("max_pool", x, window, stride, padding)

    slid = located(resolve)
    return bind1(MAX_POOL, x, window=slid) if slid else x


def sum_pool(x: Any, window: Mapping[DimLike, int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The sum of each window; see `max_pool`. Padding is 0."""
    x = as_tensor(x)
    x = cast(x, "int32") if kind(x.dtype) == "b" else x
    slid = located(lambda: _pool_windows("sum_pool", x, window, stride, padding))
    return bind1(SUM_POOL, x, window=slid) if slid else x


def avg_pool(x: Any, window: Mapping[DimLike, int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The mean of the elements of x in each window; see `max_pool`. Padding is neither summed nor counted.

    >>> import meshdsl as md
    >>> md.avg_pool(md.tensor([1.0, 3.0, 2.0, 4.0, 6.0], "length"), window={"length": 2}, padding="same")
    tensor(float32[length=3], [2. 3. 6.])

    A window that holds padding alone has no mean: NaN.
    """
    x = as_tensor(x)
    slid = located(lambda: _pool_windows("avg_pool", x, window, stride, padding))
    total = sum_pool(x, window, stride, padding)
    counts = [(Dim(v.out_dim, v.out_size(d.size)), _real(v, d.size)) for v, d in _pairs(slid, x.dims)]
    same = math.prod(int(n[0]) for _, n in counts if len(n) and (n == n[0]).all())
    total = total / same if same != 1 or kind(total.dtype) == "i" else total
    for dim, n in counts:
        if len(n) and (n != n[0]).any():
            total = total / cast(tensor(n, [dim]), total.dtype)
    return total


def _real(v: Window, n: int) -> np.ndarray:
    """How many elements, of n, each window holds."""
    p = np.arange(v.out_size(n))[:, None] * v.stride - v.low + np.arange(v.size) * v.dilation
    return ((p >= 0) & (p < v.span(n)) & (p % v.base_dilation == 0)).sum(1).astype(np.int32)
