"""What a loop only returns costs one reduction after the loop, not one a trip."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.joined import calls_in_groups

Form = Callable[[md.Tensor], Any]

FORMS: dict[str, tuple[Form, tuple[str, ...]]] = {
    "mean": (md.mean, ("sum",)),
    "norm": (lambda h: md.sqrt(md.sum(md.square(h))), ("sum",)),
    "norm by einsum": (lambda h: md.sqrt(md.dot(h, h, "batch i")), ("sum",)),
    "rms": (lambda h: md.sqrt(md.mean(md.square(h))), ("sum",)),
    "rms of columns": (lambda h: md.sqrt(md.mean(md.square(h), "batch")), ("sum",)),
    "norm of the mean": (lambda h: md.sqrt(md.sum(md.square(md.mean(h, "batch")))), ("sum",)),
    "max": (md.max, ("max",)),
    "twice the min": (lambda h: 2 * md.min(h), ("min",)),
    "max/mean": (lambda h: md.max(h) / md.mean(h), ("max", "sum")),
    "mean in bfloat16": (lambda h: md.cast(md.mean(h), "bfloat16"), ("sum",)),
    "any": (lambda h: md.any(h > 3), ("sum",)),
    "a sum and its root": (lambda h: (md.sum(h * h), md.sqrt(md.sum(h * h))), ("sum",)),
    "the same twice": (lambda h: (md.sqrt(md.sum(h * h)), md.sqrt(md.sum(h * h))), ("sum",)),
    "several": (lambda h: (md.stack([md.max(h), md.sqrt(md.sum(h))], "form:2"), 1 + md.mean(h)), ("max", "sum")),
}  # fmt: skip
SPECS = md.spec("layer:6 i:8 o:8"), md.spec("batch:16 i:8")


def _loop(form: Form, **options: Any) -> Callable[[Any, Any], Any]:
    def layer(h: md.Tensor, w: md.Tensor) -> Any:
        h = md.relu(md.rename(md.einsum(h, w, out="batch o"), o="i")) - 1
        return h, form(h)

    return lambda w, x: md.scan(layer, x, w, over="layer", **options)


def _stopped(form: Form) -> Form:
    return lambda h: jax.tree_util.tree_map(md.stop_gradient, form(h))


def _gradient(loop: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(w: Any, x: Any) -> Any:
        h, rows = loop(w, x)
        return md.sum(md.square(h)), rows

    return md.value_and_grad(loss, has_aux=True)


def _remat(form: Form) -> Callable[[Any, Any], Any]:
    def layer(h: md.Tensor, w: md.Tensor) -> Any:
        h = md.relu(md.rename(md.einsum(h, w, out="batch o"), o="i")) - 1
        return h, form(h)

    return lambda w, x: md.scan(md.checkpoint(layer), x, w, over="layer")


def _nested(form: Form) -> Callable[[Any, Any], Any]:
    return lambda w, x: md.scan(lambda h, _: _loop(form)(w, h), x, None, over="step:2")


USES: dict[str, Callable[[Form], Callable[[Any, Any], Any]]] = {
    "loop": _loop,
    "backwards": lambda form: _loop(form, reverse=True),
    "gradient": lambda form: _gradient(_loop(form)),
    "gradient stopped": lambda form: _gradient(_loop(_stopped(form))),
    "gradient, rematerialised": lambda form: _gradient(_remat(form)),
    "loop in a loop": _nested,
    "gradient of a loop in a loop": lambda form: _gradient(_nested(form)),
}


def _arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    w = rng.integers(-1, 2, (6, 8, 8)) * (rng.random((6, 8, 8)) < 0.2)
    return md.tensor(w.astype("float32"), SPECS[0].dims), md.tensor(
        rng.integers(-2, 3, (16, 8)).astype("float32"), SPECS[1].dims
    )


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", FORMS)
def test_rows_are_reduced_once_after_the_loop(name: str, use: str) -> None:
    form, kinds = FORMS[name]
    step = md.compile(USES[use](form), "c:4", "batch:c")
    sent = step.program(*SPECS).collectives
    assert all(record.count == 1 for record in sent), [str(record) for record in sent]
    if "gradient" not in use:
        assert sorted(str(record.op).split("(")[1].split(")")[0] for record in sent) == sorted(kinds)
    else:
        plain = md.compile(USES[use](lambda h: ()), "c:4", "batch:c").program(*SPECS)
        assert len(sent) == len(plain.collectives) + len(kinds)


def _drawn(rng: random.Random, depth: int) -> Form:
    """A random number, or vector over i, of the layer's result."""
    if depth == 0:
        reduction = rng.choice([md.sum, md.mean, md.max, md.min])
        over = rng.choice(["batch", "batch i"])
        return lambda h: reduction(h * h, over)
    x, y = _drawn(rng, depth - 1), _drawn(rng, rng.randrange(depth))
    each: list[Form] = [
        lambda h: md.sqrt(md.abs(x(h))),
        lambda h: md.cast(md.cast(md.max(h), "bfloat16"), "float32") * x(h),
        lambda h: md.square(x(h)) + 1,
        lambda h: md.stop_gradient(x(h)),
        lambda h: md.where(x(h) > 1, x(h), 0.5),
        lambda h: md.sum(x(h)),
        lambda h: md.max(x(h)),
        lambda h: md.sum(x(h)) / (1 + md.abs(md.sum(y(h)))),
        lambda h: md.maximum(md.max(x(h)), md.sum(y(h))),
    ]
    return rng.choice(each)


SEEDS = range(12)


def _random_step(seed: int) -> Callable[[Any, Any], Any]:
    rng = random.Random(seed)
    forms = [_drawn(rng, rng.choice([1, 2, 3])) for _ in range(2)]
    use = rng.choice([use for use in USES if use != "backwards"])
    return USES[use](lambda h: tuple(form(h) for form in forms))


STEPS = {seed: _random_step(seed) for seed in SEEDS} | {name: _gradient(_loop(FORMS[name][0])) for name in FORMS}
COMPILED = {key: md.compile(step, "c:4", "batch:c") for key, step in STEPS.items()}
ON_DEVICES = calls_in_groups({key: lambda f=f: (f, _arrays()) for key, f in COMPILED.items()})


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_random_forms_are_those_of_the_loop(seed: int) -> None:
    """The loop that runs at once, without a compiler, has the results; no trip sends anything."""
    assert all(record.count == 1 for record in COMPILED[seed].program(*SPECS).collectives)
    for got, want in zip(*map(jax.tree_util.tree_leaves, (ON_DEVICES(seed), STEPS[seed](*_arrays()))), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=2e-6)


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_bitwise_those_of_the_loop(name: str) -> None:
    """These sums are exact, and roots, quotients and casts are correctly rounded."""
    for got, want in zip(*map(jax.tree_util.tree_leaves, (ON_DEVICES(name), STEPS[name](*_arrays()))), strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_rows_that_a_trip_reads_are_finished_in_the_trip() -> None:
    def clipped(h: md.Tensor, w: md.Tensor) -> Any:
        h = md.rename(md.einsum(h, w, out="batch o"), o="i")
        norm = md.sqrt(md.sum(h * h))
        return h / norm, norm

    program = md.compile(lambda w, x: md.scan(clipped, x, w, over="layer"), "c:4", "batch:c").program(*SPECS)
    assert [record.count for record in program.collectives] == [6]


def test_rows_stack_no_more_than_reductions() -> None:
    """A row that is as large as its layer is computed in the trip; a loop stacks one number for each reduction."""

    def layer(h: md.Tensor, w: md.Tensor) -> Any:
        y = md.einsum(h, w, out="batch o")
        h = md.rename(y, o="i")
        return h, (md.tanh(y), md.max(h) / md.mean(h))

    graph = md.compile(lambda w, x: md.scan(layer, x, w, over="layer"), "").graph(*SPECS)
    (loop,) = [eqn for eqn in graph.eqns if eqn.scan is not None]
    assert [len(v.dims) for v in loop.outs] == [2, 3, 1, 1]
