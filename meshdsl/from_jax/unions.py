"""The rules of each primitive: which axes are one dim, which have one name, and which must stay one dim.

The table of `jax_functions` says which axis of an operand is which axis of the result; here is what follows from it,
and what it does not know. A first walk unites axes as they are. A second one lets reshapes, and splits into equal
parts, take axes apart, when it is known which must stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshdsl import jax_functions

from .axes import Axis, align, expand, groups, link, unite
from .steps import LOOPS, OWN_RULES, BodyStep, OpenedJaxpr, Value


def unify(block: OpenedJaxpr) -> None:
    """Find the classes of axes of all values of a block."""
    _first(block)
    _second(block)


def _first(block: OpenedJaxpr) -> None:
    ends = _reduced_later(block)
    for step in block.steps:
        if step.primitive in LOOPS | OWN_RULES:
            _BODIES.get(step.primitive, _called)(step)
        elif step.primitive == "reshape":
            step.groups = groups(step.ins[0].axes, step.outs[0].axes)
            for left, right in step.groups:
                if len(left) == len(right) == 1:
                    unite(left[0], right[0])
        elif step.primitive == "dot_general":
            _dot(step, ends)
        else:
            _by_table(step)
            _MORE.get(step.primitive, lambda step: None)(step)


def _by_table(step: BodyStep) -> None:
    for k, i, target in step.pairs():
        axis = step.ins[k].axes[i]
        if isinstance(target, int):
            for out in step.outs:
                if target < len(out.shape) and out.shape[target] == axis.size:
                    unite(axis, out.axes[target])
        elif (
            target == jax_functions.MIX
            and step.primitive not in _RESIZING
            and not (step.primitive.startswith("reduce_"))
        ):
            axis.root.rigid = True


def _dot(step: BodyStep, ends: set[tuple[Value, int]]) -> None:
    """Of two free axes that would be one dim, the one over which a sum or maximum is taken later gets another name."""
    (summed, batch), (x, y), (out,) = step.params["dimension_numbers"], step.ins, step.outs
    kept = [(k, i, t) for k, i, t in step.pairs() if isinstance(t, int)]
    kept.sort(key=lambda each: (each[2] >= len(batch[0]), (out, each[2]) in ends))
    for _, i, j in ((0, i, j) for i, j in zip(*batch, strict=True)):
        unite(x.axes[i], y.axes[j])
    for k, i, t in kept:
        if t < len(batch[0]):
            unite(step.ins[k].axes[i], out.axes[t])
    for i, j in zip(*summed, strict=True):
        unite(x.axes[i], y.axes[j])
    for k, i, t in kept:
        axis, result = step.ins[k].axes[i], out.axes[t]
        if not unite(axis, result) and result.root.beside is None:
            result.root.beside = axis


def _reduced_later(block: OpenedJaxpr) -> set[tuple[Value, int]]:
    """(value, axis) over which a sum or a maximum is taken before a product makes something else of it."""
    ends: set[tuple[Value, int]] = set()
    for step in reversed(block.steps):
        if step.primitive in LOOPS or step.primitive == "dot_general":
            continue
        reduces = step.primitive.startswith(("reduce_", "arg"))
        for k, i, t in step.pairs():
            through = isinstance(t, int) and any((out, t) in ends for out in step.outs)
            if (reduces and i in step.params.get("axes", ())) or through:
                ends.add((step.ins[k], i))
    return ends


# --- primitives that change the size of an axis, and not its name


def _pair(v: Value, w: Value, differ: Callable[[Axis, Axis], object] | None = None) -> None:
    """Unite the axes of two values, one after the other; `differ` says what becomes of axes of two sizes."""
    for a, b in zip(v.axes, w.axes, strict=True):
        if a.size == b.size:
            unite(a, b)
        elif differ is not None:
            differ(a, b)


def _like_first(differ: Callable[[Axis, Axis], object]) -> Callable[[BodyStep], None]:
    """The rule of a step whose results are like the first operand, axis by axis."""

    def rule(step: BodyStep) -> None:
        for out in step.outs:
            _pair(step.ins[0], out, differ)

    return rule


def _resized(a: Axis, b: Axis) -> None:
    """One name for two sizes of an axis, unless one is an odd part of the other."""
    if a.size == b.size:
        unite(a, b)
        return
    small, large = sorted((a.size, b.size))
    if small and (large % small == 0 or 2 * small > large):
        link(a, b)


def _cut(a: Axis, b: Axis) -> None:
    """One of two sizes is a piece of the other: both stay one dim."""
    a.root.rigid = b.root.rigid = True
    _resized(a, b)


def _windows(a: Axis, b: Axis) -> None:
    a.root.rigid = b.root.rigid = True
    link(a, b)


def _ordered(step: BodyStep) -> None:
    """Sorting and running sums need the axis as a whole."""
    x, axis = step.ins[0], step.params.get("axis", step.params.get("dimension", -1))
    for v in (*step.ins, *step.outs):
        if len(v.shape) == len(x.shape):
            v.axes[axis].root.rigid = True
            _pair(x, v, _resized)


def _concatenated(step: BodyStep) -> None:
    axis, out = step.params["dimension"], step.outs[0]
    for v in step.ins:
        _resized(v.axes[axis], out.axes[axis])


def _updated(step: BodyStep) -> None:
    _pair(step.ins[0], step.outs[0])
    _pair(step.ins[1], step.ins[0], _cut)


def _select_and_scatter(step: BodyStep) -> None:
    _pair(step.ins[1], step.outs[0])
    for a in step.ins[1].axes:
        a.root.rigid = True
    _pair(step.ins[0], step.outs[0], link)


def _convolved(step: BodyStep) -> None:
    p, (x, w), (out,) = step.params, step.ins, step.outs
    d = p["dimension_numbers"]
    if p["feature_group_count"] == p["batch_group_count"] == 1:
        unite(x.axes[d.lhs_spec[1]], w.axes[d.rhs_spec[1]])
    elif is_depthwise(step):
        unite(x.axes[d.lhs_spec[1]], out.axes[d.out_spec[1]])
    unite(w.axes[d.rhs_spec[0]], out.axes[d.out_spec[1]])
    for i, k, o in zip(d.lhs_spec[2:], d.rhs_spec[2:], d.out_spec[2:], strict=True):
        x.axes[i].root.rigid = out.axes[o].root.rigid = True
        if x.shape[i] == out.shape[o]:
            unite(x.axes[i], out.axes[o])
        elif not (step.transposed and w.shape[k] > out.shape[o]):  # the gradient of a kernel has the kernel's window
            link(x.axes[i], out.axes[o])


def is_depthwise(step: BodyStep) -> bool:
    """True for a convolution of each channel by itself."""
    p, (x, w) = step.params, step.ins
    d = p["dimension_numbers"]
    channels = {p["feature_group_count"], x.shape[d.lhs_spec[1]], w.shape[d.rhs_spec[0]]}
    return p["batch_group_count"] == 1 and len(channels) == 1


def _ragged(step: BodyStep) -> None:
    (over_x, over_w), _ = step.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    x, w, sizes = step.ins
    if len(over_x) == 1 and len(x.shape) == 2 and len(w.shape) == 3:
        unite(x.axes[over_x[0]], w.axes[over_w[0]])
        unite(x.axes[1 - over_x[0]], step.outs[0].axes[0])
        unite(w.axes[3 - over_w[0]], step.outs[0].axes[1])
        unite(sizes.axes[0], w.axes[0])
        w.axes[0].root.rigid = x.axes[1 - over_x[0]].root.rigid = True


def _keys(step: BodyStep) -> None:
    """The leading axes have a key for each place; words of keys, and numbers that are drawn, have more axes."""
    for v in step.ins:
        for a, b in zip(v.axes, step.outs[0].axes, strict=False):
            unite(a, b)


_OF_KEYS = ("random_wrap", "random_unwrap", "random_clone", "random_bits", "random_fold_in", "random_split")
_MORE: dict[str, Callable[[BodyStep], None]] = {
    **dict.fromkeys(("pad", "rev"), _like_first(_resized)),
    **dict.fromkeys(("slice", "dynamic_slice"), _like_first(_cut)),
    "dynamic_update_slice": _updated, "concatenate": _concatenated,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k"), _ordered),
    **dict.fromkeys(("reduce_window_max", "reduce_window_sum", "reduce_window_min"), _like_first(_windows)),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
                    _like_first(_resized)),
    "select_and_scatter_add": _select_and_scatter, "conv_general_dilated": _convolved, "ragged_dot_general": _ragged,
    **dict.fromkeys(_OF_KEYS, _keys),
}  # fmt: skip
_RESIZING = {
    "slice", "pad", "dynamic_slice", "dynamic_update_slice", "concatenate", "split", "rev", "ragged_dot_general",
    *_OF_KEYS,
}  # fmt: skip


# --- loops and functions with bodies


def _same(values: Sequence[Value], others: Sequence[Value], drop: int = 0) -> None:
    for v, w in zip(values, others, strict=True):
        list(map(unite, v.axes[drop:], w.axes))


def _scanned(step: BodyStep) -> None:
    (body,), p = step.bodies, step.params
    n, m = p["num_consts"], p["num_consts"] + p["num_carry"]
    rows = [*step.ins[m:], *step.outs[p["num_carry"] :]]
    for v in rows:
        v.axes[0].root.rigid = True
        unite(rows[0].axes[0], v.axes[0])
    _same(step.ins[:m], body.ins[:m])
    _same(step.ins[m:], body.ins[m:], 1)
    _first(body)
    _same(body.ins[n:m], body.outs[: m - n])
    _same(body.ins[n:m], step.outs[: m - n])
    _same(step.outs[m - n :], body.outs[m - n :], 1)


def _while(step: BodyStep) -> None:
    (test, body), n = step.bodies, step.params["cond_nconsts"]
    m = n + step.params["body_nconsts"]
    _same([*step.ins[:n], *step.ins[m:]], test.ins)
    _same(step.ins[n:], body.ins)
    _first(test)
    _first(body)
    _same(step.outs, body.outs)
    _same(step.ins[m:], step.outs)


def _called(step: BodyStep) -> None:
    """A branch, or the body of `jax.checkpoint`."""
    for body in step.bodies:
        _same(step.ins[1 if step.primitive == "cond" else 0 :], body.ins)
        _first(body)
        _same(step.outs, body.outs)


def _with_rule(step: BodyStep) -> None:
    """A function with a rule of its own: its value, its forward pass and its backward pass."""
    if len(step.bodies) == 1:  # a rule that is not differentiated so often
        return _called(step)
    value, forward, backward = step.bodies
    n, saved = len(step.outs), len(backward.ins) - len(step.outs)
    moving = [v for v in step.ins if v.is_floating]
    for body in (value, forward):
        _same(step.ins, body.ins)
        _first(body)
        _same(step.outs, body.outs[:n])
    _same(forward.outs[n:], backward.ins[:saved])
    _same(step.outs, backward.ins[saved:])
    _first(backward)
    _same(moving, backward.outs)


_BODIES: dict[str, Callable[[BodyStep], None]] = {
    "scan": _scanned, "while": _while, **dict.fromkeys(OWN_RULES, _with_rule)
}  # fmt: skip


# --- the second walk


def _second(block: OpenedJaxpr) -> None:
    steps = list(block.walk())
    joined = {v.axes[s.params["dimension"]].root for s in steps if s.primitive == "concatenate" for v in s.ins}
    for step in steps:
        if step.primitive == "split":
            _split(step, joined)
    for step in steps:
        for left, right in step.groups:
            if len(left) + len(right) > 2:
                align(left, right)
    for step in steps:
        if step.primitive == "concatenate":  # the gradient of such a split
            axis = step.params["dimension"]
            atoms = step.outs[0].axes[axis].atoms()
            for v in step.ins if len(atoms) > 1 and atoms[0].size == len(step.ins) else ():
                align([v.axes[axis]], atoms[1:])


def _split(step: BodyStep, joined: set[Axis]) -> None:
    """A split into equal parts, which nothing joins again, makes a dim of parts: queries, keys and values."""
    (x,), axis, n = step.ins, step.params["axis"], len(step.outs)
    whole, parts = x.axes[axis], [v.axes[axis] for v in step.outs]
    equal = len(set(step.params["sizes"])) == 1 and not any(v.root in joined for v in parts)
    if equal and not whole.root.rigid and all(unite(parts[0], v) for v in parts):
        if not whole.root.parts:
            expand(whole, [n, whole.size // n])
        atoms = whole.atoms()
        step.parts = bool(atoms) and atoms[0].size == n and align(atoms[1:], [parts[0]])
    if not step.parts:
        whole.root.rigid = True
        for v in parts:
            v.root.rigid = True
            if len(set(step.params["sizes"])) == 1:  # unequal parts are different things
                _resized(whole, v)
