"""`md.local` with a JAX function: it runs on each device's blocks, and a check of its jaxpr says that it may.

The call names the dims along which the function maps (`split`), and those that it sums (`contract`); every other dim
is gathered. The function is traced at two sizes, and `meshdsl.places` compares the equations. The gradient is the
function's own, by `jax.vjp`, on the same blocks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..backend import Local
from ..dims import Dim, DimsLike, Shape, names, pick, show, split_items
from ..errors import ShapeError
from ..ir import Labels, Op, Reduce, Type
from ..ops.dtypes import kind
from ..ops.reshape import refill
from ..places import Problem, check, flops
from ..trace import bind, tree
from ..values import Tensor

__all__ = ["JAX_BLOCKS", "JaxFunction", "apply"]


@dataclass(frozen=True, eq=False)
class JaxFunction:
    """A JAX function of arrays, the dims of its operands and results, and how it treats them.

    `flat` returns a list of arrays. `sizes` are those of the whole operands. `checked`: its places are compared at
    every size at which it is traced.
    """

    flat: Callable[..., Any]
    name: str
    operands: tuple[Type, ...]
    results: tuple[Shape, ...]
    split: tuple[str, ...]
    contract: tuple[str, ...]
    checked: bool
    cost: float | None = None  # floating-point operations on whole operands, if the caller gives them

    @property
    def __name__(self) -> str:  # the name in printed programs
        return self.name

    def __call__(self, *arrays: Any) -> Any:
        return self.flat(*arrays)

    @functools.cached_property
    def blocks(self) -> dict[tuple[Type, ...], Any]:
        """The jaxprs by types of operands."""
        return {}

    @property
    def shown(self) -> dict[str, str | None]:
        """Parameters for printed programs."""
        return {"split": ",".join(self.split) or None, "contract": ",".join(self.contract) or None}

    def traced(self, types: Sequence[Type]) -> Any:
        key = tuple(types)
        if key not in self.blocks:
            structs = [jax.ShapeDtypeStruct(tuple(d.size for d in t.shape), t.dtype) for t in types]
            self.blocks[key] = jax.make_jaxpr(self.flat)(*structs)
        return self.blocks[key]

    @functools.cached_property
    def problems(self) -> dict[tuple[Type, ...], Problem | None]:
        return {}

    def problem(self, full: Sequence[Type], block: Sequence[Type]) -> Problem | None:
        """Why the function may not run on blocks of this type; None if it may."""
        key = (*full, *block)
        if key not in self.problems:
            self.problems[key] = self._compare(full, block)
        return self.problems[key]

    def _compare(self, full: Sequence[Type], block: Sequence[Type]) -> Problem | None:
        ins, outs = [names(t.shape) for t in full], [names(shape) for shape in self.results]
        cut = {
            d.name for a, b in zip(full, block, strict=True) for d, e in zip(a.shape, b.shape, strict=True) if d != e
        }
        split, contract = cut & set(self.split), cut & set(self.contract)
        try:
            small = self.traced(block)
            found = check(self.traced(full), small, ins, outs, split, contract)
        except Exception as error:  # of the function itself, which cannot handle these sizes
            return Problem("", f"fails for other sizes of {' '.join(sorted(cut))}: {_first_line(error)}")
        if found and any(d.size == 1 and d.name in cut for t in block for d in t.shape):
            # at one element, JAX leaves out broadcasts and reshapes; the equations are then compared with themselves
            found = check(small, small, ins, outs, split, contract) if self.problem(*self.twice()) is None else found
        return found

    def twice(self) -> tuple[list[Type], list[Type]]:
        """Operands with split dims twice as long, and the operands: sizes at which every split dim differs."""
        cut = {*self.split, *self.contract}
        full = [
            Type(tuple(Dim(d.name, 2 * d.size if d.name in cut and d.size > 1 else d.size) for d in t.shape), t.dtype)
            for t in self.operands
        ]
        return full, list(self.operands)


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__)[:160]


def _sized(types: Sequence[Type]) -> Mapping[str, int]:
    return {d.name: d.size for t in types for d in t.shape}


def _type(*ins: Type, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> tuple[Type, ...]:
    avals = f.traced(ins).out_avals
    for aval, shape in zip(avals, results, strict=True):
        if tuple(aval.shape) != tuple(d.size for d in shape):
            raise ShapeError(
                f"the function of md.local, {f.name}, returned an array of shape {tuple(aval.shape)}, "
                f"and out= asks for {show(shape)}\n"
                f"  its operands were {', '.join(show(t.shape) for t in ins)}; "
                "their dims keep their sizes: on one device, those of a block"
            )
    if f.checked and tuple(ins) != f.operands:
        problem = f.problem(f.operands, ins)
        if problem is not None:
            raise _refusal(f, problem)
    return tuple(Type(shape, aval.dtype) for aval, shape in zip(avals, results, strict=True))


def _refusal(f: JaxFunction, problem: Problem) -> ShapeError:
    what = f"{problem.primitive} {problem.what}" if problem.primitive else problem.what
    line = f" ({problem.where})" if problem.where else ""
    declared = "; ".join(
        f"{how}={' '.join(dims)!r}" for how, dims in (("split", f.split), ("contract", f.contract)) if dims
    )
    return ShapeError(
        f"md.local was called with {declared}, and {f.name} does not treat blocks like the whole: {what.rstrip(',')}{line}\n"
        f"  its operands are {', '.join(show(t.shape) for t in f.operands)}\n"
        "  leave the dim out of split= and contract=, so that it is gathered first; if you know that blocks give the "
        "same result, pass unchecked=True"
    )


def _kernel(c: Local, *xs: Any, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> list[Any]:
    sizes = [tuple(n if cut else d.size for d, n, cut in zip(b.shape, b.sizes, b.axes, strict=True)) for b in c.ins]
    xs = tuple(x[tuple(slice(0, n) for n in own)] for x, own in zip(xs, sizes, strict=True))  # without padding
    types = [
        Type(tuple(Dim(d.name, n) for d, n in zip(b.shape, own, strict=True)), x.dtype)
        for b, own, x in zip(c.ins, sizes, xs, strict=True)
    ]
    summed = [
        axis for b in c.ins for d, axes in zip(b.shape, b.axes, strict=True) if d.name in f.contract for axis in axes
    ]
    varying = tuple(tuple(dict.fromkeys([*(axis for axes in b.axes for axis in axes), *summed])) for b in c.outs)
    ys = c.xp.blocks(f.traced(types), xs, varying)
    return [refill(c, y, block) for y, block in zip(ys, c.outs, strict=True)]


def _rule(*ins: Type, f: JaxFunction, results: tuple[Shape, ...], **_: Any) -> Labels:
    cut = {*f.split, *f.contract}

    def labels(shape: Shape) -> dict[str, str | None]:
        return {d.name: d.name if d.name in cut else None for d in shape}

    return Labels(tuple(labels(t.shape) for t in ins), tuple(map(labels, results)))


def _flops(ins: Any, outs: Any, *, shapes: Sequence[Shape], dtypes: Sequence[Any], f: JaxFunction, **_: Any) -> float:
    types = [
        Type(tuple(Dim(d.name, n) for d, n in zip(shape, own, strict=True)), dtype)
        for shape, own, dtype in zip(shapes, ins, dtypes, strict=True)
    ]
    if f.cost is None:
        return flops(f.traced(types))
    whole, own = _sized(f.operands), _sized(types)
    return f.cost * float(np.prod([own[name] / max(whole[name], 1) for name in whole]))


def _vjp(
    cts: Any, *ins: Tensor, f: JaxFunction, results: tuple[Shape, ...], key: object, unchecked: bool | None, **_: Any
) -> list[Tensor | None]:
    """The cotangents, one equation for all operands that lack the same split dims: theirs are sums over those."""
    cts = list(cts) if isinstance(cts, list | tuple) else [cts]
    floats = [k for k, aval in enumerate(f.traced(f.operands).out_avals) if kind(aval.dtype) in "fc"]
    groups: dict[frozenset[str], list[int]] = {}
    cut = {*f.split, *f.contract}
    for i, x in enumerate(ins):
        if kind(x.dtype) in "fc":
            groups.setdefault(frozenset(cut - set(names(x.dims))), []).append(i)
    grads: list[Tensor | None] = [None] * len(ins)
    for missing, members in groups.items():
        operands = (*ins, *(cts[k] for k in floats))
        pulled = _pulled(f, len(ins), members, floats)
        types = tuple(x.type for x in operands)
        shapes = tuple(ins[i].dims for i in members)
        contract = tuple(name for name in (*f.split, *f.contract) if name in missing)
        split = tuple(name for name in (*f.split, *f.contract) if name not in missing)
        checked = f.checked and _has_own_gradient(f.traced(f.operands))
        g = JaxFunction(pulled, f"d_{f.name}", types, shapes, split, contract, checked, f.cost and 3 * f.cost)
        if checked and (problem := g.problem(*g.twice())) is not None:
            raise _refusal(g, problem)
        found = bind(JAX_BLOCKS, *operands, f=g, results=shapes, key=key, follows=True, unchecked=unchecked, **g.shown)
        for i, grad in zip(members, found, strict=True):
            grads[i] = grad
    return grads


def _pulled(f: JaxFunction, count: int, members: Sequence[int], floats: Sequence[int]) -> Callable[..., Any]:
    """The function of operands and cotangents that returns the cotangents of these operands."""

    def pulled(*args: Any) -> Any:
        xs, cts = args[:count], args[count:]

        def of(*moving: Any) -> Any:
            values = list(xs)
            for i, x in zip(members, moving, strict=True):
                values[i] = x
            ys = f.flat(*values)
            return [ys[k] for k in floats]

        return list(jax.vjp(of, *(xs[i] for i in members))[1](list(cts)))

    return pulled


def _has_own_gradient(jaxpr: Any) -> bool:
    """Whether a user may have written a gradient inside; JAX's own follow from the places of the function."""
    text = str(jaxpr)
    return "custom_vjp_call" in text


JAX_BLOCKS = Op("local", type=_type, kernel=_kernel, vjp=_vjp, reduce=Reduce.SUM, rule=_rule, flops=_flops)


def apply(
    f: Callable[..., Any],
    tensors: Sequence[Tensor],
    out: Any,
    declared: tuple[Sequence[str], Sequence[str]],
    unchecked: bool,
    cost: float | None,
) -> Any:
    """The results of a JAX function on blocks; `declared` are the dims that may be split and those that it sums."""
    types = tuple(x.type for x in tensors)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors]
    structure, avals = _result(f, structs)
    shapes = _shapes(out, structure, avals, tensors)
    split, contract = map(tuple, declared)
    name = getattr(f, "__name__", type(f).__name__)
    flat: Callable[..., Any] = lambda *xs: tree.tree_leaves(f(*xs))  # noqa: E731 - a function without a name of its own
    function = JaxFunction(flat, name, types, shapes, split, contract, not unchecked, cost)
    _check_dims(function, avals)
    if function.checked and (split or contract) and (problem := function.problem(*function.twice())) is not None:
        raise _refusal(function, problem)
    params = {"key": object(), "follows": False, "unchecked": True if unchecked else None}
    return tree.tree_unflatten(
        structure, bind(JAX_BLOCKS, *tensors, f=function, results=shapes, **function.shown, **params)
    )


def _result(f: Callable[..., Any], structs: Sequence[Any]) -> tuple[Any, list[Any]]:
    result = jax.eval_shape(f, *structs)
    avals, structure = tree.tree_flatten(result)
    if not avals:
        raise ShapeError("the function of md.local returned no array")
    return structure, avals


def _shapes(out: Any, structure: Any, avals: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    """The dims of every result: one `out` for an array; for several, one each, as the function returns them."""
    if tree.treedef_is_leaf(structure):
        wanted = [out]
    elif isinstance(out, dict):
        wanted = structure.flatten_up_to(out)
    else:
        wanted = [out] if isinstance(out, str) else list(out)
    if len(wanted) != len(avals):
        raise ShapeError(
            f"the function of md.local returned {len(avals)} arrays, and out= has dims for {len(wanted)}\n"
            "  give the dims of each, in order: out=('batch n k', 'batch k m')"
        )
    return tuple(_shape(dims, aval, tensors) for dims, aval in zip(wanted, avals, strict=True))


def _shape(dims: DimsLike, aval: Any, tensors: Sequence[Tensor]) -> Shape:
    items = split_items(dims)
    if len(items) != len(aval.shape):
        raise ShapeError(
            f"the function of md.local returned an array of shape {tuple(aval.shape)}, and out= names {len(items)} dims "
            f"({' '.join(map(str, items))})\n  name every axis once, in order"
        )
    sized = [
        Dim(item, size) if isinstance(item, str) and ":" not in item else item
        for item, size in zip(items, aval.shape, strict=True)
    ]
    shape = pick(sized, (), new=True)
    known = {d.name: d.size for x in tensors for d in x.dims}
    wrong = [d for d, size in zip(shape, aval.shape, strict=True) if d.size != size or known.get(d.name, size) != size]
    if wrong:
        raise ShapeError(
            f"the function of md.local returned an array of shape {tuple(aval.shape)}, and out= names it {show(shape)}; "
            f"{wrong[0].name!r} has {known.get(wrong[0].name, wrong[0].size)} elements\n"
            "  a dim of another size needs a name of its own"
        )
    return shape


def _check_dims(f: JaxFunction, avals: Sequence[Any]) -> None:
    """Raise `ShapeError` for dims that no operand has, that a result cannot have, or that cannot be summed."""
    operand = {d.name for t in f.operands for d in t.shape}
    results = {d.name for shape in f.results for d in shape}
    lost = [name for name in f.split if name not in results]
    if lost:
        raise ShapeError(
            f"md.local splits {lost[0]!r}, which no result has\n"
            f"  if {f.name} sums over it, name it in contract=; otherwise leave it out, so that it is gathered"
        )
    kept = [name for name in f.contract if name in results]
    if kept:
        raise ShapeError(
            f"md.local sums over {kept[0]!r} (contract=), and a result has it\n  name it in split= instead"
        )
    unknown = [name for name in (*f.split, *f.contract) if name not in operand]
    if unknown:
        raise ShapeError(f"no operand of md.local has the dim {unknown[0]!r}")
    if f.contract and any(aval.dtype == np.dtype(bool) for aval in avals):
        raise ShapeError("md.local sums booleans over contract=; return integers")
