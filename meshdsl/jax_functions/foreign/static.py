"""Follow the sharding of every value through a program without computing: at real sizes, on any mesh, in a moment.

For each mesh axis a value is replicated, split along one of its axes, a partial sum or maximum, or unknown;
`jax_functions.table` says what a primitive does with the axes of its operands. Where no rule decides, the value is
unknown, and so are the values computed from it: they are called neither right nor wrong.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import Literal
from jax.sharding import NamedSharding

from ... import jax_functions
from ...errors import NOWHERE
from ..table import JOINT, MIX, PRODUCTS, SUM, TABLE, equation
from .collectives import CASTS, KINDS, SUMS, Axes, axes_of, called, scan_parts, split_over
from .constraints import Constraint, constraint, over_of, target
from .explain import EXTREME, PARTIAL, REPLICATED, Explanation
from .findings import Finding
from .simulate import is_library, lines_of
from .states import (
    LINEAR,
    SCALED,
    UNKNOWN,
    Followed,
    Names,
    either,
    how_of,
    moved,
    names_of,
    number_of,
    reshaped,
    shifted,
    unknown,
)

NEEDED = {**dict.fromkeys(SUMS, PARTIAL), "pmax": EXTREME, "pmin": EXTREME}  # by what a collective needs
_KEEP_EXTREMES = {"max", "broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type"}
# A product with a mask of one device is right though its operand is partial, as is a comparison with zero.
_MASKS = {"mul", "eq", "ne", "lt", "gt", "le", "ge", "select_n", "sign"}


@dataclass
class Static:
    """What is found by following one program. `names`: the dims of its variables, from those of its arguments."""

    findings: list[Finding] = field(default_factory=list[Finding])
    names: dict[Any, Names] = field(default_factory=dict[Any, Names])
    constraints: list[Constraint] = field(default_factory=list[Constraint])
    twins: dict[int, Any] = field(default_factory=dict[int, Any])  # by id: the equation of the program on one device
    manual: set[str] = field(default_factory=set[str])  # axes of the shard_maps around; the compiler has the others
    quiet: int = 0

    def program(self, closed: Any, one: Any, names: Sequence[Names], shardings: Sequence[Any] = ()) -> list[bool]:
        """Follow a traced program; for each result, whether it is decided.

        `shardings` are those of its arguments, if they are known. `one` is the program traced for one device, or None:
        it tells which numbers count devices.
        """
        jaxpr, _ = jax_functions.opened(closed)
        if one is not None and jax_functions.outline(jaxpr) == jax_functions.outline(one):
            _pair(jaxpr, jax_functions.opened(one)[0], self.twins)
        given = [
            (s, len(own)) if isinstance(s, NamedSharding) else None for s, own in zip(shardings, names, strict=False)
        ]
        outer = {a: n for pair in given if pair for a, n in dict(pair[0].mesh.shape).items()}
        overs = [over_of(*pair) if pair else {} for pair in given] or [{} for _ in names]
        outs = self.jaxpr(jaxpr, [Followed(o, names=own) for o, own in zip(overs, names, strict=True)], outer, None)
        self.read(outs)
        return [out.is_known and not out.assumed for out in outs]

    def read(self, states: Iterable[Followed]) -> None:
        """Values that something else than a `shard_map` reads: what its out_specs say of them counts."""
        for state in states:
            if state.joined is not None:
                self.add(state.joined)

    def add(self, finding: Finding) -> None:
        if not self.quiet and all((f.where, f.primitive) != (finding.where, finding.primitive) for f in self.findings):
            self.findings.append(finding)

    def wrong(self, eqn: Any, source: Any, what: str, axes: tuple[str, ...], state: Followed) -> None:
        if self.manual.issuperset(axes) and self.manual:  # else the compiler completes the sum
            self.add(Finding(what, lines_of(source), eqn.primitive.name, axes, state.lines))

    def constrained(self, eqn: Any, sharding: NamedSharding, state: Followed, source: Any) -> Followed:
        known = all(how != EXTREME for how in state.over.values()) and state.is_known
        lines = lines_of(source) or (NOWHERE,)
        if not self.quiet:
            self.constraints.append(constraint(eqn, state.over if known else None, lines[0], sharding))
        return replace(state, over=over_of(sharding, eqn.invars[0].aval.ndim), scale=1.0)

    def jaxpr(self, jaxpr: Any, ins: Sequence[Followed], mesh: Axes, caller: Any) -> list[Followed]:
        env: dict[Any, Followed] = dict(zip(jaxpr.invars, ins, strict=True))
        env |= {v: Followed() for v in jaxpr.constvars}
        library = caller is not None and is_library(jaxpr)
        for eqn in jaxpr.eqns:
            twin = self.twins.get(id(eqn))
            like = [None] * len(eqn.invars) if twin is None else twin.invars
            pairs = zip(eqn.invars, like, strict=True)
            values = [number_of(v, w) if isinstance(v, Literal) else env[v] for v, w in pairs]
            outs = self.equation(eqn, values, mesh, caller if library else eqn)
            env.update(zip(eqn.outvars, outs, strict=True))
        self.names.update((v, state.names) for v, state in env.items() if any(state.names))
        return [number_of(v, None) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[Followed], mesh: Axes, source: Any) -> list[Followed]:
        name = eqn.primitive.name
        if not self.manual and (sharding := target(eqn)) is not None:
            return [self.constrained(eqn, sharding, ins[0], source)]
        if name in CASTS:
            return ins
        if name == "shard_map":
            return self.shard_map(eqn, ins, mesh, source)
        if (body := called(eqn)) is not None:
            return self.call(eqn, body, ins, mesh, source)
        self.read(ins)
        if name == "scan":
            return self.scan(eqn, ins, mesh, source)
        if name == "cond":
            return self.branches(eqn, ins, mesh, source)
        if name in KINDS:
            return [self.collective(eqn, state, mesh, source) for state in ins]
        if name == "axis_index" or (name not in TABLE and not all(s.is_known and not s.over for s in ins)):
            return [unknown(mesh)] * len(eqn.outvars)
        return [self.computed(eqn, ins, mesh, source)] * len(eqn.outvars)

    def call(self, eqn: Any, body: Any, ins: list[Followed], mesh: Axes, source: Any) -> list[Followed]:
        """The results of a call; under `jax.jit` its arguments may get shardings."""
        given = () if self.manual else zip(eqn.params.get("in_shardings", ()), eqn.invars, strict=False)
        for i, (sharding, v) in enumerate(given):
            if isinstance(sharding, NamedSharding):
                ins[i], mesh = replace(ins[i], over=over_of(sharding, v.aval.ndim)), {**mesh, **sharding.mesh.shape}
        return self.jaxpr(jax_functions.opened(body)[0], ins, mesh, source)

    def branches(self, eqn: Any, ins: list[Followed], mesh: Axes, source: Any) -> list[Followed]:
        bodies = [jax_functions.opened(body)[0] for body in jax_functions.inner(eqn)]
        outs = [either(own) for own in zip(*(self.jaxpr(b, ins[1:], mesh, source) for b in bodies), strict=True)]
        return outs if ins[0].is_known and not ins[0].over else [unknown(mesh) for _ in outs]

    def computed(self, eqn: Any, ins: list[Followed], mesh: Axes, source: Any) -> Followed:
        over = {axis: self.along(eqn, axis, ins, source) for axis in mesh}
        over = {axis: how for axis, how in over.items() if how != REPLICATED}
        made = next((s.source for s in ins if s.source is not None), None)
        if made is None and not {PARTIAL, EXTREME}.isdisjoint(over.values()):
            made = source
        zero = bool(ins) and all(s.zero for s in ins) and eqn.primitive.name in LINEAR | JOINT
        scale = None if UNKNOWN in over.values() else self.scale(eqn, ins, source)
        return Followed(over, scale, zero, any(s.assumed for s in ins), made, names_of(eqn, ins))

    def shard_map(self, eqn: Any, ins: list[Followed], mesh: Axes, source: Any) -> list[Followed]:
        sizes, p = dict(eqn.params["mesh"].shape), eqn.params
        own = {a: sizes[a] for a in sizes if a in p["newly_manual_axes"]}
        entered = list[Followed]()
        for state, spec, v in zip(ins, p["in_specs"], eqn.invars, strict=True):
            if state.inside is not None and state.spec == spec:
                entered.append(state.inside)
                continue
            self.read([state])
            split = {a: d for d, axes in enumerate(split_over(spec, len(v.aval.shape))) for a in axes}
            entered.append(
                replace(state, over={**state.over, **split} if state.is_known else dict.fromkeys(own, UNKNOWN))
            )
        around, self.manual = self.manual, self.manual | own.keys()
        outs = self.jaxpr(jax_functions.opened(p["jaxpr"])[0], entered, {**mesh, **own}, source)
        self.manual = around
        pairs = zip(outs, p["out_specs"], eqn.outvars, strict=True)
        return [self.left(state, spec, own, mesh, len(v.aval.shape), source) for state, spec, v in pairs]

    def left(self, state: Followed, spec: Any, own: Axes, mesh: Axes, rank: int, source: Any) -> Followed:
        """A result of `shard_map`."""
        wanted = {a: d for d, axes in enumerate(split_over(spec, rank)) for a in axes}
        outside = {a: how for a, how in {**state.over, **wanted}.items() if a not in own or a in mesh}
        if any(state.along(a) == UNKNOWN for a in own) or state.scale is None:
            return Followed(outside, None, assumed=True, names=state.names, inside=state, spec=spec)
        wrong = tuple(
            a for a, n in own.items() if n > 1 and not state.zero and state.along(a) != wanted.get(a, REPLICATED)
        )
        joined = None
        if wrong or (state.scale != 1.0 and not state.assumed):
            shown = Explanation({a: state.along(a) for a in own}, state.scale).text(state.names)
            what = f"a result of shard_map is {shown}, but its out_specs is {spec}"
            joined = Finding(what, state.lines or lines_of(source), "shard_map", wrong, state.lines)
        return Followed(outside, 1.0, state.zero, state.assumed, None, state.names, state, spec, joined)

    def scan(self, eqn: Any, ins: list[Followed], mesh: Axes, source: Any) -> list[Followed]:
        body = jax_functions.opened(jax_functions.inner(eqn)[0])[0]
        fixed, carries = scan_parts(eqn, body)
        row, carry = [shifted(s, -1) for s in ins[fixed + carries :]], ins[fixed : fixed + carries]
        self.quiet += 1
        while True:  # each trip makes a carry no more known, so this ends
            outs = self.jaxpr(body, [*ins[:fixed], *carry, *row], mesh, source)
            new = [either([a, b]) for a, b in zip(carry, outs, strict=False)]
            if [s.what for s in new] == [s.what for s in carry]:
                break
            carry = new
        self.quiet -= 1
        outs = self.jaxpr(body, [*ins[:fixed], *carry, *row], mesh, source)
        return [*carry, *(shifted(s, 1) for s in outs[carries:])]

    def collective(self, eqn: Any, state: Followed, mesh: Axes, source: Any) -> Followed:
        """A value after a collective; what is unknown before a sum or a gather is taken to be what it needs."""
        name, over, scale = eqn.primitive.name, dict(state.over), state.scale
        made, assumed = state.source, state.assumed
        for a in [a for a in axes_of(eqn) if mesh[a] > 1]:
            how = UNKNOWN if eqn.params.get("axis_index_groups") else state.along(a)
            partial = how in (PARTIAL, EXTREME)
            if name in SUMS and how == REPLICATED and scale is not None and not state.zero:
                scale, made = scale * mesh[a], source
            elif _reduces_others(name, how):
                what = "adds" if name in SUMS else "takes the extreme of"
                self.wrong(eqn, source, f"{what} {how_of(how)} over {a!r}", (a,), state)
            over[a] = moved(eqn, how)
            if over[a] == UNKNOWN and KINDS[name] in ("all_reduce", "all_gather"):
                over[a], scale, assumed = REPLICATED, 1.0, True
            made = None if partial and scale == 1.0 else made
        scale = None if UNKNOWN in over.values() else scale
        return Followed(over, scale, state.zero, assumed, made, state.names)

    def along(self, eqn: Any, axis: str, ins: list[Followed], source: Any) -> str | int:
        """The state of an equation's result along one mesh axis."""
        name, hows = eqn.primitive.name, [s.along(axis) for s in ins]
        if UNKNOWN in hows or all(how == REPLICATED for how in hows):
            return UNKNOWN if UNKNOWN in hows else REPLICATED
        if name == "reshape" and isinstance(hows[0], int):
            return reshaped(equation(eqn), hows[0])
        targets, results = [*TABLE[name](equation(eqn)), *[()] * len(ins)], set[str | int]()
        for i, how in enumerate(hows):
            if isinstance(how, int):
                to = targets[i][how] if how < len(targets[i]) else MIX
                mixed = EXTREME if name == "reduce_max" else UNKNOWN
                results.add(PARTIAL if to == SUM else mixed if to == MIX else to)
            elif how != REPLICATED:
                results.add(self.partial(eqn, axis, i, ins, source))
        return results.pop() if len(results) == 1 else UNKNOWN

    def partial(self, eqn: Any, axis: str, i: int, ins: list[Followed], source: Any) -> str | int:
        """The state of the result when an operand is partial; a finding if the equation needs the complete sum."""
        name, how = eqn.primitive.name, ins[i].along(axis)
        others = [(k, s) for k, s in enumerate(ins) if k != i]
        alone = all(s.along(axis) == REPLICATED for _, s in others)
        if how == EXTREME:
            keeps = name in _KEEP_EXTREMES
        elif name in JOINT:
            keeps = all(s.along(axis) == how or s.zero or (name == "select_n" and k == 0) for k, s in others)
        else:
            keeps = alone and (name in PRODUCTS or (name in LINEAR and i == 0))
        if keeps:
            return how
        if not alone or name in _MASKS or name.startswith(("scatter", "dynamic_update")):
            return UNKNOWN
        self.wrong(eqn, source, f"an operand is {how_of(how)} over {axis!r}", (axis,), ins[i])
        return UNKNOWN

    def scale(self, eqn: Any, ins: list[Followed], source: Any) -> float | None:
        """The scale of a result, from those of its operands."""
        name, scales = eqn.primitive.name, [s.scale for s in ins if s.scale is not None]
        if len(scales) < len(ins):
            return None
        if all(scale == 1.0 for scale in scales):
            return 1.0
        if name in SCALED:
            return SCALED[name](scales, eqn.params)
        used = sorted({scale for s, scale in zip(ins, scales, strict=True) if not s.zero})
        if name in JOINT and len(used) == 1:
            return used[0]
        # an index may count what one device has, and a choice may be between values of other scales
        if eqn.outvars[0].aval.dtype.kind == "f" and not any(s.assumed for s in ins):
            worst = max(ins, key=lambda s: abs((s.scale or 1.0) - 1.0))
            shown = " and ".join(f"{scale:g}" for scale in used)
            if name in JOINT - {"select_n"}:
                self.wrong(eqn, source, f"adds values that are {shown} times what one device computes", (), worst)
            elif len(ins) == 1:
                self.wrong(eqn, source, f"an operand is {shown} times what one device computes", (), worst)
        return None


def _reduces_others(name: str, how: str | int) -> bool:
    """True if a reduction gets blocks, or terms of another kind than it reduces."""
    return name in NEEDED and (isinstance(how, int) or (how in (PARTIAL, EXTREME) and how != NEEDED[name]))


def _pair(jaxpr: Any, one: Any, twins: dict[int, Any]) -> None:
    for eqn, twin in zip(jaxpr.eqns, one.eqns, strict=True):
        twins[id(eqn)] = twin
        for body, other in zip(jax_functions.inner(eqn), jax_functions.inner(twin), strict=True):
            _pair(jax_functions.opened(body)[0], jax_functions.opened(other)[0], twins)
