"""`md.verify_jax`: does a sharded JAX program compute what one device computes, and if not, at which line does it differ?"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..errors import TraceError
from .explain import Reference, close, scales_of
from .findings import Finding, Search
from .simulate import Run, Value
from .trace import Traced, trace


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    undecided: tuple[str, ...]
    notes: tuple[str, ...] = ()
    collectives: tuple[Any, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.findings, *self.undecided, *self.notes])) or "right"


def verify_jax(f, *args, reference=None, dims=None, simulate=True, seed=0):
    traced, notes = _traced(f, args)
    if not any(traced.shard_maps()):
        raise TraceError("there is no jax.shard_map in this function")
    arrays = drawn(traced.arguments, seed)
    run = Run()
    outs = run.program(traced.jaxpr, arrays)
    twin = Run()
    try:
        one = trace(reference or f, args, dict.fromkeys(traced.sizes(), 1), False if reference is None and notes else None)
        wants = twin.program(one.jaxpr, arrays)
    except Exception as error:
        if reference: raise
        return Report((), (f"no one-device run: {type(error).__name__}: {str(error)[:100]}",), notes)
    tolerance = 1e-4 if run.narrow or twin.narrow else 1e-9
    wrong = [o for o, w in zip(outs, wants, strict=True) if not close(_plain(o), _plain(w), tolerance)]
    inputs = [Value(np.asarray(x, np.float64 if x.dtype.kind == "f" else x.dtype)[None], {}) for x in arrays]
    ref = Reference(twin, inputs, scales_of([*traced.sizes().values()]), tolerance)
    search = Search(run, ref, {})
    for o, w in zip(outs, wants, strict=True):
        if o in wrong: search.expect(o, w.array[0])
    wrong += search.split_wrongly()
    if wrong and twin.guessed:
        return Report((), ("a permutation is written for this mesh, so there is no one-device run of it; pass reference=",), notes)
    return Report(tuple(search.findings(wrong)) if wrong else (), (), notes)


def _plain(v):
    x = v.array[0]
    return x if isinstance(x, np.ndarray | np.generic) else jax.random.key_data(x)


def _traced(f, args):
    try:
        return trace(f, args), ()
    except (ValueError, TypeError) as error:
        try:
            return trace(f, args, check_vma=False), (str(error),)
        except (ValueError, TypeError):
            raise error from None


def drawn(arguments, seed):
    rng = np.random.default_rng(seed)
    out = []
    for x in arguments:
        if isinstance(x, jax.ShapeDtypeStruct):
            if np.issubdtype(x.dtype, np.integer): out.append(rng.integers(0, 4, x.shape).astype(x.dtype))
            else: out.append(rng.normal(size=x.shape))
        else:
            x = np.asarray(x)
            if x.dtype.kind == "f" and x.size and (x == x.flat[0]).all():
                x = x + rng.uniform(0.1, 0.2, x.shape)
            out.append(x)
    return out
