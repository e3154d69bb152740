"""A primitive without an operation of meshdsl: JAX runs it on blocks, along the dims that the table proves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax.numpy as jnp

import meshdsl as md
from meshdsl import jax_functions

from ..axes import Axis, dims
from ..replay import OTHERS, NotImportedError, Replay, operation
from ..steps import BodyStep, Value
from ..tensors import fit, fresh, wholes

_REFUSED = {
    "shard_map": "a program for a mesh of its own is no model\n  import the function inside it, without jax.shard_map",
    **dict.fromkeys(
        ("pallas_call", "tpu_custom_call", "ffi_call", "pure_callback", "io_callback", "debug_callback"),
        "what it does to axes is not known\n"
        "  import a function without it, or write that part with md.local(f, *tensors, out=..., split=...)",
    ),
    **dict.fromkeys(
        ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "axis_index", "psum_invariant"),
        "it names an axis of jax.pmap, jax.vmap or jax.shard_map\n  import the function without that axis",
    ),
    "custom_lin": "it is half of a jax.custom_vjp, which only JAX can transpose\n"
    "  import the function, not its linearisation",
}


@operation(OTHERS)
def through_local(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    """`md.local` of the primitive: split along the axes that pass to all results, whole along the others."""
    if step.primitive in _REFUSED or step.eqn is None or step.bodies:
        raise NotImportedError(_REFUSED.get(step.primitive, "no operation here runs a function like this one"))
    passing, reason = _passing(step), ""
    for split in (passing, {}) if passing else ({},):
        try:
            results = _local(step, xs, split)
        except md.ShapeError as error:
            reason = str(error).splitlines()[0]
            continue
        along = " ".join(d.name for t in split for d in dims([step.outs[0].axes[t]]))
        how = f"on blocks along {along}" if along else "on whole arrays, on every device"
        replay.note(step, f"{step.primitive} has no operation here: JAX runs it {how}")
        return results
    raise NotImportedError(f"JAX cannot run it through md.local: {reason}")


def _passing(step: BodyStep) -> dict[int, Axis]:
    """The axes of the results, by number, that the table says pass from operands, and that are one dim."""
    found: dict[int, Axis] = {}
    for k, i, t in step.pairs() if step.primitive in jax_functions.TABLE else ():
        if isinstance(t, int) and all(t < len(o.shape) and o.shape[t] == step.ins[k].shape[i] for o in step.outs):
            axis = step.outs[0].axes[t]
            if len(axis.atoms()) == 1 and all(dims([o.axes[t]]) == dims([axis]) for o in step.outs):
                found[t] = axis
    return found


def _local(step: BodyStep, xs: list[Any], split: dict[int, Axis]) -> list[Any]:
    targets = {(k, i): t for k, i, t in step.pairs() if t in split}
    operands: list[md.Tensor] = []
    for k, (v, x) in enumerate(zip(step.ins, wholes(step, xs), strict=True)):
        new = [_dims(v, i, split.get(targets.get((k, i), -1))) for i in range(len(v.shape))]
        x = fit(x, *(([a], d) for a, d in zip(v.axes, new, strict=True)))
        operands.append(md.transpose(x, list(chain.from_iterable(new))))
    outs = [[_dims(o, t, split.get(t)) for t in range(len(o.shape))] for o in step.outs]
    flat: list[Any] = [tuple(chain.from_iterable(out)) for out in outs]
    present = {d for x in operands for d in x.dims}
    mapped = [d for d in dims(split.values()) if d in present]
    y = md.local(_on_arrays(step), *operands, out=flat if len(flat) != 1 else flat[0], split=mapped)
    results = y if len(flat) != 1 else [y]
    back = [[(d, [a]) for d, a in zip(new, o.axes, strict=True)] for new, o in zip(outs, step.outs, strict=True)]
    return [fit(t, *moves) for t, moves in zip(results, back, strict=True)]


def _dims(v: Value, i: int, axis: Axis | None) -> Sequence[md.Dim]:
    """One dim for axis i of a value, that of `axis` if it is split; none for one element."""
    own = [fresh(v.shape[i], "whole")] if axis is None else list(dims([axis]))
    return own if v.shape[i] != 1 else []


def _on_arrays(step: BodyStep) -> Callable[..., Any]:
    """The primitive on arrays that lack the axes of one element."""
    ones = [[i for i, n in enumerate(v.shape) if n == 1] for v in step.ins]
    gone = [tuple(i for i, n in enumerate(v.shape) if n == 1) for v in step.outs]

    def f(*blocks: Any) -> Any:
        arrays = [jnp.expand_dims(x, axes) if axes else x for x, axes in zip(blocks, ones, strict=True)]
        results = step.eqn.primitive.bind(*arrays, **step.eqn.primitive.get_bind_params(step.params))
        results = results if step.eqn.primitive.multiple_results else [results]
        squeezed = [jnp.squeeze(y, axes) if axes else y for y, axes in zip(results, gone, strict=True)]
        return tuple(squeezed) if len(squeezed) > 1 else squeezed[0]

    f.__name__ = step.primitive.replace("-", "_")
    return f
