"""`md.local` runs a function on each device's blocks: inside, a sharded dim has block size, and nothing is sent.

Functions of JAX arrays are in `blocks`; here are functions of md operations.

The function returns the device's block of the result. If a dim is sharded in an operand and missing in the result,
the result is a partial sum over the devices along that dim. The gradient is a local function of the same blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..backend import Local
from ..control.autodiff import pullback
from ..control.batching import at_all_places
from ..control.blockwise import run_on
from ..dims import Dim, DimsLike, Shape, merge, names, pick, show, split_items
from ..errors import ShapeError, TraceError, at
from ..ir import Call, Graph, Labels, Op, Reduce, Type, only_named, operations, walk
from ..ops.creation import zeros_like
from ..ops.reshape import transpose
from ..trace import Tensor, as_tensor, bind1, trace
from .apply import apply
from .blocks import JAX_BLOCKS, types_of, without_padding

Function = Callable[..., Tensor]


def _traced(f: Function, types: Sequence[Type]) -> Graph:
    graph, captures, _ = trace(f, types)
    if captures:
        raise TraceError(
            f"the function of md.local uses a tensor from outside, {captures[0].type}\n"
            "  md.local cannot know which block of it to use; pass it as an argument"
        )
    loops = [eqn for eqn, _ in walk(graph) if eqn.control is not None and not isinstance(eqn.control, Call)]
    if loops:
        raise at(
            TraceError(f"the function of md.local must contain no loops or branches, and this is {loops[0].op}"),
            loops[0].where,
        )
    return graph


def _type(*ins: Type, f: Function, results: tuple[Shape, ...], **_: Any) -> Type:
    (y,), (result,) = _traced(f, ins).outs, results
    if y.dims != result:
        raise ShapeError(
            f"the function of md.local returned {show(y.dims)}, and out= asks for {show(result)}\n"
            f"  its operands were {', '.join(show(t.dims) for t in ins)}; "
            "their dims keep their sizes: on one device, those of a block"
        )
    return y.type


def _kernel(c: Local, *ins: Any, f: Function, **_: Any) -> Any:
    return without_padding(c, ins, lambda xs, types: run_on(c.xp, _traced(f, types), xs))[0]


def _vjp(
    ct: Tensor, *ins: Tensor, f: Function, results: tuple[Shape, ...], whole: Sequence[str], key: object, **_: Any
) -> list[Tensor | None]:
    operand_dims = {d.name for x in ins for d in x.dims}
    whole = (*whole, *(d.name for d in results[0] if d.name not in operand_dims))

    def cotangent(i: int) -> Tensor | None:
        if ins[i].dtype.kind not in "fVc":
            return None

        @functools.wraps(f)
        def pulled(*args: Tensor) -> Tensor:
            *xs, ct = args
            graph = _traced(f, [x.type for x in xs])
            grad = pullback(graph, xs, [j == i for j in range(len(xs))])[1]([ct])[i]
            return zeros_like(xs[i]) if grad is None else grad

        return bind1(LOCAL, *ins, ct, f=pulled, results=(ins[i].dims,), whole=whole, key=key, follows=True)

    return [cotangent(i) for i in range(len(ins))]


def _rule(*ins: Type, results: tuple[Shape, ...], whole: Sequence[str], **_: Any) -> Labels:
    operand_dims = {d.name for t in ins for d in t.dims} - set(whole)
    return Labels(tuple(only_named(t.dims, operand_dims) for t in ins), (only_named(results[0], operand_dims),))


def _flops(ins: Any, outs: Any, *, shapes: Sequence[Any], dtypes: Sequence[Any], f: Function, **_: Any) -> float:
    graph = _traced(f, types_of(shapes, ins, dtypes))
    return sum(operations(eqn, lambda v: tuple(d.size for d in v.dims)) for eqn in graph.eqns)


def _vmap(*ins: Tensor, new: Dim, f: Function, results: tuple[Shape, ...], **params: Any) -> Tensor:
    @functools.wraps(f)
    def mapped(*blocks: Tensor) -> Tensor:
        block = next(d for x in blocks for d in x.dims if d.name == new.name)  # a device's part of the new dim
        return at_all_places(f, block)(*blocks)

    return bind1(LOCAL, *ins, f=mapped, results=tuple((new, *shape) for shape in results), **params)


LOCAL = Op("local", type=_type, kernel=_kernel, vjp=_vjp, vmap=_vmap, reduce=Reduce.SUM, rule=_rule, flops=_flops)
REGIONS = (LOCAL, JAX_BLOCKS)  # their gradients use the same blocks


def local(
    f: Callable[..., Any],
    *xs: Any,
    out: Any,
    whole: DimsLike = (),
    split: DimsLike | None = None,
    contract: DimsLike = (),
    unchecked: bool = False,
    flops: float | None = None,
) -> Any:
    """`f(*xs)` on each device's blocks: inside f, a dim sharded by the layout has the size of one block.

    With `split` or `contract`, f is any function of JAX arrays: of `jax.numpy`, a Pallas kernel, a `jax.custom_vjp`.

    >>> import meshdsl as md
    >>> import jax.numpy as jnp
    >>> x = md.tensor([[3.0, 4.0], [0.0, 2.0]], "batch time")
    >>> md.local(lambda x: jnp.abs(jnp.fft.rfft(x)), x, out="batch frequency", split="batch")
    tensor(float32[batch=2 frequency=2], [[7. 1.]
     [2. 2.]])

    f maps over the dims in `split`, and sums over those in `contract`, which no result has; both may be sharded, and
    parts of a sum that f multiplies by infinity may add up to NaN. All other dims are gathered first, and new dims are
    not sharded. Sizes of new dims come from the result. If f returns several arrays, `out` has the dims of each. The
    jaxpr of f is checked: if an element of the result depends on other places of a split dim, the error names the
    primitive and the line. What the check cannot prove is tried on random data, and programs show "tested, not proven";
    `unchecked=True` turns it off, and programs show that. JAX differentiates f, on the same blocks; the backward pass
    runs f again. `flops` are the floating-point operations on whole operands, by default counted in the jaxpr.

    Without `split` and `contract`, f is a function of md operations on tensors. It is not checked: a function that
    mixes places of a sharded dim, or reads its size, gives other results under other layouts.

    >>> def scaled(x):  # by the norm of the whole row, which is here if channel is
    ...     return x / md.sqrt(md.sum(x * x, "channel"))
    >>> md.local(scaled, md.tensor([[3.0, 4.0]], "batch channel"), out="batch channel", whole="channel")
    tensor(float32[batch=1 channel=2], [[0.6 0.8]])

    Operands keep their shardings, with dims of equal names sharded alike; dims in `whole` are gathered first. f returns
    one tensor with the dims `out`: dims of the operands keep their sharding, new dims are not sharded. If a sharded
    dim of the operands is not in `out`, the results of the devices along it are summed. Under an empty layout the
    result is `f(*xs)`. Under any layout it is the same if f treats the elements of sharded dims independently or sums
    over them. f must contain no loops or branches and use no traced tensor from outside; it is traced again for its
    block sizes.

    Raises `ShapeError` if f returns other dims, or with `split` and `contract` if it mixes places, and `TraceError` for
    a loop, branch or outside tensor.
    If a sharded dim does not divide evenly, f is compiled for each size of a block, and never reads padding.
    """
    tensors = [as_tensor(x) for x in xs]
    operand_dims = merge([x.dims for x in tensors]).values()
    gathered = names(pick(whole, operand_dims))
    if split is not None or split_items(contract):
        mapped, summed = (names(pick(dims, operand_dims)) for dims in (split or (), contract))
        twice = [name for name in mapped if name in (*summed, *gathered)] + [n for n in summed if n in gathered]
        if twice:
            raise ShapeError(f"md.local names {twice[0]!r} in two of whole=, split= and contract=\n  name it once")
        return apply(f, tensors, out, (mapped, summed), unchecked, flops)
    if unchecked or flops is not None:
        raise ShapeError("unchecked= and flops= of md.local are for JAX functions: add split= or contract=")
    try:
        shape = pick(out, operand_dims, new=True)
    except ShapeError as error:
        raise ShapeError(
            f"{error}\n  or, if the function takes arrays of JAX, say so with split=: split='' maps over none"
        ) from None

    @functools.wraps(f)  # so that programs print its name
    def checked(*blocks: Tensor) -> Tensor:
        y = as_tensor(f(*blocks))
        if set(names(y.dims)) != set(names(shape)):
            raise ShapeError(f"the function of md.local returned {show(y.dims)}, and out= asks for {show(shape)}")
        return transpose(y, names(shape))

    return bind1(LOCAL, *tensors, f=checked, results=(shape,), whole=gathered, key=object(), follows=False)
