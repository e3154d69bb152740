"""Run a traced JAX program as many devices would, in NumPy, without the devices, and record how each value was made.

Outside `jax.shard_map` a value is one array; inside, the blocks of all devices, stacked. Floats are computed in
64 bits whatever their dtype (`primitives`), so that what differs differs by more than rounding.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ... import jax_functions
from ...errors import NOWHERE, TraceError, Where, users_line
from .collectives import CASTS, KINDS, Array, Axes, apply, axes_of, called, groups, positions, scan_parts, split_over
from .primitives import host, is_float, is_narrow, results

MAX_BYTES = 4_000_000_000
MAX_TRIPS = 10_000


@dataclass(eq=False)
class Blocks:
    """A value of a run: its array on each device [devices, ...], the mesh axes of these devices, and what made it."""

    array: Any
    mesh: Axes
    maker: Executed | None = None
    is_literal: bool = False  # computed from numbers in the program alone

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[1:])


@dataclass(eq=False)
class Executed:
    """One equation of a run. `source`: the equation whose line counts, the call for one inside a library's function;
    `spec`: how an argument of `shard_map` is split, or a result is joined."""

    primitive: str
    eqn: Any
    ins: list[Blocks]
    outs: list[Blocks]
    source: Any
    spec: Any = None

    @functools.cached_property
    def lines(self) -> tuple[Where, ...]:
        """The user's line that made the step, and the lines that called the function it is in."""
        return lines_of(self.source) or (NOWHERE,)

    @property
    def where(self) -> Where:
        return self.lines[0]

    @property
    def is_collective(self) -> bool:
        return self.primitive in KINDS


@dataclass
class Run:
    """Every step of a program, in the order in which they ran. `stuck`: collectives that some devices never reach."""

    steps: list[Executed] = field(default_factory=list[Executed])
    stuck: list[Executed] = field(default_factory=list[Executed])
    narrow: bool = False  # some primitives ran in the dtypes of the program
    guessed: bool = False  # a permutation names devices that are not there, and they are left out
    bytes: int = 0
    noise: np.random.Generator | None = None  # every float that is computed is changed in its 13th digit

    def program(self, closed: Any, arguments: Sequence[Any]) -> list[Blocks]:
        """The results of a traced program, as values of no mesh."""
        jaxpr, consts = jax_functions.opened(closed)
        with jax.enable_x64(True):
            return self.jaxpr(jaxpr, consts, [Blocks(host(x)[None], {}) for x in arguments], {}, None, None)

    def jaxpr(
        self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[Blocks], mesh: Axes, caller: Any, active: Array | None
    ) -> list[Blocks]:
        env: dict[Any, Blocks] = dict(zip(jaxpr.invars, ins, strict=True))
        env |= {v: literal(c, mesh) for v, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(v: Any) -> Blocks:
            if not isinstance(v, Literal):
                return env[v]
            kind: Any = v.aval
            return literal(np.asarray(v.val, kind.dtype), mesh)

        library = caller is not None and is_library(jaxpr)
        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [read(v) for v in eqn.invars], mesh, caller if library else eqn, active)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[Blocks], mesh: Axes, source: Any, active: Array | None) -> list[Blocks]:
        name = eqn.primitive.name
        if special := _SPECIAL.get(name):
            return special(self, eqn, ins, mesh, source, active)
        if (body := called(eqn)) is not None:
            return self.jaxpr(*jax_functions.opened(body), ins, mesh, source, active)
        self.reserve(eqn.outvars, mesh, source)
        if name == "axis_index":
            arrays = [positions(eqn, mesh)]
        elif name in KINDS:
            self.guessed |= any(max(pair) >= mesh[axes_of(eqn)[0]] for pair in eqn.params.get("perm", ()))
            arrays = [apply(eqn, mesh, v.array) for v in ins]
        elif name in CASTS:
            return list(ins)
        else:
            try:
                arrays = results(eqn, [v.array for v in ins], _count(mesh))
            except (NotImplementedError, TypeError, ValueError) as error:
                why = (str(error) or repr(error)).splitlines()[0][:200]
                raise TraceError(
                    f"{name} at {_where(source)} cannot be simulated: {why}\n"
                    "  simulate=False follows shardings without computing"
                ) from error
            self.narrow |= is_narrow(eqn)
        step = self.step(name, eqn, ins, arrays, mesh, source)
        if active is not None and name in KINDS:
            part = active[groups(mesh, axes_of(eqn), eqn.params.get("axis_index_groups"))]
            if (part.any(1) & ~part.all(1)).any():
                self.stuck.append(step)
        return step.outs

    def step(
        self, name: str, eqn: Any, ins: list[Blocks], arrays: Sequence[Any], mesh: Axes, source: Any, spec: Any = None
    ) -> Executed:
        if self.noise is not None:
            arrays = [x * (1 + 1e-13 * self.noise.uniform(-1, 1, x.shape)) if is_float(x) else x for x in arrays]
        fixed = name != "axis_index" and all(v.is_literal for v in ins)
        outs = [Blocks(x, mesh, is_literal=fixed) for x in arrays]
        step = Executed(name, eqn, ins, outs, source, spec)
        for value in outs:
            value.maker = step
        self.steps.append(step)
        return step

    def reserve(self, variables: Sequence[Any], mesh: Axes, source: Any) -> None:
        """Count what new values take; raises `TraceError` before a program fills the memory."""
        self.bytes += 8 * _count(mesh) * sum(math.prod(getattr(v.aval, "shape", ())) for v in variables)
        if self.bytes > MAX_BYTES:
            raise TraceError(
                f"simulating this program keeps more than {MAX_BYTES / 1e9:g} GB of values, at {_where(source)}\n"
                "  pass smaller arrays or shapes, or simulate=False, which follows shardings without computing"
            )

    def shard_map(self, eqn: Any, ins: list[Blocks], mesh: Axes, source: Any, active: Array | None) -> list[Blocks]:
        """The body on blocks; axes of the mesh that stay automatic count as one device."""
        sizes, p = dict(eqn.params["mesh"].shape), eqn.params
        own = {a: sizes[a] for a in sizes if a in p["newly_manual_axes"]}
        inside, (jaxpr, consts) = {**mesh, **own}, jax_functions.opened(p["jaxpr"])
        self.reserve(jaxpr.invars, inside, source)
        entered = [
            self.step("shard_map", eqn, [v], [split(v.array, spec, own)], inside, source, spec).outs[0]
            for v, spec in zip(ins, p["in_specs"], strict=True)
        ]
        outs = self.jaxpr(jaxpr, consts, entered, inside, source, _repeated(active, own))
        return [
            self.step("shard_map", eqn, [v], [join(v.array, spec, own)], mesh, source, spec).outs[0]
            for v, spec in zip(outs, p["out_specs"], strict=True)
        ]

    def scan(self, eqn: Any, ins: list[Blocks], mesh: Axes, source: Any, active: Array | None) -> list[Blocks]:
        p, (jaxpr, consts) = eqn.params, jax_functions.opened(jax_functions.inner(eqn)[0])
        fixed, carries = scan_parts(eqn, jaxpr)
        carry, trips, stacked = ins[fixed : fixed + carries], range(p["length"]), list[list[Blocks]]()
        self.reserve(eqn.outvars[carries:], mesh, source)
        for t in reversed(trips) if p["reverse"] else trips:
            row = [self.step("scan", eqn, [v], [v.array[:, t]], mesh, source).outs[0] for v in ins[fixed + carries :]]
            outs = self.jaxpr(jaxpr, consts, [*ins[:fixed], *carry, *row], mesh, source, active)
            carry = outs[:carries]
            stacked.append(outs[carries:])
        if p["reverse"]:
            stacked.reverse()
        results = list(carry)
        for k, v in enumerate(eqn.outvars[carries:]):
            parts = [own[k] for own in stacked]
            whole = np.stack([x.array for x in parts], 1) if parts else np.zeros((_count(mesh), *v.aval.shape))
            results += self.step("scan", eqn, parts, [whole], mesh, source).outs
        return results

    def loop(self, eqn: Any, ins: list[Blocks], mesh: Axes, source: Any, active: Array | None) -> list[Blocks]:
        p = eqn.params
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        carry = ins[m:]
        for _ in range(MAX_TRIPS):
            (go,) = self.jaxpr(*jax_functions.opened(p["cond_jaxpr"]), [*ins[:n], *carry], mesh, source, active)
            on = np.asarray(go.array) & (True if active is None else active)
            if not on.any():
                return carry
            before, uniform = carry, on.all() or (active is not None and (on == active).all())
            carry = self.jaxpr(
                *jax_functions.opened(p["body_jaxpr"]), [*ins[n:m], *carry], mesh, source, active if uniform else on
            )
            if not uniform:
                carry = self.chosen(eqn, (~on).astype(int), [carry, before], mesh, source)
        raise TraceError(f"a while loop at {_where(source)} makes more than {MAX_TRIPS:,} trips on these arguments")

    def branches(self, eqn: Any, ins: list[Blocks], mesh: Axes, source: Any, active: Array | None) -> list[Blocks]:
        """The branch that is taken; where devices take different ones, all of these, and each device's own results."""
        bodies = eqn.params["branches"]
        which = np.clip(np.asarray(ins[0].array).astype(int), 0, len(bodies) - 1)
        taken = sorted(set(which.tolist()))
        outs = list[list[Blocks]]()
        for k in taken:
            on = which == k
            part = active if on.all() else on if active is None else on & active
            outs.append(self.jaxpr(*jax_functions.opened(bodies[k]), ins[1:], mesh, source, part))
        if len(taken) == 1:
            return outs[0]
        return self.chosen(eqn, np.searchsorted(taken, which), outs, mesh, source, ins[0])

    def chosen(
        self, eqn: Any, which: Array, outs: list[list[Blocks]], mesh: Axes, source: Any, index: Blocks | None = None
    ) -> list[Blocks]:
        results = list[Blocks]()
        for options in zip(*outs, strict=True):
            picked = np.stack([v.array for v in options])[which, np.arange(len(which))]
            ins = [*options, *([] if index is None else [index])]
            results += self.step(eqn.primitive.name, eqn, ins, [picked], mesh, source).outs
        return results


_SPECIAL: dict[str, Callable[..., list[Blocks]]] = {
    "shard_map": Run.shard_map, "scan": Run.scan, "while": Run.loop, "cond": Run.branches
}  # fmt: skip


def lines_of(source: Any) -> tuple[Where, ...]:
    """The user's lines behind an equation, innermost first."""
    traceback = None if source is None else source.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    lines = [users_line([(frame.file_name, frame.line_num)]) for frame in frames]
    return tuple(line for line in lines if line is not None)


def _where(source: Any) -> Where:
    return next(iter(lines_of(source)), NOWHERE)


def literal(x: Any, mesh: Axes) -> Blocks:
    broadcast: Any = np.broadcast_to if isinstance(x := host(x), np.ndarray) else jax.numpy.broadcast_to
    return Blocks(broadcast(x, (_count(mesh), *x.shape)), mesh, is_literal=True)


def split(x: Any, spec: Any, mesh: Axes) -> Any:
    """The blocks that the new mesh axes make of each of the arrays [devices, ...], devices of all axes in order."""
    blocks = list[Any]()
    for position in np.ndindex(*mesh.values()):
        at, places = dict(zip(mesh, position, strict=True)), [slice(None)]
        for size, own in zip(x.shape[1:], split_over(spec, x.ndim - 1), strict=True):
            i, k = 0, math.prod(mesh[a] for a in own)
            for a in own:
                i = i * mesh[a] + at[a]
            places.append(slice(i * size // k, (i + 1) * size // k))
        blocks.append(x[tuple(places)])
    stack = np.stack if isinstance(x, np.ndarray) else jax.numpy.stack  # keys are arrays of JAX
    return stack(blocks, 1).reshape(len(x) * len(blocks), *blocks[0].shape[1:])


def join(x: Any, spec: Any, mesh: Axes) -> Any:
    """The arrays [devices, ...] that blocks over the new mesh axes are together, as JAX joins them."""
    over = split_over(spec, x.ndim - 1)
    taken = [a for own in over for a in own]
    x = x.reshape(-1, *mesh.values(), *x.shape[1:])
    x = x[(slice(None), *(slice(None) if a in taken else 0 for a in mesh))]
    left = [a for a in mesh if a in taken]
    order, sizes = [0], [x.shape[0]]
    for d, own in enumerate(over):
        order += [*(1 + left.index(a) for a in own), 1 + len(left) + d]
        sizes.append(math.prod(mesh[a] for a in own) * x.shape[1 + len(left) + d])
    return x.transpose(order).reshape(sizes)


def _count(mesh: Axes) -> int:
    return math.prod(mesh.values())


def _repeated(active: Array | None, own: Axes) -> Array | None:
    return None if active is None else np.repeat(active, _count(own))


def is_library(jaxpr: Any) -> bool:
    """True for the body of a function of a library: JAX may have traced it for another caller."""
    info = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    return "site-packages" in info
