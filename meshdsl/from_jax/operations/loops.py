"""Loops, branches, rematerialisation, and functions with a derivative of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

import meshdsl as md

from ..axes import dims
from ..replay import Replay, operation
from ..steps import BodyStep, OpenedJaxpr, Value
from ..tensors import axiswise, fit, fresh, full, numbered, wholes


def _as(values: Sequence[Value], tensors: Sequence[Any], wanted: Sequence[Value], drop: int = 0) -> list[md.Tensor]:
    """The tensors of some values with the dims of others, one after the other."""
    return [
        _order(fit(t, *axiswise(v, w, drop=drop)), w, drop) for v, t, w in zip(values, tensors, wanted, strict=True)
    ]


def _order(t: md.Tensor, w: Value, drop: int) -> md.Tensor:
    if drop:
        return t
    return full(t, [*dims(w.axes), t.dims[-1]] if w.is_key else dims(w.axes))


@operation("scan")
def scan(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    p, (body,), ts = step.params, step.bodies, wholes(step, xs)
    n, m = p["num_consts"], p["num_consts"] + p["num_carry"]
    rows = [*step.ins[m:], *step.outs[p["num_carry"] :]]
    over = dims([rows[0].axes[0]])[0] if rows and p["length"] > 1 else fresh(p["length"], "trip")
    fixed = _as(step.ins[:n], ts[:n], body.ins[:n])
    start = _as(step.ins[n:m], ts[n:m], body.ins[n:m])
    slices = _as(step.ins[m:], ts[m:], body.ins[m:], drop=1)
    if p["length"] == 1:
        slices = [md.broadcast(x, [over, *x.dims]) for x in slices]

    def f(carry: Any, row: Any) -> Any:
        outs = replay.run(body, [*fixed, *carry, *row])
        return _as(body.outs[: m - n], outs[: m - n], body.ins[n:m]), outs[m - n :]

    last, ys = md.scan(f, start, slices, over=over, reverse=p["reverse"])
    ys = [md.squeeze(y, over.name) for y in ys] if p["length"] == 1 else ys
    last = _as(body.ins[n:m], last, step.outs[: m - n])
    return [
        *last,
        *(
            fit(y, *axiswise(v, w, drop_w=1))
            for v, y, w in zip(body.outs[m - n :], ys, step.outs[m - n :], strict=True)
        ),
    ]


@operation("while")
def while_loop(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (test, body), p, ts = step.bodies, step.params, wholes(step, xs)
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = body.ins[m - n :]
    of_test, of_body = _as(step.ins[:n], ts[:n], test.ins[:n]), _as(step.ins[n:m], ts[n:m], body.ins[: m - n])
    last = md.while_loop(
        lambda c: replay.run(test, [*of_test, *_as(carry, c, test.ins[n:])])[0],
        lambda c: _as(body.outs, replay.run(body, [*of_body, *c]), carry),
        _as(step.ins[m:], ts[m:], carry),
    )
    return _as(carry, last, step.outs)


@operation("cond")
def cond(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    index, *ts = wholes(step, xs)

    def branch(body: OpenedJaxpr) -> Any:
        def run(*own: md.Tensor) -> list[md.Tensor]:
            return _as(body.outs, replay.run(body, _as(step.ins[1:], own, body.ins)), step.outs)

        return run

    return md.switch(md.cast(index, "int32"), [branch(body) for body in step.bodies], *ts)


def _body(replay: Replay, step: BodyStep, body: OpenedJaxpr) -> Any:
    """The function of a body, on the operands of a step."""

    def run(*ts: md.Tensor) -> list[md.Tensor]:
        return replay.run(body, _as(step.ins, ts, body.ins))

    return run


@operation("remat", "remat2", "checkpoint")
def remat(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (body,), ts, run = step.bodies, wholes(step, xs), _body(replay, step, step.bodies[0])
    if step.params.get("policy") is not jax.checkpoint_policies.everything_saveable:
        run = md.checkpoint(run, policy=_policy(replay, step))
    outs = run(*ts)
    return _as(body.outs, outs, step.outs)


def _policy(replay: Replay, step: BodyStep) -> str | tuple[str, ...]:
    """The policy of `jax.checkpoint` as that of `md.checkpoint`; where there is no equal, nothing is saved."""
    policy, known = step.params.get("policy"), jax.checkpoint_policies
    if policy in (None, known.nothing_saveable):
        return "nothing"
    if policy in (known.dots_saveable, known.dots_with_no_batch_dims_saveable):
        return "products"
    asked = [(each, _answer(policy, each.eqn)) for each in step.bodies[0].walk() if each.eqn is not None]
    if all(answer is False or (answer is True and each.primitive == "name") for each, answer in asked):
        return tuple(sorted({each.params["name"] for each, answer in asked if answer})) or "nothing"
    name = getattr(policy, "__qualname__", str(policy)).partition(".")[0]
    replay.note(step, f"the policy {name} of jax.checkpoint has no equal here: nothing is saved")
    return "nothing"


def _answer(policy: Any, eqn: Any) -> Any:
    """True if the policy saves the results of an equation, False if not; something else if it offloads them."""
    return policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


@operation("custom_vjp_call", "custom_jvp_call")
def with_rule(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    value, *rule = step.bodies
    n, ts = len(step.outs), wholes(step, xs)

    @numbered()  # autodiff runs both passes after the function
    def fwd(*ts: md.Tensor) -> Any:
        if not rule:
            raise md.TraceError(
                f"{step.primitive} at {step.where} is differentiated a third time, and two derivatives are imported of "
                "a rule that calls a function with a rule\n  import jax.grad of the function, and differentiate that"
            )
        outs = _body(replay, step, forward)(*ts)
        return _as(forward.outs[:n], outs[:n], value.outs), _as(forward.outs[n:], outs[n:], backward.ins[:saved])

    @numbered()
    def bwd(residuals: Any, cts: Any) -> Any:
        outs = replay.run(backward, [*residuals, *_as(value.outs, cts, backward.ins[saved:])])
        moving = [v for v in step.ins if v.is_floating]
        given = iter(_as(backward.outs, outs, moving))
        return tuple(next(given) if v.is_floating else None for v in step.ins)

    forward, backward = rule or (value, value)
    saved = len(backward.ins) - n
    outs = md.custom_vjp(_body(replay, step, value), fwd, bwd)(*ts)
    return _as(value.outs, outs, step.outs)
