"""`md.vmap`: a function of single places of a dim becomes a function of all of them; parameters included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..dims import Dim, DimLike, DimsLike, Shape, merge, pick, split_items
from ..errors import ShapeError, expect
from ..trace import Tensor, flatten
from .batching import at_all_places
from .params import current_run
from .params.stacked import declare, declared_inside, weights_of, with_slices, without


def vmap(f: Callable[..., Any], over: DimsLike) -> Callable[..., Any]:
    """The function that computes `f` for every place of a dim; f sees its arguments without the dim.

    >>> import meshdsl as md
    >>> def loss(w, x):
    ...     return md.square(md.sum(w * x))
    >>> w, x = md.tensor([1.0, -1.0], "io"), md.tensor([[1.0, 2.0], [3.0, 5.0]], "batch io")
    >>> md.vmap(md.grad(loss), over="batch")(w, x)  # one gradient per example
    tensor(float32[batch=2 io=2], [[ -2.  -4.]
     [-12. -20.]])

    Tensors among the arguments that have the dim are mapped, the others are shared by all places; every result has the
    dim, first. A dim that no argument has is given with its size, `over="member:4"`: the parameters that f creates
    inside an `md.model` then differ per member, and so do random numbers of a key with the dim. Under a layout, the dim
    is sharded like any other. With several dims, f sees none of them.

    A random key per place gives the numbers that `jax.vmap` gives. Loops run while any place does; a branch whose
    predicate differs by place computes both sides. Raises `ShapeError` if no argument has the dim and its size is not
    given, and if f uses a dim of that name.
    """
    items = split_items(over)
    if not items:
        return f
    expect("f", f, Callable)
    inner = vmap(f, items[1:]) if len(items) > 1 else f

    @functools.wraps(f)
    def vectorised(*args: Any) -> Any:
        dim = _dim(items[0], args)
        run = current_run()
        return at_all_places(inner, dim)(*args) if run is None else _with_parameters(inner, dim, args)

    return vectorised


def _dim(over: DimLike, args: Any) -> Dim:
    if not isinstance(over, Dim | str):
        raise ShapeError(f"a dim is a md.Dim or a name, got {over!r}")
    shapes: list[Shape] = [x.dims for x in flatten(args)[0] if isinstance(x, Tensor)]
    name = over.name if isinstance(over, Dim) else over.partition(":")[0]
    sizes = {d for shape in shapes for d in shape if d.name == name}
    known = merge([(d,) for d in sizes])  # raises for two sizes
    if not known and not isinstance(over, Dim) and ":" not in over:
        listing = " ".join(dict.fromkeys(d.name for shape in shapes for d in shape)) or "none"
        raise ShapeError(
            f"md.vmap over {name!r}: no argument has that dim\n"
            f"  the arguments have: {listing}\n"
            f"  if only parameters or random numbers have it, give its size: over='{name}:4'"
        )
    return pick(over, known.values(), new=True)[0]


def _with_parameters(f: Callable[..., Any], dim: Dim, args: tuple[Any, ...]) -> Any:
    """Inside a model: each parameter that f creates has the dim too, and f sees one place of it."""
    run = current_run()
    assert run is not None
    declared, _ = declared_inside(run, dim, f, *without(dim, args))
    result = at_all_places(with_slices(run, dim, f), dim)(weights_of(run, declared), *args)
    declare(run, declared, "md.vmap")
    return result
