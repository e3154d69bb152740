"""Lower loops and branches. Their bodies are programs too, and can contain the same collectives.

The sharding of a loop's carry is a fixed point. If a carry starts as zeros and the body only adds pending sums to it,
it stays pending and is reduced once after the loop. Predicates are replicated and complete, so that all devices take
the same branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from ...control.host import host_values
from ...errors import InternalError, Where
from ...ir import Because, Call, Cause, Cond, Control, Eqn, Graph, Scan, Var, While, cse, dce
from ...layouts import Sharding
from ...trace import FULL
from ..program import Program
from .pending_sums import Body, PendingSums
from .scope import Reader, Scope

CARRIED = Cause(Because.CARRIED)
LARGE_STACK = 1 << 26  # bytes of the pending rows of a loop that are worth the latency of a collective in each trip
Lower = Callable[[Scope, Sequence[Eqn]], None]  # adds equations to the program being built
Given = Sharding | Eqn  # an input of a body: its sharding, or the equation that computes it inside the body
_Solved = tuple[list[Sharding], Scope, dict[str, Program]]  # of a loop: its carry's shardings, its body, its programs


def as_given(scope: Scope, v: Var) -> Given:
    """The form in which a body receives a value that it only reads: unmaterialized, or sharded without pending sums."""
    if v in scope.unmaterialized:
        return scope.constant_sharding(v) if scope.unmaterialized[v].ins else scope.unmaterialized[v]
    whole = scope.whole_version(v)
    return whole if whole is not None else scope.default_sharding[v].whole()


def _as_carry(scope: Scope, v: Var) -> Given:
    """The form in which a loop first tries a carry: a pending sum, as another loop leaves it, is not reduced before."""
    return scope.default_sharding[v] if scope.is_pending(v) else as_given(scope, v)


def row_of(stacked: Given, inner: Var) -> Given:
    """The row of a stacked input as the body receives it."""
    if isinstance(stacked, Eqn):
        return stacked.replace(params={**stacked.params, "shape": inner.dims})
    return stacked.along(inner.dims)


def as_stacked(scope: Scope, v: Var) -> Given:
    """The form in which a loop receives an input that it reads a row a trip: every device has all rows.

    An input that is not computed yet (unmaterialized) is computed inside the body if all its elements are one constant
    (`FULL`), and before the loop otherwise.
    """
    input = as_given(scope, v)
    if isinstance(input, Eqn):
        return input if input.op is FULL else Sharding()
    return input.with_split(v.dims[0].name, ())


def _zero_inputs(body: Graph, inputs: Sequence[Given]) -> list[Var]:
    given = zip(body.ins, inputs, strict=True)
    return [v for v, g in given if isinstance(g, Eqn) and g.op is FULL and not g.params["value"]]


def _build(outer: Scope, body: Graph, inputs: Sequence[Given], lower: Lower, use: Body | None = None) -> Scope:
    zero = _zero_inputs(body, inputs)
    pending = {v: g.partial for v, g in zip(body.ins, inputs, strict=True) if isinstance(g, Sharding) and g.partial}
    scope = Scope(outer.setting, body, outer.demand.of_body(body, use, zero, pending))
    for v, how in zip(body.ins, inputs, strict=True):
        if isinstance(how, Eqn):
            scope.unmaterialized[v] = how.replace(outs=(v,))
        else:
            scope.define(v, how)
            if how.partial:
                where = body.eqns[0].where if body.eqns else Where("", 0)
                scope.reasons[v] = (CARRIED, where, any(eqn.backward for eqn in body.eqns))
    scope.def_sharding.update(scope.default_sharding)
    lower(scope, body.eqns)
    scope.results = [natural(scope, v) for v in body.outs]
    return scope


def _attempt(outer: Scope, eqn: Eqn, body: Graph, inputs: Sequence[Given], lower: Lower, use: Body) -> Scope:
    """A loop's body, built once for the same inputs, unless regions of `md.local` may share their blocks with it."""
    attempts, key = outer.setting.attempts, (eqn, use, *inputs)
    if key not in attempts or outer.setting.regions:
        attempts[key] = _build(outer, body, inputs, lower, use)
    return attempts[key]


def natural(scope: Scope, v: Var) -> Sharding:
    """The sharding of a body's result if no consumer requires another one.

    It is the sharding of a complete version if the body needed one anyway, otherwise the sharding as computed.
    """
    if v in scope.unmaterialized:
        return scope.constant_sharding(v) if scope.unmaterialized[v].ins else Sharding()
    return scope.whole_version(v) or scope.default_sharding[v]


def _finish(scope: Scope, shardings: Sequence[Sharding], inputs: Sequence[Given], where: Eqn) -> Program:
    body = scope.graph
    back = Reader("the loop's result", where.where, where.backward, where.cause)
    outs = tuple(scope.get(v, s, back) for v, s in zip(body.outs, shardings, strict=True))
    ins = tuple(scope.versions[v][0] for v, how in zip(body.ins, inputs, strict=True) if isinstance(how, Sharding))
    # shard_free_dims() may reorder versions of computed values, never of inputs
    return dce(cse(Program(ins, tuple(scope.eqns), outs, mesh=scope.setting.mesh, extents=scope.setting.extents)))


def _bytes_sent(program: Program) -> float:
    return sum(record.wire_bytes * record.count for record in program.collectives)


def lower_control(scope: Scope, eqn: Eqn, control: Control, lower: Lower) -> None:
    """Add a loop or a branch to the program under construction; `lower` adds the equations of its bodies."""
    match control:
        case Scan():
            lower_scan(scope, eqn, control, lower)
        case While():
            lower_while(scope, eqn, control, lower)
        case Cond():
            lower_cond(scope, eqn, control, lower)
        case Call():
            raise InternalError(f"{eqn.op} at {eqn.where} was not put in place before partition")


def lower_scan(scope: Scope, eqn: Eqn, loop: Scan, lower: Lower) -> None:
    """Find the carry's sharding, build the body with it, and add the loop."""
    consts, carries = loop.consts, loop.carries
    held = [as_given(scope, v) for v in eqn.ins[:consts]]
    rows = [as_stacked(scope, v) for v in eqn.ins[consts + carries :]]
    use = Body(consts, carries, loop.trips, scope.demand.deferred_results(eqn, loop, scope.setting))
    fixed, built, programs = _solve(scope, eqn, loop, use, held, rows, lower)
    scope.def_sharding.update(built.def_sharding)
    ins = _operands(scope, eqn, eqn.ins, [*held, *fixed, *rows])
    outs = _results(scope, eqn, [v.sharding for v in programs["body"].outs], [built])
    n_held = sum(isinstance(how, Sharding) for how in held)
    scope.eqns.append(eqn.replace(ins=ins, outs=outs).with_control(**programs, consts=n_held))
    offloaded = host_values(loop.body)  # the host holds them as the loop stores them
    for v, inner in zip(eqn.outs[carries:], loop.body.outs[carries:], strict=True):
        if not scope.default_sharding[v].partial and inner not in offloaded:
            scope.shard_free_dims(v, eqn)


def _solve(
    scope: Scope, eqn: Eqn, loop: Scan, use: Body, held: Sequence[Given], rows: Sequence[Given], lower: Lower
) -> _Solved:
    """The carry's shardings, and the body's scope and program under them."""
    body, consts, carries = loop.body, loop.consts, loop.carries
    inner_rows = [row_of(g, v) for g, v in zip(rows, body.ins[consts + carries :], strict=True)]

    def attempt(carry: Sequence[Given]) -> Scope:
        return _attempt(scope, eqn, body, [*held, *carry, *inner_rows], lower, use)

    def finished(carry: Sequence[Sharding], built: Scope) -> dict[str, Program]:
        stacked = [_as_row(built, v, i, use) for i, v in list(enumerate(body.outs))[carries:]]
        return {"body": _finish(built, [*carry, *stacked], [*held, *carry, *inner_rows], eqn)}

    return _cheapest(scope, eqn.ins[consts : consts + carries], attempt, finished)


def _as_row(scope: Scope, v: Var, i: int, use: Body) -> Sharding:
    """The sharding in which a loop stacks result i of its body.

    A pending sum stays pending, so that one collective completes all rows, unless it is large and the layout splits it
    over these axes: it is scattered in each trip, so a device stores shards of the rows and not its parts of all.
    """
    natural = scope.results[i]
    setting, split = scope.setting, dict(natural.split) | scope.canonical(v.dims)
    axes = [axis for by in split.values() for axis in by]
    stack = math.prod(setting.extents.local_shape(v.dims, natural.whole(), setting.mesh)) * v.dtype.itemsize * use.trips
    if natural.kind != "sum" or i in use.deferred or stack < LARGE_STACK or len(set(axes)) < len(axes):
        return natural
    return Sharding.of(split) if natural.partial and set(natural.partial) <= set(axes) else natural


def _cheapest(
    scope: Scope,
    init: Sequence[Var],
    attempt: Callable[[Sequence[Given]], Scope],
    finished: Callable[[Sequence[Sharding], Scope], dict[str, Program]],
) -> _Solved:
    """The carry's fixed point; a carry stays pending only if that sends no more than reducing it inside the loop."""
    fixed, built = _fixed_point(scope, init, attempt)
    programs = finished(fixed, built)
    if any(s.partial for s in fixed):
        whole = [s.whole() for s in fixed]
        other = attempt(whole)
        inside = finished(whole, other)
        if sum(map(_bytes_sent, inside.values())) < sum(map(_bytes_sent, programs.values())):
            return whole, other, inside
    return fixed, built, programs


def _fixed_point(
    scope: Scope, init: Sequence[Var], attempt: Callable[[Sequence[Given]], Scope]
) -> tuple[list[Sharding], Scope]:
    """The carry's shardings, equal at the start and the end of the body, and the body built with them.

    Each attempt gives a carry a sharding that it did not have before, or fixes it, so their number is finite: a carry
    that would take an earlier sharding again, as two that change places do, keeps that one from then on.
    """
    carry = [_as_carry(scope, v) for v in init]
    tried: list[list[Given]] = [[now] for now in carry]
    kept: set[int] = set()
    built = attempt(carry)
    while True:
        settled = list(carry)
        for i, (v, now, then) in enumerate(zip(init, carry, built.results, strict=False)):  # then the rows
            if i not in kept:
                settled[i] = next_carry(scope, v, now, then)
                kept |= {i} if settled[i] != now and settled[i] in tried[i] else set()
                tried[i].append(settled[i])
        if settled == carry:
            break
        carry = settled
        built = attempt(carry)
    fixed = [now if isinstance(now, Sharding) else Sharding() for now in carry]
    if any(isinstance(now, Eqn) for now in carry):
        built = attempt(fixed)
    return fixed, built


def next_carry(scope: Scope, init: Var, now: Given, then: Sharding) -> Given:
    """The carry's sharding for the next attempt.

    It is the sharding in which the body returned the carry, unless getting the initial value into it would send
    something.
    """
    if isinstance(now, Eqn):
        return then if scope.is_zero(init) else then.whole()
    if now.partial:
        return now if then == now else now.whole()
    return then.whole()


def lower_while(scope: Scope, eqn: Eqn, loop: While, lower: Lower) -> None:
    """Find the carry's sharding as for a scan. Body and predicate take the same sharding."""
    test, body, consts = loop.test, loop.body, loop.consts
    held = [as_given(scope, v) for v in eqn.ins[:consts]]

    def attempt(carry: Sequence[Given]) -> Scope:
        return _attempt(scope, eqn, body, [*held, *carry], lower, Body(consts, len(carry), 1))

    def finished(carry: Sequence[Sharding], built: Scope) -> dict[str, Program]:
        inputs: list[Given] = [*held, *carry]
        predicate = _finish(_build(scope, test, inputs, lower), [Sharding()], inputs, eqn)
        return {"test": predicate, "body": _finish(built, carry, inputs, eqn)}

    fixed, built, programs = _cheapest(scope, eqn.ins[consts:], attempt, finished)
    ins = _operands(scope, eqn, eqn.ins, [*held, *fixed])
    outs = _results(scope, eqn, fixed, [built])
    scope.eqns.append(eqn.replace(ins=ins, outs=outs).with_control(**programs, consts=len(ins) - len(fixed)))


def _result_sharding(scope: Scope, eqn: Eqn, arms: Mapping[str, Scope], i: int) -> Sharding:
    """The sharding of a branch's result for which its graphs send the fewest bytes, weighed by how often they run.

    A sum that only one graph computes, where the other one returns zeros, stays pending if it may in the program.
    """
    values = {key: (arm, arm.graph.outs[i]) for key, arm in arms.items()}
    computed = [natural(arm, v) for arm, v in values.values() if v not in arm.unmaterialized]
    if not computed:
        arm, v = values["yes"]
        return natural(arm, v).whole()
    zeros = all(arm.is_zero(v) for arm, v in values.values() if v in arm.unmaterialized)
    if len(computed) == 1 and zeros and computed[0].partial:
        out = eqn.outs[i]
        if scope.demand.should_defer(out, {out: computed[0].partial}, scope.setting):
            return computed[0]
    made = [sharding.whole() for sharding in computed]
    return min(made, key=lambda s: sum(eqn.runs(key, 0.5) * arm.price(v, s) for key, (arm, v) in values.items()))


def _zero_results(graph: Graph, inputs: Sequence[Given]) -> frozenset[int]:
    """The numbers of the results that are zeros."""
    zero = PendingSums(graph, zero=_zero_inputs(graph, inputs)).zero
    return frozenset(i for i, v in enumerate(graph.outs) if v in zero)


def lower_cond(scope: Scope, eqn: Eqn, branch: Cond, lower: Lower) -> None:
    """Lower both branches with the same input and output shardings. Every device takes the same branch."""
    inputs: list[Given] = [as_given(scope, v) for v in eqn.ins[1:]]
    graphs = eqn.graphs().values()
    zero = frozenset[int]().union(*(_zero_results(graph, inputs) for graph in graphs))
    use = Body(len(inputs), 0, 1, zero) if zero else None  # sums that the other graph returns may stay pending
    arms = {key: _build(scope, graph, inputs, lower, use) for key, graph in eqn.graphs().items()}
    shardings = [_result_sharding(scope, eqn, arms, i) for i in range(len(eqn.outs))]
    branches = {key: _finish(arm, shardings, inputs, eqn) for key, arm in arms.items()}
    for arm in arms.values():
        scope.def_sharding.update(arm.def_sharding)
    operands = _operands(scope, eqn, eqn.ins[1:], inputs)
    ins = (scope.get(eqn.ins[0], Sharding(), eqn), *operands)
    outs = _results(scope, eqn, shardings, arms.values())
    scope.eqns.append(eqn.replace(ins=ins, outs=outs).with_control(**branches))


def _operands(scope: Scope, eqn: Eqn, values: Sequence[Var], inputs: Sequence[Given]) -> tuple[Var, ...]:
    """The operands of a loop or branch as its bodies receive them, without those that are computed inside."""
    given = zip(values, inputs, strict=True)
    return tuple(scope.get(v, how, eqn) for v, how in given if isinstance(how, Sharding))


def _results(scope: Scope, eqn: Eqn, shardings: Sequence[Sharding], bodies: Collection[Scope]) -> tuple[Var, ...]:
    """The results in these shardings; those that are pending have the reason of the first body that has one."""
    outs = tuple(scope.define(v, s) for v, s in zip(eqn.outs, shardings, strict=True))
    for i, (v, out) in enumerate(zip(eqn.outs, outs, strict=True)):
        if out.sharding.partial:
            inner = (body.reasons.get(body.graph.outs[i]) for body in bodies)
            scope.reasons[v] = next(filter(None, inner), (CARRIED, eqn.where, eqn.backward))
    return outs
