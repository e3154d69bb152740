"""`md.layers`: the same layer several times, as one scan over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dims import Dim, DimLike, pick
from ..errors import ShapeError
from ..ir import Type
from ..ops.creation import zeros_like
from ..trace import Tensor, eval_shape, tree
from .loops import scan
from .params import Declared, ModelRun, running_model
from .params.stacked import declare, declared_inside, weights_of, with_slices, without
from .remat import checkpoint


def layers(
    f: Callable[..., Any],
    x: Any,
    over: DimLike,
    *,
    xs: Any = None,
    remat: bool | str = False,
    collect: bool = False,
) -> Any:
    """Applies `x = f(x)` once per index of `over`, as one scan; the parameters of f are stacked along `over`.

    >>> import meshdsl as md
    >>> def f(x):
    ...     return md.relu(x * md.param("scale", "io:4", init=md.init.ones()))
    >>> model = md.model(lambda x: md.layers(f, x, over=md.Dim("layer", 3)))
    >>> model.specs(md.spec("batch:2 io:4"))
    {'scale': float32[layer=3 io=4]}

    The size of the graph does not depend on the number of layers. `xs` is a pytree of tensors with the dim `over`; f
    then also receives its slice, `f(x, slice)`. With `remat`, the gradient recomputes each layer from its input instead
    of saving intermediate values (rematerialisation); a text is a policy of md.checkpoint. With `collect`, f returns a
    pair (x, value), and the result is the last x and all values stacked along `over`, for example a decoder's caches.
    Raises `ShapeError` if f changes the dims or dtype of x.
    """
    run = running_model("md.layers")
    dim = pick(over, [d for leaf in tree.tree_leaves(xs)[:1] for d in leaf.dims], new=True)[0]
    has_slices = xs is not None

    def layer_step(carry: Any, row: Any) -> Any:
        result = f(carry, row) if has_slices else f(carry)
        return result if collect else (result, None)

    declared, collected = _layer_declarations(run, dim, layer_step, x, xs)
    if run.values is None:
        declare(run, declared, "md.layers")
        stacks = tree.tree_map(lambda t: zeros_like(Type((dim, *t.dims), t.dtype)), collected)
        return (x, stacks) if collect else x
    weights, apply = weights_of(run, declared), with_slices(run, dim, layer_step)
    policy = remat if isinstance(remat, str) else "nothing"

    def step(carry: Any, layer_slices: tuple[Any, dict[str, Tensor]]) -> Any:
        row, slices = layer_slices
        return (checkpoint(apply, policy) if remat else apply)(slices, carry, row)

    last, collected = scan(step, x, (xs, weights), over=dim)
    declare(run, declared, "md.layers")
    return (last, collected) if collect else last


def _layer_declarations(
    run: ModelRun, dim: Dim, layer_step: Callable[..., Any], x: Any, xs: Any
) -> tuple[dict[str, Declared], Any]:
    """The declarations of one layer, with the layer dim first, and the types of what it collects."""
    before = tree.tree_leaves(eval_shape(lambda x: x, x))
    declared, (after, collected) = declared_inside(run, dim, layer_step, x, without(dim, xs))
    after = tree.tree_leaves(after)
    if [(set(t.dims), t.dtype) for t in before] != [(set(t.dims), t.dtype) for t in after]:
        raise ShapeError(
            f"a layer of md.layers changes the type of its input: {', '.join(map(repr, before))} becomes "
            f"{', '.join(map(repr, after))}\n"
            "  the result of one layer is the input of the next, so both must have the same dims and dtype"
        )
    return declared, collected
