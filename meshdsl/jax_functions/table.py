"""What each primitive of JAX does with the axes of its operands: it passes, sums or mixes them.

A rule takes an equation and returns, for each operand, what becomes of each axis: the number of the result's axis with
the same places, `SUM` if the places are added, or `MIX`. Loops, calls, and `reshape`, whose axes merge, are in `walk`.
A primitive without a rule may do anything.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

MIX, SUM = "mix", "sum"
Targets = Sequence[int | str]
Shape = tuple[Any, ...]

ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le",
    "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name",
    "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial", "population_count", "pow",
    "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "reshard", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
}  # fmt: skip
# A sum that is not complete on a block passes these: in all operands together, in the first, or in one factor.
JOINT = {"add", "add_any", "concatenate", "pad", "select_n", "stack", "sub"}
FIRST = {
    "broadcast_in_dim", "conj", "convert_element_type", "copy", "copy_p", "cumsum", "div", "dynamic_slice", "fft",
    "gather", "imag", "name", "neg", "real", "reduce_precision", "reduce_sum", "reshape", "reshard", "rev", "slice",
    "split", "squeeze", "stop_gradient", "transpose", "unstack",
}  # fmt: skip
PRODUCTS = {"conv_general_dilated", "dot_general", "mul"}


class Equation(NamedTuple):
    """The parameters of an equation, and the shapes of its operands and results."""

    params: Mapping[str, Any]
    ins: list[Shape]
    outs: list[Shape]

    def along(self, name: str) -> Any:
        """The size of the result along the axis in this parameter."""
        return self.outs[0][self.params[name]]


def equation(eqn: Any) -> Equation:
    return Equation(
        eqn.params, *([tuple(getattr(v.aval, "shape", ())) for v in vs] for vs in (eqn.invars, eqn.outvars))
    )


def _keep(shape: Shape, mixed: Collection[int] = ()) -> Targets:
    return [MIX if i in mixed else i for i in range(len(shape))]


def _drop(shape: Shape, gone: Collection[int], how: int | str = MIX) -> Targets:
    """The axes of a shape without those that are gone, to which `how` happens."""
    kept = [i for i in range(len(shape)) if i not in gone]
    return [how if i in gone else kept.index(i) for i in range(len(shape))]


def _axes(e: Equation, name: str) -> tuple[int, ...]:
    axes = e.params[name]
    return tuple(map(int, axes)) if isinstance(axes, tuple | list) else (int(axes),)


def _resized(e: Equation, sizes: Sequence[Any], numbers: Sequence[int] = (0,)) -> list[Targets]:
    """An axis whose size stays passes."""
    return [
        _keep(s, [i for i, n in enumerate(s) if n != sizes[i]] if k in numbers else ()) for k, s in enumerate(e.ins)
    ]


def _slice(e: Equation) -> list[Targets]:
    moved = [i for i, step in enumerate(e.params["strides"] or ()) if step != 1]
    moved += [i for i, (a, b) in enumerate(zip(e.ins[0], e.outs[0], strict=True)) if a != b]
    return [_keep(e.ins[0], moved)]


def _pad(e: Equation) -> list[Targets]:
    return [_keep(e.ins[0], [i for i, p in enumerate(e.params["padding_config"]) if tuple(p) != (0, 0, 0)]), ()]


def _window(e: Equation) -> list[Targets]:
    p = e.params
    steps = zip(p["window_dimensions"], p["window_strides"], p["base_dilation"], p["padding"], strict=True)
    return [_keep(e.ins[0], [i for i, (*n, pad) in enumerate(steps) if n != [1, 1, 1] or tuple(pad) != (0, 0)])]


def _dot(e: Equation) -> list[Targets]:
    summed, batch = e.params["dimension_numbers"]
    targets: list[Targets] = []
    taken = len(batch[0])
    for shape, over, batched in zip(e.ins, summed, batch, strict=True):
        free = [i for i in range(len(shape)) if i not in (*over, *batched)]
        new = {**{int(i): k for k, i in enumerate(batched)}, **{i: taken + k for k, i in enumerate(free)}}
        targets.append([new.get(i, SUM) for i in range(len(shape))])
        taken += len(free)
    return targets


def _conv(e: Equation) -> list[Targets]:
    d, p = e.params["dimension_numbers"], e.params
    grouped = p["feature_group_count"] != 1 or p["batch_group_count"] != 1
    x: list[int | str] = [MIX] * len(e.ins[0])
    w = list(x)
    if p["batch_group_count"] == 1:
        x[d.lhs_spec[0]] = d.out_spec[0]
    if not grouped:
        x[d.lhs_spec[1]] = w[d.rhs_spec[1]] = SUM
        w[d.rhs_spec[0]] = d.out_spec[1]
    return [x, w]


def _gather(e: Equation) -> list[Targets]:
    d, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
    places = [i for i in range(len(e.outs[0])) if i not in d.offset_dims]  # one for each axis of the indices
    pairs = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    windows = [i for i in range(len(e.ins[0])) if i not in pairs and i not in d.collapsed_slice_dims]
    filled = d.start_index_map if "FILL" in str(e.params["mode"]) else ()  # else an axis taken whole starts at 0
    operand: list[int | str] = [MIX] * len(e.ins[0])
    for i, size in enumerate(e.ins[0]):
        if i in pairs:
            operand[i] = places[pairs[i]]
        elif i in windows and sizes[i] == size and i not in filled:
            operand[i] = int(d.offset_dims[windows.index(i)])
    return [operand, [*places, MIX]]


def _scatter(e: Equation) -> list[Targets]:
    d = e.params["dimension_numbers"]
    pairs = dict(zip(d.scatter_indices_batching_dims, d.operand_batching_dims, strict=True))
    windows = [i for i in range(len(e.ins[0])) if i not in (*pairs.values(), *d.inserted_window_dims)]
    indices = [pairs.get(i, MIX) for i in range(len(e.ins[1]) - 1)]
    updates: list[int | str] = list(indices)
    whole: list[int] = []
    for k, i in zip(d.update_window_dims, windows, strict=True):
        full = i not in d.scatter_dims_to_operand_dims and e.ins[0][i] == e.ins[2][k]
        updates.insert(int(k), i if full else MIX)
        whole += [i] if full else []
    mixed = [i for i in range(len(e.ins[0])) if i not in (*pairs.values(), *whole)]
    return [_keep(e.ins[0], mixed), [*indices, MIX], updates]


def _batched(*core: int, lengths: str = "") -> Callable[[Equation], list[Targets]]:
    """A primitive on the last axes of each operand (`core`: how many); it maps over the leading ones."""

    def rule(e: Equation) -> list[Targets]:
        counts = (len(e.params[lengths]),) if lengths else core
        counts = (*counts, *counts[-1:] * (len(e.ins) - len(counts)))
        return [_keep(s, range(len(s) - n, len(s))) for s, n in zip(e.ins, counts, strict=True)]

    return rule


def _along(name: str) -> Callable[[Equation], list[Targets]]:
    """A primitive that mixes the axes in this parameter and keeps the others."""
    return lambda e: [_keep(s, _axes(e, name)) for s in e.ins]


def _reduced(how: str) -> Callable[[Equation], list[Targets]]:
    return lambda e: [_drop(s, _axes(e, "axes"), how) for s in e.ins]


def _stack(e: Equation) -> list[Targets]:
    return [[i + (i >= e.params["axis"]) for i in range(len(s))] for s in e.ins]


def _transpose(e: Equation) -> list[Targets]:
    return [[list(e.params["permutation"]).index(i) for i in range(len(e.ins[0]))]]


TABLE: dict[str, Callable[[Equation], list[Targets]]] = {
    **dict.fromkeys(sorted(ELEMENTWISE), lambda e: [_keep(s) for s in e.ins]),
    **dict.fromkeys(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
                     "reduce_xor"), _reduced(MIX)),
    "reduce_sum": _reduced(SUM),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), _along("axis")),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")), "rev": _along("dimensions"),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    "squeeze": lambda e: [_drop(e.ins[0], _axes(e, "dimensions"))],
    "stack": _stack, "unstack": lambda e: [_drop(e.ins[0], _axes(e, "axis"))],
    "transpose": _transpose, "broadcast_in_dim": lambda e: [_axes(e, "broadcast_dimensions")],
    "iota": lambda e: [],
    "slice": _slice, "pad": _pad, **dict.fromkeys(("dynamic_slice", "tile"), lambda e: _resized(e, e.outs[0])),
    "dynamic_update_slice": lambda e: [*_resized(e, e.ins[1])[:1], *_resized(e, e.ins[0], (1,))[1:]],
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), _scatter),
    "dot_general": _dot, "conv_general_dilated": _conv,
    **dict.fromkeys(("qr", "cholesky", "eigh", "eig", "lu", "svd", "schur", "geqrf", "hessenberg", "tridiagonal"),
                    _batched(2)),
    "triangular_solve": _batched(2, 2), "householder_product": _batched(2, 1), "lu_pivots_to_permutation": _batched(1),
    "tridiagonal_solve": _batched(1, 1, 1, 2), "fft": _batched(lengths="fft_lengths"),
    "top_k": lambda e: [_keep(e.ins[0], (e.params.get("axis", len(e.ins[0]) - 1) % len(e.ins[0]),))],
}  # fmt: skip
