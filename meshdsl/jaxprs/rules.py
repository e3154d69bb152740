"""Rules for the axes of each primitive's results, from those of its operands: one per family, in a table by name.

A rule takes an equation, at the full sizes and at those of a block, and the axes of its operands. It returns the axes
of the results, and raises `MixesError` if an element of a result needs elements at other places of a split dim.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .factors import Axis, MixesError, dims_of, free, join, plain, regroup, sizes, uniform
from .primitives import ELEMENTWISE

__all__ = ["FIRST", "JOINT", "PRODUCTS", "RULES", "Equation", "Rule"]


class Equation(NamedTuple):
    """One equation of a function, traced at the full sizes and at those of a block, and the dims that it may sum."""

    full: Any
    block: Any
    sums: frozenset[str]

    @property
    def params(self) -> Mapping[str, Any]:
        return self.full.params

    def outs(self, k: int = 0) -> list[tuple[int, int]]:
        """Both sizes of every axis of a result."""
        pair = self.full.outvars[k].aval.shape, self.block.outvars[k].aval.shape
        if len(pair[0]) != len(pair[1]):
            raise MixesError("has another rank on a block")
        return list(zip(*pair, strict=True))


Axes = tuple[Axis, ...]
Rule = Callable[[Equation, Sequence[Axes]], list[Axes]]

# Partial sums pass these: all operands together, the first operand, or one factor of a product.
JOINT = {"add", "add_any", "sub", "concatenate", "select_n", "pad"}
FIRST = {
    "broadcast_in_dim", "conj", "convert_element_type", "copy", "copy_p", "cumsum", "div", "dynamic_slice",
    "expand_dims", "fft", "gather", "imag", "name", "neg", "real", "reduce_precision",
    "reduce_sum", "reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}


def _elementwise(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    ranked = [axes for axes in ins if axes]
    axes = tuple(join(*group) for group in zip(*ranked, strict=True))
    return [axes] * len(e.full.outvars)


def _broadcast(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    target = {int(axis): i for i, axis in enumerate(e.params["broadcast_dimensions"])}
    result: list[Axis] = []
    for k, size in enumerate(e.outs()):
        source = ins[0][target[k]] if k in target else uniform(1, 1)
        stretched = sizes(source) == (1, 1) and not dims_of([source])
        result.append(uniform(*size) if stretched else source)
    return [tuple(result)]


def _reshape(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    return [tuple(regroup(ins[0], e.outs()))]


def _expand(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    return [tuple(regroup(ins[0], e.outs()))]


def _transpose(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    return [tuple(ins[0][int(i)] for i in e.params["permutation"])]


def _axes_of(e: Equation, name: str) -> tuple[int, ...]:
    axes = e.params[name]
    return tuple(map(int, axes)) if isinstance(axes, tuple | list) else (int(axes),)


def _summed(axis: Axis, e: Equation) -> bool:
    """True for an axis of a contracted dim, whose sum is partial; raises an error unless a block has all other axes.

    An axis may hold other factors besides, such as equal values for each place of a split dim.
    """
    dims = dims_of([axis])
    if not dims or not set(dims) <= e.sums:
        free(axis)
        return False
    free(tuple(f for f in axis if not f.named))
    return True


def _reduced(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    gone = _axes_of(e, "axes")
    for axes in ins:
        for i in gone if axes else ():
            if e.full.primitive.name != "reduce_sum":
                free(axes[i])
            else:
                _summed(axes[i], e)
    kept = tuple(axis for i, axis in enumerate(ins[0]) if i not in gone)
    return [kept] * len(e.full.outvars)


def _along(name: str) -> Rule:
    """A primitive that mixes places along the axes in this parameter and keeps the shape."""

    def rule(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
        mixed = _axes_of(e, name)
        axes = [join(*group) for group in zip(*ins, strict=True)]
        for i in mixed:
            axes[i] = plain(*sizes(free(axes[i])))
        return [tuple(axes)] * len(e.full.outvars)

    return rule


def _resized(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    """Slices, paddings and parts: an axis either keeps its size and its places, or is whole."""
    results: list[Axes] = []
    for k in range(len(e.full.outvars)):
        axes: list[Axis] = []
        for axis, size in zip(ins[0], e.outs(k), strict=True):
            axes.append(
                axis if sizes(axis) == size and not _moved(e, len(axes)) else plain(*size) if free(axis) else axis
            )
        results.append(tuple(axes))
    return results


def _moved(e: Equation, axis: int) -> bool:
    """True if an axis that keeps its size is nevertheless shifted: padded by (1, -1)."""
    return "padding_config" in e.params and any(
        eqn.params["padding_config"][axis] != (0, 0, 0) for eqn in (e.full, e.block)
    )


def _joined(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    along = int(e.params["dimension"])
    axes = [join(*group) for group in zip(*(a[:along] + a[along + 1 :] for a in ins), strict=True)]
    for axis in (a[along] for a in ins):
        free(axis)
    axes.insert(along, plain(*e.outs()[along]))
    return [tuple(axes)]


def _product(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    (lc, rc), (lb, rb) = e.params["dimension_numbers"]
    left, right = ins
    for i, j in zip(lc, rc, strict=True):
        _summed(join(left[int(i)], right[int(j)]), e)
    batch = [join(left[int(i)], right[int(j)]) for i, j in zip(lb, rb, strict=True)]
    kept = [a for i, a in enumerate(left) if i not in (*lc, *lb)] + [
        a for i, a in enumerate(right) if i not in (*rc, *rb)
    ]
    return [(*batch, *kept)]


def _conv(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    numbers = e.params["dimension_numbers"]
    x, w, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    grouped = e.params["feature_group_count"] != 1 or e.params["batch_group_count"] != 1
    channels = join(ins[0][x[1]], ins[1][w[1]]) if not grouped else ins[0][x[1]]
    if grouped:
        free(channels)
        free(ins[1][w[1]])
    else:
        _summed(channels, e)
    for axis in (*(ins[0][i] for i in x[2:]), *(ins[1][i] for i in w[2:])):
        free(axis)
    if e.params["batch_group_count"] != 1:
        free(ins[0][x[0]])
    if grouped:
        free(ins[1][w[0]])
    axes: dict[int, Axis] = {out[0]: ins[0][x[0]], out[1]: ins[1][w[0]]}
    shape = e.outs()
    return [tuple(axes[i] if i in axes else plain(*shape[i]) for i in range(len(shape)))]


def _batched(*core: int, lengths: str = "") -> Rule:
    """A primitive on the last axes of each operand (`core`: how many); it maps over the leading ones."""

    def rule(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
        counts = (len(e.params[lengths]),) if lengths else core
        leading: list[Axes] = []
        for axes, n in zip(ins, (*counts, *counts[-1:] * (len(ins) - len(counts))), strict=True):
            for axis in axes[len(axes) - n :]:
                free(axis)
            leading.append(axes[: len(axes) - n])
        batch = tuple(join(*group) for group in zip(*leading, strict=True))
        return [(*batch, *(plain(*size) for size in e.outs(k)[len(batch) :])) for k in range(len(e.full.outvars))]

    return rule


def _top_k(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    along = int(e.params.get("axis", len(ins[0]) - 1))
    free(ins[0][along])
    axes = tuple(plain(*e.outs()[i]) if i == along else axis for i, axis in enumerate(ins[0]))
    return [axes] * len(e.full.outvars)


def _gather(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    d, (operand, index) = e.params["dimension_numbers"], ins
    pairs = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    windows: list[Axis] = []
    for i, axis in enumerate(operand):
        taken = e.full.params["slice_sizes"][i], e.block.params["slice_sizes"][i]
        whole = taken == sizes(axis) and i not in d.start_index_map and i not in d.collapsed_slice_dims
        if i not in pairs and not whole:
            free(axis)
        if i not in pairs and i not in d.collapsed_slice_dims:
            windows.append(axis if whole else plain(*taken))
    places = [
        axis if i not in pairs.values() else join(axis, operand[_key(pairs, i)]) for i, axis in enumerate(index[:-1])
    ]
    free(index[-1])
    offsets = {int(i) for i in d.offset_dims}
    return [tuple(windows.pop(0) if k in offsets else places.pop(0) for k in range(len(e.outs())))]


def _key(pairs: Mapping[int, int], value: int) -> int:
    return next(i for i, j in pairs.items() if j == value)


def _scatter(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    d, (operand, index, updates) = e.params["dimension_numbers"], ins
    pairs = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True))
    windows = [updates[int(i)] for i in d.update_window_dims]
    places = [axis for i, axis in enumerate(updates) if i not in d.update_window_dims]
    free(index[-1])
    result: list[Axis] = []
    for i, axis in enumerate(operand):
        if i in pairs:
            result.append(join(axis, index[pairs[i]], places[pairs[i]]))
            continue
        window = None if i in d.inserted_window_dims else windows.pop(0)
        if window is not None and i not in d.scatter_dims_to_operand_dims and sizes(window) == sizes(axis):
            result.append(join(axis, window))
        else:
            result.append(plain(*sizes(free(axis))))
            if window is not None:
                free(window)
    for i, axis in enumerate(places):
        if i not in pairs.values():
            free(axis)
            free(index[i])
    return [tuple(result)]


def _dynamic_update(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    operand, update = ins[:2]
    pairs = list(zip(operand, update, strict=True))
    axes = [join(a, b) if sizes(a) == sizes(b) else plain(*sizes(free(a))) for a, b in pairs]
    for a, b in pairs:
        if sizes(a) != sizes(b):
            free(b)
    return [tuple(axes)]


def _iota(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    along = int(e.params["dimension"])
    return [tuple(plain(*s) if k == along else uniform(*s) for k, s in enumerate(e.outs()))]


def _window(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    """Windows of one element that stay in their place keep places; all others mix them."""
    axes: list[Axis] = []
    for k, (axis, size) in enumerate(zip(ins[0], e.outs(), strict=True)):
        kept = sizes(axis) == size and _keeps(e.full.params, k) and _keeps(e.block.params, k)
        axes.append(axis if kept else plain(*size) if free(axis) else axis)
    return [tuple(axes)]


def _keeps(params: Mapping[str, Any], k: int) -> bool:
    """True if windows have one element along an axis, and do not move."""
    steps = [params.get(name, {})[k] for name in ("window_dimensions", "window_strides", "base_dilation")]
    return steps == [1, 1, 1] and tuple(params["padding"][k]) == (0, 0)


def _barrier(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    return list(ins)


def _default(e: Equation, ins: Sequence[Axes]) -> list[Axes]:
    """A primitive without a rule may read everything, so it takes no split dim."""
    for axis in (axis for axes in ins for axis in axes):
        free(axis)
    return [tuple(plain(*s) for s in e.outs(k)) for k in range(len(e.full.outvars))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(sorted(ELEMENTWISE), _elementwise),
    "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _reshape, "expand_dims": _expand,
    "transpose": _transpose, "dot_general": _product, "conv_general_dilated": _conv, "gather": _gather,
    **dict.fromkeys(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
                     "reduce_sum", "reduce_xor"), _reduced),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _along("axis")),
    "rev": _along("dimensions"), "sort": _along("dimension"),
    **dict.fromkeys(("slice", "pad", "split", "dynamic_slice"), _resized),
    "concatenate": _joined, "dynamic_update_slice": _dynamic_update, "iota": _iota,
    **dict.fromkeys(("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter_min", "scatter_max"), _scatter),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(("qr", "cholesky", "eigh", "eig", "lu", "svd", "schur", "geqrf", "hessenberg", "tridiagonal"),
                    _batched(2)),
    "triangular_solve": _batched(2, 2), "householder_product": _batched(2, 1), "lu_pivots_to_permutation": _batched(1),
    "tridiagonal_solve": _batched(1, 1, 1, 2), "fft": _batched(lengths="fft_lengths"), "top_k": _top_k,
    "optimization_barrier": _barrier, "": _default,
}  # fmt: skip
