"""Window operations along split dims: each device fetches the input that its windows read, then computes locally.

The first operand is read by the windows, and for `SUM_EQUAL` the first two. Of the others, a convolution's is its
kernel; all others have one element per window, so they are sharded like the result.

If the result is split along a dim, a device's windows read one run of the input: its own block and a halo from its
neighbours, sent by an exchange. If the kernel is split (in a kernel's gradient, where the kernel is the cotangent), a
device's part of the kernel also reads one run, and the results are partial. Positions outside the input, in holes of
its base dilation, or of devices without windows are filled with the operation's identity. GShard (Lepikhin et al.,
2020, section 3.3 and appendix A.4) treats these cases separately; here one table of pieces covers them all.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (NumPy, and parameters of equations, are only partly typed)

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dims import Dim, find
from ...ir import Eqn, Labels, Op, Type, Var, named
from ...layouts.sharding import Axes
from ...ops.index_map import IndexMap, Piece
from ...ops.masking import identity
from ...ops.pooling import SUM_EQUAL
from ...ops.window import Window
from .index_map import lower_index_map, resized
from .scope import Scope


def _read(eqn: Eqn) -> int:
    """The number of operands in which windows slide: two for the gradient of max_pool."""
    return 2 if eqn.op is SUM_EQUAL else 1


def _kernels(eqn: Eqn) -> tuple[str, ...]:
    """The kernel dim of each window; empty names if the operation has no kernel."""
    return eqn.params.get("kernel", ("",) * len(eqn.params["window"]))


def _sides(scope: Scope, eqn: Eqn) -> tuple[str, ...]:
    """For each window, "kernel" if its input is split like the kernel (when that is split), or "out": like the
    result.
    """

    def side(kernel: str) -> str:
        if not kernel or eqn.ins[1] in scope.unmaterialized:
            return "out"
        kernel_sharding = scope.whole_version(eqn.ins[1]) or scope.default_sharding[eqn.ins[1]]
        return "kernel" if kernel_sharding.axes(kernel) else "out"

    return tuple(side(kernel) for kernel in _kernels(eqn))


def _labels(eqn: Eqn, sides: Sequence[str]) -> Labels:
    window, kernels, read = eqn.params["window"], _kernels(eqn), _read(eqn)
    shared = {v.dim: v.out_dim if side == "out" else f"{k}*" for v, side, k in zip(window, sides, kernels, strict=True)}
    x: dict[str, str | None] = {d.name: shared.get(d.name, d.name) for d in eqn.ins[0].dims}
    rest: list[dict[str, str | None]] = []
    for v in eqn.ins[read:]:
        slid = {k: f"{k}*" if side == "kernel" else None for k, side in zip(kernels, sides, strict=True) if k}
        rest.append(named(v.dims) | slid)
    out = named(eqn.outs[0].dims)
    out.update({v.out_dim: None for v, side in zip(window, sides, strict=True) if side == "kernel"})
    return Labels((*[x] * read, *rest), (out,))


def labels(scope: Scope, eqn: Eqn) -> Labels:
    """A window's input dim shares a label with its output dim, or with its kernel dim."""
    return _labels(eqn, _sides(scope, eqn))


def needed(scope: Scope, eqn: Eqn, assigned: Any) -> bool:
    """True if any window dim is split."""
    return any(_axes(eqn, v, side, k, assigned) for v, side, k in _cases(scope, eqn))


def trimmed(eqn: Eqn, k: int) -> tuple[str, ...]:
    """The dims of operand k of which `build` fetches real elements only, if they are split."""
    return tuple(v.dim for v in eqn.params["window"]) if k < _read(eqn) else ()


def _cases(scope: Scope, eqn: Eqn) -> list[tuple[Window, str, str]]:
    return list(zip(eqn.params["window"], _sides(scope, eqn), _kernels(eqn), strict=True))


def _axes(eqn: Eqn, v: Window, side: str, kernel: str, assigned: Any) -> Axes:
    return assigned.get(v.out_dim if side == "out" else f"{kernel}*", ())


def build(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Any, outs: Sequence[Var]) -> None:
    """Fetch the input along each split window dim, then add the operation on the fetched input."""
    read = _read(eqn)
    fetched, window, sides = list(ins[:read]), list[Window](), list[str]()
    for v, side, kernel in _cases(scope, eqn):
        axes = _axes(eqn, v, side, kernel, assigned)
        if axes:
            size = find(kernel, ins[1].dims) if side == "kernel" else None
            run = _run(scope, eqn, v, find(v.dim, fetched[0].dims), find(v.out_dim, outs[0].dims), size, axes)
            fetched = [_fetched(scope, eqn, x, v, run, axes) for x in fetched]
            v = run.window
        window.append(dataclasses.replace(v, size=0) if kernel and _empty(eqn) else v)  # the result is zeros
        sides.append(side if axes else "whole")
    params: dict[str, Any] = {**eqn.params, "window": tuple(window), "sides": tuple(sides), "result": outs[0].type}
    scope.add(_alone(eqn.operation), [*fetched, *ins[read:]], outs, eqn, **params)


@dataclass(frozen=True)
class _Run:
    """The consecutive elements that the windows of each device read: its own block, and rows of its neighbours.

    `pieces` are copied there from the input's blocks; `window` is the window in the run instead of the input.
    """

    dim: Dim
    pieces: tuple[Piece, ...]
    unread: tuple[tuple[int, int], ...]  # elements that only padding of the result depends on
    window: Window


def _run(scope: Scope, eqn: Eqn, v: Window, dim: Dim, out: Dim, kernel: Dim | None, axes: Axes) -> _Run:
    """If each device's run begins at the same place between two elements, the holes of the base dilation stay in the
    window; otherwise they are elements of the run.
    """
    mesh, extents = scope.setting.mesh, scope.setting.extents
    n = mesh.count(axes)
    if kernel is None:
        windows, size = extents.local(out, n), v.size
        begin = windows * v.stride
    else:
        windows, size = out.size, extents.local(kernel, n)
        begin = size * v.dilation
    positions = _reach(v, windows, size)
    holes = kernel is None and begin % v.base_dilation == 0 and positions > v.low % v.base_dilation
    base = v.base_dilation if holes else 1
    gap = v.low % base  # positions before the first element of a device's run
    width = -(-(positions - gap) // base)
    run = scope.fresh_dim(f"{v.dim}__window", n * width)
    pieces, unread = list[Piece](), list[tuple[int, int]]()
    for i in range(0 if _empty(eqn) or not width else n):
        low = i * begin - v.low
        first = -(-max(low, 0) // v.base_dilation)
        if kernel is None:
            real = size
            reach = _reach(v, min(max(out.size - i * windows, 0), windows), size)
            unread.append((i * width + max(-(-(reach - gap) // base), 0), (i + 1) * width))
        else:
            real = _real_sizes(kernel, size, n)[i]
        last = min((low + _reach(v, windows, real) - 1) // v.base_dilation, dim.size - 1)
        if last >= first:
            to = i * width + (first * v.base_dilation - low) // base
            pieces.append(Piece(0, first, to, last - first + 1, to_step=v.base_dilation // base))
    window = dataclasses.replace(v, dim=run.name, size=size, base_dilation=base, low=0, high=0)
    if holes:
        window = dataclasses.replace(window, low=gap, high=positions - gap - ((width - 1) * base + 1))
    return _Run(run, tuple(pieces), tuple(pair for pair in unread if pair[0] < pair[1]), window)


def _empty(eqn: Eqn) -> bool:
    """True if an operand or the result has no elements: then the result is the fill, whatever another operand is."""
    return not all(d.size for v in (*eqn.ins, *eqn.outs) for d in v.dims)


def _fetched(scope: Scope, eqn: Eqn, x: Var, v: Window, run: _Run, axes: Axes) -> Var:
    """Each device's run of one operand."""
    dim = find(v.dim, x.dims)
    fetched = resized(x, dim, run.dim, axes)
    fill = identity(eqn.operation.mask, x.dtype)
    lower_index_map(scope, eqn, [x], IndexMap((dim,), run.dim, run.pieces, fill, run.unread), axes, fetched)
    return fetched


def _reach(v: Window, windows: int, size: int) -> int:
    """The number of positions that this many windows of a size span, from the first to the last one read."""
    return (windows - 1) * v.stride + (size - 1) * v.dilation + 1 if windows and size else 0


def _real_sizes(kernel: Dim, size: int, n: int) -> list[int]:
    """The number of elements of a split kernel dim that each device stores, without padding."""
    return [max(0, min(size, kernel.size - i * size)) for i in range(n)]


def _uneven(c: Any, x: Any, w: Any, windows: Sequence[tuple[int, Window, str]], run: Any) -> Any:
    """`run(x, w, windows)` on the kernel elements that each device has, without padding.

    Padding with zeros would be wrong: x may be infinite where only other windows read it, and 0 * inf is NaN.
    """
    for k, v, kernel in windows:
        at, place = c.ins[1].position(kernel), c.ins[0].position(v.dim)
        axes, size = c.ins[1].axes[at], w.shape[at]
        real = _real_sizes(c.ins[1].dims[at], size, c.count(axes)) if axes else []
        sizes = sorted({n for n in real if n})  # a device without elements has x of zeros, so any size is correct
        count = v.out_size(x.shape[place])
        if len(sizes) < 2 or count == 1:  # of a single window, x is zero too where the kernel is padded
            continue

        def of_size(n: int, k: int = k, v: Window = v, at: int = at, place: int = place, count: int = count) -> Any:
            def branch(x: Any, w: Any) -> Any:
                x = x[(slice(None),) * place + (slice(0, _reach(v, count, n)),)]
                rest = [one for one in windows if one[0] > k]
                shorter = lambda x, w, more: run(x, w, {k: dataclasses.replace(v, size=n), **more})  # noqa: E731
                return _uneven(c, x, w[(slice(None),) * at + (slice(0, n),)], rest, shorter)

            return branch

        which = np.array([sizes.index(n) if n else 0 for n in real], np.int32)
        return c.xp.switch(c.xp.asarray(which)[c.index(axes)], [of_size(n) for n in sizes], x, w)
    return run(x, w, {})


@functools.lru_cache(maxsize=64)
def _alone(op: Op) -> Op:
    """The operation on fetched runs: it needs no padding, and the result's type is given."""

    def kernel(c: Any, *xs: Any, result: Type, sides: tuple[str, ...], **params: Any) -> Any:
        if "kernel" in params and not all(v.size for v in params["window"]):  # windows of size 0: the
            return c.xp.zeros(c.outs[0].sizes, params["dtype"])  # result's type gives their number
        if "kernel" not in sides:
            return op.kernel(c, *xs, **params)

        def run(x: Any, w: Any, changed: dict[int, Window]) -> Any:
            window = tuple(changed.get(k, v) for k, v in enumerate(params["window"]))
            return op.kernel(c, x, w, **{**params, "window": window})

        along = zip(range(len(sides)), params["window"], params["kernel"], strict=True)
        split = [one for one, side in zip(along, sides, strict=True) if side == "kernel"]
        return _uneven(c, xs[0], xs[1], split, run)

    def flops(ins: Any, outs: Any, *, result: Type, sides: tuple[str, ...], **params: Any) -> float:
        return op.flops(ins, outs, **params) if op.flops is not None else 0.0

    return Op(
        op.name,
        type=lambda *_, result, **__: result,
        kernel=kernel,
        flops=flops,
        fuses=op.fuses,
        linear=op.linear,
        reduce=op.reduce,
        product=op.product,
        rule=functools.partial(_labels_of_runs, op),
    )


def _labels_of_runs(op: Op, *types: Type, result: Type, sides: tuple[str, ...], **params: Any) -> Labels:
    """The labels of an operation on fetched runs: none for the dims of windows whose runs are the whole input."""
    ins = tuple(Var(t.dims, t.dtype) for t in types)
    eqn = Eqn(op, ins, (Var(result.dims, result.dtype),), params)
    labels, read = _labels(eqn, sides), _read(eqn)
    whole = [v for v, side in zip(params["window"], sides, strict=True) if side == "whole"]
    read_whole, made_whole = {v.dim for v in whole}, {v.out_dim for v in whole}

    def unlabelled(names: Any, whole: set[str]) -> dict[str, str | None]:
        return {d: None if d in whole else label for d, label in names.items()}

    operands = [unlabelled(names, read_whole if k < read else made_whole) for k, names in enumerate(labels.ins)]
    return Labels(tuple(operands), tuple(unlabelled(names, made_whole) for names in labels.outs))
