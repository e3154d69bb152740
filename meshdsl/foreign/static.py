"""Follow the sharding of every value through a program without computing: at real sizes, on any mesh, in a moment.

For each mesh axis a value is replicated, split along one of its axes, a partial sum or maximum, or unknown. What a
primitive does with the axes of its operands stands in `jax_functions.table`. Where the rules do not decide, the value is
unknown, and so is what comes of it: an unknown value is never called wrong, and never right.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from .. import jax_functions
from ..jax_functions.table import FIRST, JOINT, MIX, PRODUCTS, SUM, TABLE, equation
from .collectives import CASTS, KINDS, SUMS, axes_of
from .explain import EXTREME, PARTIAL, REPLICATED
from .findings import Finding
from .simulate import is_library, lines_of, split_over

UNKNOWN = "unknown"
_LINEAR = FIRST | {"reduce_window_sum"} | CASTS


@dataclass(frozen=True)
class State:
    """How a value lies over each mesh axis; `fixed`: it is made of numbers in the program alone, `zero`: of zeros.

    `scale`: how often a psum has counted it, if that is known. `source`: what made it partial, or scaled it. `joined`:
    for a result of `shard_map` that its out_specs does not describe, the finding, if anything but a `shard_map` reads it.
    """

    over: Mapping[str, str | int]
    scale: float | None = 1.0
    fixed: bool = False
    zero: bool = False
    source: Any = None
    inside: State | None = None
    spec: Any = None
    joined: Finding | None = None

    def along(self, axis: str) -> str | int:
        return self.over.get(axis, REPLICATED)


@dataclass
class Static:
    """The findings of one program, and the results that no rule decides."""

    findings: list[Finding] = field(default_factory=list[Finding])
    twins: dict[int, Any] = field(default_factory=dict[int, Any])  # by id: the equation of the program on one device
    quiet: int = 0

    def program(self, closed: Any, one: Any, names: Sequence[str]) -> list[str]:
        """Follow a traced program, beside the same one traced for one device, which tells which numbers in it count
        devices; returns the results that are not decided."""
        jaxpr, consts = jax_functions.opened(closed)
        if one is not None and jax_functions.outline(jaxpr) == jax_functions.outline(one):
            _pair(jaxpr, jax_functions.opened(one)[0], self.twins)
        outs = self.jaxpr(jaxpr, [State({}) for _ in jaxpr.invars], {}, None)
        for out in outs:
            self.read(out)
        return [name for name, out in zip(names, outs, strict=True) if UNKNOWN in out.over.values() or out.scale is None]

    def read(self, state: State) -> None:
        if state.joined is not None:
            self.add(state.joined)

    def add(self, finding: Finding) -> None:
        if not self.quiet and all((f.where, f.primitive) != (finding.where, finding.primitive) for f in self.findings):
            self.findings.append(finding)

    def jaxpr(self, jaxpr: Any, ins: Sequence[State], mesh: Mapping[str, int], caller: Any) -> list[State]:
        env: dict[Any, State] = dict(zip(jaxpr.invars, ins, strict=True))
        env |= {v: State({}, fixed=True) for v in jaxpr.constvars}
        library = caller is not None and is_library(jaxpr)
        for eqn in jaxpr.eqns:
            twin = self.twins.get(id(eqn))
            like = twin.invars if twin is not None else [None] * len(eqn.invars)
            values = [_number(v, w) if isinstance(v, Literal) else env[v] for v, w in zip(eqn.invars, like, strict=True)]
            outs = self.equation(eqn, values, mesh, caller if library else eqn)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_number(v, None) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[State], mesh: Mapping[str, int], source: Any) -> list[State]:
        name, bodies = eqn.primitive.name, jax_functions.inner(eqn)
        if name == "shard_map":
            return self.shard_map(eqn, ins, mesh, source)
        if name in jax_functions.CALLS or name.startswith("custom_") and bodies:
            return self.jaxpr(jax_functions.opened(bodies[0])[0], ins, mesh, source)
        if name not in CASTS:
            for state in ins:
                self.read(state)
        if name == "scan":
            return self.scan(eqn, ins, mesh, source)
        if name == "cond":
            outs = [self.jaxpr(jax_functions.opened(body)[0], ins[1:], mesh, source) for body in bodies]
            return [_unless(_uniform(ins[0]), _joined(own)) for own in zip(*outs, strict=True)]
        if name == "while" or bodies and name not in KINDS and name not in TABLE:
            every = [State(dict.fromkeys(mesh, UNKNOWN), None) for _ in eqn.outvars]
            return [State({}, fixed=all(s.fixed for s in ins)) if all(map(_plain, ins)) else s for s in every]
        if name in CASTS:
            return list(ins)
        if name == "axis_index":
            return [State({a: UNKNOWN for a in axes_of(eqn)}, None)]
        if name in KINDS:
            return [self.collective(eqn, state, mesh, source) for state in ins]
        over = {axis: self.along(eqn, axis, ins, source) for axis in mesh}
        partial = next((s.source for s in ins if s.source is not None), None)
        if PARTIAL in over.values() or EXTREME in over.values():
            partial = partial or source
        zero = all(s.zero for s in ins) and name in {*_LINEAR, *JOINT} and bool(ins)
        state = State(over, self.scaled(eqn, ins, over, source), bool(ins) and all(s.fixed for s in ins), zero, partial)
        return [state] * len(eqn.outvars)

    def shard_map(self, eqn: Any, ins: list[State], mesh: Mapping[str, int], source: Any) -> list[State]:
        sizes, p = dict(eqn.params["mesh"].shape), eqn.params
        own = {a: n for a, n in sizes.items() if a in p["newly_manual_axes"]}
        entered = list[State]()
        for state, spec, v in zip(ins, p["in_specs"], eqn.invars, strict=True):
            if state.inside is not None and state.spec == spec:
                entered.append(state.inside)
                continue
            self.read(state)
            over = {a: d for d, axes in enumerate(split_over(spec, len(v.aval.shape))) for a in axes}
            unknown = UNKNOWN in state.over.values()
            entered.append(replace(state, over={**state.over, **dict.fromkeys(own, UNKNOWN)} if unknown else over))
        outs = self.jaxpr(jax_functions.opened(p["jaxpr"])[0], entered, {**mesh, **own}, source)
        return [
            self.left(state, spec, own, v, source)
            for state, spec, v in zip(outs, p["out_specs"], eqn.outvars, strict=True)
        ]

    def left(self, state: State, spec: Any, own: Mapping[str, int], v: Any, source: Any) -> State:
        wanted = {a: d for d, axes in enumerate(split_over(spec, len(v.aval.shape))) for a in axes}
        outside = {a: how for a, how in state.over.items() if a not in own}
        wrong = [a for a, n in own.items() if n > 1 and state.along(a) not in (UNKNOWN, wanted.get(a, REPLICATED))]
        if state.fixed and not state.source:
            wrong = []
        unknown = any(state.along(a) == UNKNOWN for a in own)
        joined = None
        if wrong or state.scale not in (None, 1.0) and not unknown:
            at = lines_of(state.source if state.source is not None else source)
            says = f"its out_specs is {spec}"
            what = f"a result of shard_map is {_text(state, wrong or own)}, but {says}"
            partial = [a for a in wrong if state.along(a) in (PARTIAL, EXTREME)]
            fix = f"psum over {', '.join(map(repr, partial))} before it is returned" if partial else ""
            joined = Finding(what, at or lines_of(source), "shard_map", tuple(wrong), at, fix)
        over = {**outside, "": UNKNOWN} if unknown else outside
        scale = None if joined or unknown else state.scale
        return State(over, scale, state.fixed, inside=state, spec=spec, joined=joined)

    def scan(self, eqn: Any, ins: list[State], mesh: Mapping[str, int], source: Any) -> list[State]:
        (body,) = jax_functions.inner(eqn)
        jaxpr = jax_functions.opened(body)[0]
        rows = sum(len(v.aval.shape) > len(w.aval.shape) for v, w in zip(eqn.invars, jaxpr.invars, strict=True))
        carries = sum(len(v.aval.shape) == len(w.aval.shape) for v, w in zip(eqn.outvars, jaxpr.outvars, strict=True))
        fixed = len(ins) - rows - carries
        row = [_shifted(s, -1) for s in ins[fixed + carries :]]
        carry = ins[fixed : fixed + carries]
        self.quiet += 1
        for _ in range(2 + 2 * len(mesh)):
            outs = self.jaxpr(jaxpr, [*ins[:fixed], *carry, *row], mesh, source)
            new = [_joined([a, b]) for a, b in zip(carry, outs[:carries], strict=True)]
            if [_key(s) for s in new] == [_key(s) for s in carry]:
                break
            carry = new
        else:
            carry = [State(dict.fromkeys(mesh, UNKNOWN), None) for _ in carry]
        self.quiet -= 1
        outs = self.jaxpr(jaxpr, [*ins[:fixed], *carry, *row], mesh, source)
        return [*carry, *(_shifted(s, 1) for s in outs[carries:])]

    def collective(self, eqn: Any, state: State, mesh: Mapping[str, int], source: Any) -> State:
        name, p, over, scale, made = eqn.primitive.name, eqn.params, dict(state.over), state.scale, state.source
        axes = [a for a in axes_of(eqn) if mesh[a] > 1]
        if p.get("axis_index_groups") is not None:
            return replace(state, over={**over, **dict.fromkeys(axes, UNKNOWN)}, scale=None)
        for a in axes:
            how = over.get(a, REPLICATED)
            if name in SUMS and how == REPLICATED and scale is not None and not state.zero:
                scale, made = scale * mesh[a], source
            elif name in SUMS and (isinstance(how, int) or how == EXTREME):
                self.wrong(eqn, source, f"adds over {a!r} {_how(how, a)}", (a,), state)
                scale = None
            if name in ("pmax", "pmin") and (how == PARTIAL or isinstance(how, int)):
                self.wrong(eqn, source, f"takes the extreme over {a!r} of {_how(how, a)}", (a,), state)
            over[a] = self.moved(eqn, a, how, source, state)
        if any(v == UNKNOWN for v in over.values()):
            scale = None
        done = not any(v in (PARTIAL, EXTREME) for v in over.values()) and scale == 1.0
        return State(over, scale, state.fixed, state.zero, None if done else made)

    def moved(self, eqn: Any, a: str, how: str | int, source: Any, state: State) -> str | int:
        """How a value lies over an axis after a collective over it."""
        name, p = eqn.primitive.name, eqn.params
        if how == UNKNOWN:
            return UNKNOWN
        match KINDS[name]:
            case "all_reduce":
                return UNKNOWN if isinstance(how, int) else REPLICATED
            case "reduce_scatter":
                return p["scatter_dimension"] if how in (PARTIAL, REPLICATED) and p["tiled"] else UNKNOWN
            case "all_gather":
                if how != p["all_gather_dimension"] or not p["tiled"]:
                    return UNKNOWN
                return REPLICATED
            case "all_to_all":
                return p["split_axis"] if how == p["concat_axis"] else UNKNOWN
            case _:
                return UNKNOWN

    def wrong(self, eqn: Any, source: Any, what: str, axes: tuple[str, ...], *states: State) -> None:
        since = next((lines_of(s.source) for s in states if s.source is not None), ())
        self.add(Finding(what, lines_of(source), eqn.primitive.name, axes, since))

    def along(self, eqn: Any, axis: str, ins: list[State], source: Any) -> str | int:
        """How the result of an equation lies over one mesh axis."""
        name, hows = eqn.primitive.name, [s.along(axis) for s in ins]
        if UNKNOWN in hows:
            return UNKNOWN
        if all(how == REPLICATED for how in hows):
            return REPLICATED
        if name == "reshape" and isinstance(hows[0], int):
            return _reshaped(equation(eqn), hows[0])
        rule = TABLE.get(name)
        if rule is None:
            return UNKNOWN
        targets = [*rule(equation(eqn)), *[()] * len(ins)]
        results = set[str | int]()
        for i, how in enumerate(hows):
            if isinstance(how, int):
                to = targets[i][how] if how < len(targets[i]) else MIX
                results.add(PARTIAL if to == SUM else EXTREME if name in ("reduce_max",) else UNKNOWN if to == MIX else to)
            elif how in (PARTIAL, EXTREME):
                results.add(self.partial(eqn, axis, i, how, ins, hows, source))
        if name == "dot_general" and PARTIAL in results and len(results) > 1:
            return UNKNOWN
        return results.pop() if len(results) == 1 else UNKNOWN

    def partial(
        self, eqn: Any, axis: str, i: int, how: str | int, ins: list[State], hows: list[str | int], source: Any
    ) -> str | int:
        """What an equation makes of an operand that is partial: partial still, or wrong."""
        name, others = eqn.primitive.name, [k for k in range(len(ins)) if k != i]
        alone = all(hows[k] == REPLICATED for k in others)
        if how == EXTREME:
            keeps = name in ("max", "broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type")
        else:
            keeps = (
                name in JOINT and all(hows[k] == how or ins[k].zero or (name == "select_n" and k == 0) for k in others)
                or name in _LINEAR and i == 0 and alone
                or name in PRODUCTS and alone
                or name == "dynamic_update_slice" and ins[0].zero
            )  # fmt: skip
        if keeps:
            return how
        if name not in TABLE or name.startswith("scatter") or any(isinstance(hows[k], int) for k in others):
            return UNKNOWN
        kind = "sum" if how == PARTIAL else "maximum"
        if name in ("mul", "eq", "ne", "lt", "gt", "le", "ge", "select_n", "sign", "stop_gradient"):
            return UNKNOWN  # a product with a mask of one device is right, as is a comparison with zero
        self.wrong(eqn, source, f"an operand is a partial {kind} over {axis!r}", (axis,), ins[i])
        return UNKNOWN

    def scaled(self, eqn: Any, ins: list[State], over: Mapping[str, str | int], source: Any) -> float | None:
        """The scale of a result: known where sums have scaled its operands, and numbers differ from those of one device."""
        name, own = eqn.primitive.name, [s.scale for s in ins]
        if UNKNOWN in over.values() or None in own:
            return None
        scales = [scale for scale in own if scale is not None]
        if all(scale == 1.0 for scale in scales):
            return 1.0
        if name in PRODUCTS:
            return scales[0] * scales[1]
        if name == "div":
            return scales[0] / scales[1]
        if name in ("integer_pow", "square"):
            return scales[0] ** eqn.params.get("y", 2)
        if name in JOINT:
            used = {scale for s, scale in zip(ins, scales, strict=True) if not s.zero}
            return used.pop() if len(used) == 1 else None
        if name in _LINEAR or name in ("transpose", "squeeze", "reduce_max"):
            return scales[0]
        if name in TABLE and len(ins) == 1 and not ins[0].fixed and eqn.outvars[0].aval.dtype.kind == "f":
            what = f"an operand is {scales[0]:g} times what one device computes"
            self.wrong(eqn, source, what, (), ins[0])
        return None


def _pair(jaxpr: Any, one: Any, twins: dict[int, Any]) -> None:
    for eqn, twin in zip(jaxpr.eqns, one.eqns, strict=True):
        twins[id(eqn)] = twin
        for body, other in zip(jax_functions.inner(eqn), jax_functions.inner(twin), strict=True):
            _pair(jax_functions.opened(body)[0], jax_functions.opened(other)[0], twins)


def _number(v: Any, twin: Any) -> State:
    """The state of a number in the program; its scale is that over the number of the program on one device."""
    x = np.asarray(v.val)
    if not isinstance(twin, Literal):
        return State({}, None, fixed=True, zero=bool(np.all(x == 0)))
    y = np.asarray(twin.val)
    ratio = 1.0 if x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind == "f") else None
    if ratio is None and x.ndim == y.ndim == 0 and y != 0 and x.dtype.kind in "fiu":
        ratio = float(x) / float(y)
    return State({}, ratio, fixed=True, zero=bool(np.all(x == 0)))


def _reshaped(e: Any, axis: int) -> str | int:
    """The axis of the result that begins where a split axis begins, if whole blocks stay together."""
    before, size = math.prod(e.ins[0][:axis]), e.ins[0][axis]
    for k, n in enumerate(e.outs[0]):
        if math.prod(e.outs[0][:k]) == before and n and (n % size == 0 or size % n == 0) and (n > 1 or size == 1):
            return k
    return UNKNOWN


def _shifted(state: State, by: int) -> State:
    over = {a: UNKNOWN if isinstance(d, int) and d + by < 0 else d + by if isinstance(d, int) else d for a, d in state.over.items()}
    return replace(state, over=over, inside=None, joined=None)


def _key(state: State) -> tuple[Any, ...]:
    return ({a: how for a, how in state.over.items() if how != REPLICATED}, state.scale, state.fixed, state.zero)


def _joined(states: Sequence[State]) -> State:
    """One state for a value that may be any of these; zeros are like any other."""
    states = [s for s in states if not s.zero] or list(states)
    first = states[0]
    over = {
        a: first.along(a) if all(s.along(a) == first.along(a) for s in states) else UNKNOWN
        for s in states for a in s.over
    }  # fmt: skip
    scale = first.scale if all(s.scale == first.scale for s in states) else None
    made = next((s.source for s in states if s.source is not None), None)
    return State(over, scale, all(s.fixed for s in states), all(s.zero for s in states), made)


def _unless(known: bool, state: State) -> State:
    return state if known else replace(state, over=dict.fromkeys(state.over, UNKNOWN), scale=None)


def _uniform(state: State) -> bool:
    return all(how == REPLICATED for how in state.over.values())


def _plain(state: State) -> bool:
    return _uniform(state) and state.scale == 1.0


def _how(how: str | int, axis: str) -> str:
    return f"blocks of axis {how}" if isinstance(how, int) else f"a partial {'sum' if how == PARTIAL else 'maximum'}"


def _text(state: State, axes: Any) -> str:
    parts = [f"{_how(how, a)} over {a!r}" if how != REPLICATED else f"the same on every device of {a!r}"
             for a in axes for how in [state.along(a)] if how != UNKNOWN]  # fmt: skip
    return ", ".join(parts) + (f", counted {state.scale:g} times" if state.scale not in (None, 1.0) else "")
