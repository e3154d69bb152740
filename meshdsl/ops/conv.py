"""Convolution over any number of named dims: `conv`. Its gradients are convolutions too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Block, Local
from ..dims import ByDim, Dim, DimLike, DimsLike, Shape, find, merge, name_of, pick, show, split_items
from ..errors import ShapeError
from ..ir import Fuses, Linear, Op, Product, Reduce, Type
from ..trace import Tensor, bind1
from .contraction import einsum
from .dtypes import as_dtype, kind, promote
from .slicing import reverse
from .window import Window, by_name, numbers, numeric, padded, pads_of, sized, touched, transposed


@dataclass(frozen=True)
class _Parts:
    """The dims of a convolution by role, except the dims that a window slides over."""

    batch: Shape  # in x only
    summed: Shape  # in x and w, not in the result
    group: Shape  # in x, w and the result
    features: Shape  # in w only


def _parts(x: Shape, w: Shape, out: Shape, window: tuple[Window, ...], kernel: tuple[str, ...]) -> _Parts:
    x = tuple(d for d in x if d.name not in {v.dim for v in window})
    w = tuple(d for d in w if d.name not in kernel)
    out_names = {d.name for d in out}
    shared = tuple(d for d in x if d in w)
    return _Parts(
        batch=tuple(d for d in x if d not in w),
        summed=tuple(d for d in shared if d.name not in out_names),
        group=tuple(d for d in shared if d.name in out_names),
        features=tuple(d for d in w if d not in x),
    )


def _conv_type(
    x: Type, w: Type, *, window: tuple[Window, ...], kernel: tuple[str, ...], out: Shape, dtype: np.dtype
) -> Type:
    if kind(x.dtype) not in "fci" or x.dtype != w.dtype:
        raise ShapeError(f"md.conv takes two tensors of numbers of one dtype, got {x} and {w}")
    if kind(x.dtype) == "c" and kind(dtype) != "c":
        raise ShapeError(f"md.conv of {x.dtype.name} cannot be a {dtype.name}: the imaginary part would be lost")
    dims_by_name = _dims_of(x, w, window, kernel)
    if pick(out, dims_by_name.values(), what="output dim") != out:
        raise ShapeError(f"md.conv makes {show(dims_by_name.values())}, not {show(out)}")
    parts = _parts(x.dims, w.dims, out, window, kernel)
    kept = [*parts.batch, *parts.features, *(dims_by_name[v.out_dim] for v in window)]
    if lost := [d for d in kept if d not in out]:
        raise ShapeError(
            f"md.conv would lose dim {lost[0].name!r}\n{_operands(x, w)}, and the result's dims are {show(out)}\n"
            "  dims of one operand and the window's dims stay; name them in out=, or sum over them first with md.sum"
        )
    return Type(out, dtype)


def _operands(x: Type, w: Type) -> str:
    return f"  the operands are {show(x.dims)} and {show(w.dims)}"


def _dims_of(x: Type, w: Type, window: tuple[Window, ...], kernel: tuple[str, ...]) -> dict[str, Dim]:
    """The dims that a result may have, by name; raises `ShapeError` for windows that do not fit the operands."""
    operands, reads = _operands(x, w), {v.dim for v in window}
    rest_x = tuple(d for d in x.dims if d.name not in reads)
    rest_w = tuple(d for d in w.dims if d.name not in kernel)
    dims_by_name = merge([rest_x, rest_w])
    if len(set(kernel)) < len(kernel):
        raise ShapeError(f"md.conv slides one dim of w over several of x: {', '.join(kernel)}; each needs its own")
    for v, k in zip(window, kernel, strict=True):
        if v.dim in {d.name for d in rest_w} or k in {d.name for d in rest_x}:
            name, has = (v.dim, "w") if v.dim in {d.name for d in rest_w} else (k, "x")
            raise ShapeError(
                f"dim {name!r} is part of the window {v.dim!r}: {k!r} of md.conv, and {has} has it too\n{operands}\n"
                f"  rename one of the two, for example md.rename({has}, {name}='{name}_2')"
            )
        if v.out_dim in dims_by_name:
            raise ShapeError(f"md.conv makes dim {v.out_dim!r} from {v.dim!r}, and an operand has it too\n{operands}")
        if find(k, w.dims).size != v.size:
            raise ShapeError(f"the window over {v.dim!r} has size {v.size}, and dim {k!r} of w {find(k, w.dims).size}")
        dims_by_name[v.out_dim] = Dim(v.out_dim, v.out_size(find(v.dim, x.dims).size))
    return dims_by_name


def _conv_kernel(
    c: Local, x: Any, w: Any, *, window: tuple[Window, ...], kernel: tuple[str, ...], out: Shape, dtype: np.dtype
) -> Any:
    """Merge dims of equal role into one, then convolve. Dims that are stored side by side need no transpose."""
    x_dims, w_dims = c.ins[0].dims, c.ins[1].dims
    parts = _parts(x_dims, w_dims, out, window, kernel)
    reads = {v.dim: str(i) for i, v in enumerate(window)}
    slides = {k: str(i) for i, k in enumerate(kernel)}
    makes = {v.out_dim: str(i) for i, v in enumerate(window)}
    sizes = {d.name: n for d, n in zip((*w_dims, *x_dims), (*w.shape, *x.shape), strict=True)}
    made = sizes | {v.out_dim: v.out_size(x.shape[c.ins[0].position(v.dim)]) for v in window}
    stored = [made[d.name] for d in out]
    if 0 in (*x.shape, *w.shape, *stored):
        return c.xp.zeros(stored, dtype)
    for d in parts.group:
        x, w = _without_padding(c, x, c.ins[0], d), _without_padding(c, w, c.ins[1], d)
    lhs, x = _merged(c, x, x_dims, reads, {"N": parts.batch, "C": (*parts.group, *parts.summed)})
    rhs, w = _merged(c, w, w_dims, slides, {"O": (*parts.group, *parts.features), "I": parts.summed})
    to, names = _order(out, makes, {"N": parts.batch, "C": (*parts.group, *parts.features)})
    groups = math.prod(sizes[d.name] for d in parts.group)
    y = c.xp.conv(x, w, (lhs, rhs, to), [numeric(v) for v in window], groups, dtype).astype(dtype)
    y = y.reshape([made[name] for name in names])
    order = [names.index(d.name) for d in out]
    return y if order == sorted(order) else c.xp.transpose(y, order)


def _without_padding(c: Local, x: Any, block: Block, dim: Dim) -> Any:
    """Zeros in the padding of a group dim: XLA makes some grouped convolutions dense, and NaN then crosses groups."""
    padded = block.size(dim) * c.count(block.axes[block.position(dim)]) > dim.size
    return c.xp.where(c.positions(block, dim) < dim.size, x, c.xp.zeros((), x.dtype)) if padded else x


def _order(shape: Shape, places: Mapping[str, str], parts: Mapping[str, Shape]) -> tuple[str, list[str]]:
    """The axes as JAX's convolution names them (as in "NHWC"), in storage order, and the names of the dims in it."""
    letter_of = {**places, **{d.name: part for part, dims in parts.items() for d in dims}}
    within = {part: [d.name for d in dims] for part, dims in parts.items()} | {p: [name] for name, p in places.items()}
    letters = "".join(dict.fromkeys(letter_of[d.name] for d in shape))
    letters += "".join(part for part in parts if part not in letters)  # no dim has this role: its size is 1
    return letters, [name for letter in letters for name in within[letter]]


def _merged(c: Local, x: Any, shape: Shape, places: Mapping[str, str], parts: Mapping[str, Shape]) -> tuple[str, Any]:
    letters, names = _order(shape, places, parts)
    sizes = {d.name: n for d, n in zip(shape, x.shape, strict=True)}
    order = [next(i for i, d in enumerate(shape) if d.name == name) for name in names]
    x = x if order == sorted(order) else c.xp.transpose(x, order)
    place = {p: name for name, p in places.items()}
    merged = [sizes[place[p]] if p in place else math.prod(sizes[d.name] for d in parts[p]) for p in letters]
    return letters, x.reshape(merged)


def _conv_vjp(
    ct: Tensor,
    x: Tensor,
    w: Tensor,
    window: tuple[Window, ...],
    kernel: tuple[str, ...],
    to_dtypes: Sequence[np.dtype],
) -> tuple[Tensor, Tensor]:
    """The gradient of x convolves ct with the reversed kernel; that of w convolves x with ct.

    Each has its operand's dim order.
    """
    back, along, flipped = [], [], w
    for v, k in zip(window, kernel, strict=True):
        n, m = find(v.dim, x.dims).size, find(v.out_dim, ct.dims).size
        back.append(transposed(v, n, m))
        step = dataclasses.replace(v, out_dim=k, size=m, stride=v.dilation, dilation=v.stride)
        along.append(sized(step, n, v.size))
        flipped = reverse(flipped, k) if v.size > 1 else flipped
    outs = [v.out_dim for v in window]
    to_x, to_w = to_dtypes
    return _conv(ct, flipped, back, kernel, x.dims, to_x), _conv(x, ct, along, outs, w.dims, to_w)


def _conv(x: Tensor, w: Tensor, window: Sequence[Window], kernel: Sequence[str], out: Shape, dtype: Any) -> Tensor:
    """`conv` with all options taken from windows."""
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
    """One multiplication and one addition for each element of the result and each kernel element summed over."""
    out_names = {d.name for d in out}
    summed = [n for d, n in zip(shapes[1], ins[1], strict=True) if d.name in kernel or d.name not in out_names]
    return 2.0 * math.prod(outs[0]) * math.prod(summed)


CONV = Op(
    "conv",
    type=_conv_type,
    kernel=_conv_kernel,
    vjp=_conv_vjp,
    vmap=lambda x, w, *, new, out, **params: bind1(CONV, x, w, out=(new, *out), **params),
    flops=_conv_flops,
    linear=Linear.EACH,
    reduce=Reduce.SUM,
    mask=0,
    fuses=Fuses.REDUCE,
    product=Product.CONV,
    blocked=lambda x, w, *, window, kernel, **_: (*touched(window), *kernel),
)


def conv(
    x: Any,
    w: Any,
    window: ByDim[str] | ByDim[DimLike | tuple[DimLike, DimLike]],
    out: DimsLike,
    stride: int | ByDim[int] = 1,
    padding: Any = "same",
    dilation: int | ByDim[int] = 1,
    base_dilation: int | ByDim[int] = 1,
    *,
    dtype: Any = None,
) -> Tensor:
    """Convolve x with the kernel w. `window` maps each dim of x to slide over to the kernel dim of w.

    >>> import meshdsl as md
    >>> x, w = md.tensor([1.0, 2.0, 3.0], "length"), md.tensor([[1.0, 1.0, 0.0]], "feature kernel")
    >>> md.conv(x, w, window={"length": "kernel"}, out="length feature", padding={"length": (1, 1)})
    tensor(float32[length=3 feature=1], [[1.]
     [3.]
     [5.]])

    `window` may have any number of dims; with none, the result is an einsum. The names of other dims set their role: a
    dim that only x has (batch) or only w has (output channels) stays; a dim that both have is summed over (input
    channels), or, if `out` names it, is a group dim with a separate kernel per index. `out` lists the result's dims in
    storage order. A dim that is slid over keeps its name and gets its new size; to rename it, write
    `window={"length": ("kernel", "moved")}`.

    As in XLA, the kernel is not flipped: element o of the result is the sum over k of
    `x[o * stride - low + k * dilation] * w[k]`, with zeros outside x and `base_dilation - 1` zeros between its
    elements. `padding` is "valid" (none), "same" (the result has one element per `stride` positions of x, including
    the zeros between elements; an odd zero is added at the high end) or `{dim: (low, high)}`, where negative numbers
    crop x. `stride`, `dilation` and `base_dilation` are one number for all dims, or numbers by dim name. A dim not
    named has stride and dilations 1 and padding "same". If the kernel is longer than padded x, the result has size 0.
    `dtype` is the dtype of the sum (default: the operands' common dtype).

    Raises `ShapeError` for a window over a dim that an operand lacks, for a name with different roles in the operands,
    and if `out` omits a dim that must stay.
    """
    x, w = promote(x, w)

    roles = {d: _kernel_and_name(d, k) for d, k in by_name("conv", window, "{'height': 'kh'}").items()}
    over = tuple(roles)
    strides, dilations = numbers("conv", "stride", stride, over), numbers("conv", "dilation", dilation, over)
    bases = numbers("conv", "base dilation", base_dilation, over)
    pads, windows = pads_of("conv", padding, "same", over), []
    for d, (k, name) in roles.items():
        n, size = find(d, x.dims, "dim to slide over").size, find(k, w.dims, "kernel dim").size
        windows.append(padded(Window(d, name, size, strides[d], dilations[d], bases[d]), n, pads[d]))
    slid, kernel = tuple(windows), tuple(k for k, _ in roles.values())
    sum_dtype = as_dtype(dtype or x.dtype)
    known, made = _dims_of(x.type, w.type, slid, kernel), {v.out_dim for v in slid}
    # a dim that is slid over may be given as x's dim; it gets its new size
    named = [d.name if isinstance(d, Dim) and d.name in made and d in x.dims else d for d in split_items(out)]
    shape = pick(named, known.values(), what="output dim")

    if not slid:
        _conv_type(x.type, w.type, window=slid, kernel=kernel, out=shape, dtype=sum_dtype)
        return einsum(x, w, out=shape, dtype=sum_dtype)
    return bind1(CONV, x, w, window=slid, kernel=kernel, out=shape, dtype=sum_dtype)


def _kernel_and_name(dim: DimLike, value: Any) -> tuple[str, str]:
    kernel, name = value if isinstance(value, tuple) else (value, dim)
    return name_of(kernel), name_of(name)
