"""optax's elementwise transformations equal optax under every layout; those that look across a tensor are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from tests.joined import in_groups

SHAPES = {"w": "io:3 hidden:5", "bias": "hidden:5", "scale": ""}
LAYOUT = ("r:2 c:4", "io:r hidden:c")  # neither divides
WARM_UP = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)
ELEMENTWISE: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adam with a schedule": optax.adam(WARM_UP, mu_dtype=jnp.float32),
    "adamw on matrices": optax.adamw(0.1, weight_decay=0.3, mask={"w": True, "bias": False, "scale": False}),
    "rmsprop": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "lion": optax.lion(0.1),
    "adagrad": optax.adagrad(0.1),
    "adabelief": optax.adabelief(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "radam": optax.radam(0.1),
    "yogi": optax.yogi(0.1),
    "adan": optax.adan(0.1),
    "clipped by value": optax.chain(optax.clip(0.5), optax.trace(0.9), optax.scale(-0.1)),
    "another for matrices": optax.partition(
        {"big": optax.adam(0.1), "small": optax.sgd(0.2)}, {"w": "big", "bias": "small", "scale": "small"}
    ),
    "hyperparameters in the state": optax.inject_hyperparams(optax.sgd)(learning_rate=WARM_UP, momentum=0.9),
    "nothing": optax.set_to_zero(),
}
REFUSED: dict[str, tuple[optax.GradientTransformation, str]] = {
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "optax.clip_by_global_norm .*reduce_sum of .*md.optim.with_clipping",
    ),
    "lamb": (optax.lamb(0.1), "optax.scale_by_trust_ratio .*reduce_sum.*md.optim.lamb"),
    "lars": (optax.lars(0.1), "optax.scale_by_trust_ratio .*md.optim.lars"),
    "adafactor": (optax.adafactor(0.1), "optax.clip_by_block_rms .*md.optim.adafactor"),
    "factored": (
        optax.scale_by_factored_rms(min_dim_size_to_factor=2), "optax.scale_by_factored_rms .*md.optim.adafactor"
    ),
    "scaled by the parameter": (
        optax.scale_by_param_block_rms(), "optax.scale_by_param_block_rms .*md.optim.adafactor"
    ),
    "zero_nans": (optax.zero_nans(), "optax.zero_nans .*reduce_or of"),  # its state: which tensors had one
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), "optax.adaptive_grad_clip .*write the update"),
    "novograd": (optax.novograd(0.1), "optax.scale_by_novograd .*write the update"),
    "sm3": (optax.sm3(0.1), "optax.scale_by_sm3 .*reshape of"),
    "centralize": (optax.centralize(), "optax.centralize .*reduce_sum"),
    "small and factored": (
        optax.scale_by_factored_rms(), "optax.scale_by_factored_rms .*the dims of .*md.optim.adafactor"
    ),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 2), "optax.apply_if_finite .*train_step.guard=True"),
    "add_noise": (optax.add_noise(0.1, 0.5, key=0), "optax.add_noise .*a random key.*md.random"),
    "needs the loss": (optax.polyak_sgd(), "needs more than gradients, state and parameters"),
    "steps": (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), "cond of"),
}  # fmt: skip


def drawn(seed: int) -> dict[str, md.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        name: md.tensor(rng.standard_normal([d.size for d in md.dims(dims)]), dims) for name, dims in SHAPES.items()
    }


def arrays(tree: dict[str, md.Tensor]) -> dict[str, Any]:
    return {name: x.array for name, x in tree.items()}


def stepped(theirs: optax.GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Parameters and state after one step of optax."""
    changes, state = theirs.update(grads, state, params)
    return optax.apply_updates(params, changes), state


def simulated(f: Callable[..., Any], *args: Any) -> Any:
    program = md.compile(f, md.Mesh(LAYOUT[0]), md.Layout(LAYOUT[1])).program(*args)
    specs, structure = jax.tree.flatten(md.eval_shape(f, *args))
    outs = md.simulate(program, *jax.tree.leaves(args))
    return structure.unflatten([md.tensor(x, spec.dims) for x, spec in zip(outs, specs, strict=True)])


def three_steps(theirs: optax.GradientTransformation) -> Callable[..., Any]:
    """Parameters and state after three steps of optax."""

    def steps(params: Any, grads: Any) -> tuple[Any, Any]:
        state = theirs.init(params)
        for each in grads:
            params, state = stepped(theirs, each, state, params)
        return params, state

    return steps


AFTER_THREE = in_groups(
    {name: three_steps(theirs) for name, theirs in ELEMENTWISE.items()},
    arrays(drawn(0)),
    [arrays(drawn(seed)) for seed in range(1, 4)],
    size=6,
)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_from_optax_three_steps_equal_optax(name: str):
    ours = md.optim.from_optax(ELEMENTWISE[name])
    params = drawn(0)
    state = ours.init(params)
    for seed in range(1, 4):
        params, state = simulated(ours.update, drawn(seed), state, params)
    expected, their_state = AFTER_THREE(name)
    exact = "schedule" not in name and "hyper" not in name  # a schedule is float32, and a power in it may round away
    for path in SHAPES:
        np.testing.assert_allclose(params[path].numpy(), expected[path], rtol=1e-12 if exact else 1e-6, atol=1e-12)
    for keys, wanted in jax.tree_util.tree_leaves_with_path(their_state):
        found = state["optax"][jax.tree_util.keystr(keys, simple=True, separator="/")]
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12 if exact else 1e-6, atol=1e-12)
    assert state["step"].item() == 3


@pytest.mark.parametrize(("name", "ours"), [
    ("sgd", md.optim.sgd(0.1)),
    ("nesterov", md.optim.momentum(0.1, nesterov=True)),
    ("adam", md.optim.adam(0.1)),
])  # fmt: skip
def test_from_optax_equals_md_optim(name: str, ours: md.optim.Optimizer):
    theirs = md.optim.from_optax(ELEMENTWISE[name])
    params, grads = drawn(0), drawn(1)
    expected, found = (o.update(grads, o.init(params), params)[0] for o in (ours, theirs))
    for path in SHAPES:
        np.testing.assert_allclose(found[path].numpy(), expected[path].numpy(), rtol=1e-14)


def test_from_optax_compiles_and_sends_nothing():
    optimizer = md.optim.from_optax(optax.adamw(0.1))
    params, grads = drawn(0), drawn(1)

    def run(params: Any, grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)

    compiled = md.compile(run, md.Mesh(LAYOUT[0]), md.Layout(LAYOUT[1]))
    assert not compiled.program(params, grads).collectives
    expected, found = run(params, grads), compiled(params, grads)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y.numpy(), x.numpy(), rtol=1e-14)


def test_from_optax_state_has_parameter_dims():
    params = {name: md.spec(dims, "bfloat16") for name, dims in SHAPES.items()}
    optimizer = md.optim.from_optax(optax.adam(0.1, mu_dtype="float32"))
    state = md.eval_shape(optimizer.init, params)
    assert state["optax"]["0/mu/w"] == md.spec("io:3 hidden:5")
    assert state["optax"]["0/nu/bias"] == md.spec("hidden:5", "bfloat16")
    assert state["optax"]["0/count"] == md.spec("", "int32")
    assert md.eval_shape(optimizer.update, params, state, params) == (params, state)


def test_from_optax_without_parameters():
    optimizer = md.optim.from_optax(optax.adam(0.1))
    params, state = optimizer.update({}, optimizer.init({}), {})
    assert params == {} and state["step"].item() == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_from_optax_refuses_non_elementwise_by_name(name: str):
    theirs, message = REFUSED[name]
    params = {name: md.spec(SHAPES[name]) for name in ("w", "bias")}
    with pytest.raises(md.MeshdslError, match=f"(?s){message}"):
        md.eval_shape(md.optim.from_optax(theirs).init, params)


def test_from_optax_refusal_matches_golden_text(golden: Callable[[str, str], None]):
    params = drawn(0)
    with pytest.raises(md.MeshdslError) as caught:
        md.optim.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))).init(params)
    golden("optax_refused", str(caught.value).partition("\n  at ")[0])


CYCLES = [{"init_value": 0.0, "peak_value": peak, "warmup_steps": 1, "decay_steps": 3} for peak in (0.1, 0.05)]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": optax.constant_schedule(0.1),
    "cosine_decay": optax.cosine_decay_schedule(0.1, 6, 0.1, 2.0),
    "cosine_onecycle": optax.cosine_onecycle_schedule(6, 0.3),
    "exponential_decay": optax.exponential_decay(0.1, 3, 0.5, staircase=True),
    "exponential_decay smooth": optax.exponential_decay(0.1, 3, 0.5, transition_begin=1, end_value=0.02),
    "inject_hyperparams": lambda step: 0.1 / (1 + step),
    "join": optax.join_schedules([optax.constant_schedule(0.1), optax.cosine_onecycle_schedule(4, 0.2)], [2]),
    "linear": optax.linear_schedule(0.1, 0.01, 5),
    "linear_onecycle": optax.linear_onecycle_schedule(6, 0.3),
    "piecewise_constant": optax.piecewise_constant_schedule(0.1, {2: 0.5, 4: 0.1}),
    "piecewise_interpolate cosine": optax.piecewise_interpolate_schedule("cosine", 0.1, {2: 0.5, 5: 0.1}),
    "piecewise_interpolate linear": optax.piecewise_interpolate_schedule("linear", 0.1, {2: 0.5, 5: 0.1}),
    "polynomial": optax.polynomial_schedule(0.1, 0.01, 2, 5),
    "sgdr": optax.sgdr_schedule(CYCLES),
    "warmup_constant": optax.warmup_constant_schedule(0.0, 0.1, 3),
    "warmup_cosine_decay": WARM_UP,
    "warmup_exponential_decay": optax.warmup_exponential_decay_schedule(0.0, 0.1, 2, 3, 0.5),
    "a table": lambda step: jnp.take(jnp.asarray([0.1, 0.2, 0.05]), step, mode="clip"),
    "a sorted table": lambda step: jnp.sort(jnp.stack([step, 3 - step, 1]))[1] * 0.1,
    "a branch": lambda step: jax.lax.cond(step < 2, lambda s: 0.1 * s, lambda s: 0.2 / s, step + 1.0),
    "a loop": lambda step: jax.lax.fori_loop(0, step + 1, lambda i, x: 0.5 * x + 0.01 * i, 0.1),
    "a sum of ones": lambda step: 0.1 * jnp.cumsum(jnp.ones(3))[jnp.minimum(step, 2)],
}  # fmt: skip


def test_every_schedule_of_optax_is_tried() -> None:
    ours = {name.split()[0] for name in SCHEDULES}
    theirs = {name.removesuffix("_schedule") for name in dir(optax.schedules) if name.endswith(("_schedule", "_decay"))}
    assert theirs - {""} <= ours, theirs - ours


def steps_of_optax(schedule: Callable[[Any], Any]) -> Callable[..., Any]:
    """The parameters after each of eight steps of gradient descent."""
    theirs = optax.sgd(schedule)

    def steps(params: Any, grads: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            params, state = stepped(theirs, grads, carry[1], carry[0])
            return (params, state), params

        return jax.lax.scan(step, (params, theirs.init(params)), None, 8)[1]

    return steps


BY_OPTAX = in_groups({name: steps_of_optax(f) for name, f in SCHEDULES.items()}, arrays(drawn(0)), arrays(drawn(1)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_from_optax_takes_the_steps_of_a_schedule(name: str) -> None:
    ours = md.optim.from_optax(optax.sgd(SCHEDULES[name]))
    params, grads = drawn(0), drawn(1)
    state, expected = ours.init(params), {path: np.asarray(x) for path, x in BY_OPTAX(name).items()}
    step = md.compile(ours.update, *LAYOUT)
    for i in range(8):
        params, state = step(grads, state, params)
        for path in SHAPES:
            np.testing.assert_allclose(params[path].numpy(), expected[path][i], rtol=2e-6, atol=1e-7)
    again = simulated(ours.update, grads, state, params)[0]
    for path, x in step(grads, state, params)[0].items():
        np.testing.assert_allclose(x.numpy(), again[path].numpy(), rtol=1e-6, atol=1e-8)


def test_an_array_of_numbers_does_not_meet_a_parameter_of_its_shape() -> None:
    """It would be applied to the elements of a device's own shard."""
    params = {"w": md.ones("io:3")}
    for update, text in [
        (lambda g, s, p: ({"w": g["w"] * jnp.cumsum(jnp.ones(3))}, s), r"cumsum|constant array of shape \[3\], by mul"),
        (lambda g, s, p: ({"w": jnp.sort(g["w"])}, s), "sort of"),
        (lambda g, s, p: ({"w": jnp.cumsum(jnp.ones(3))}, s), "constant array in its state"),
        (lambda g, s, p: ({"w": g["w"] * jnp.ones(5000).sum()}, s), r"reduce_sum of \[5000\]"),
    ]:
        with pytest.raises(md.MeshdslError, match=text):
            md.eval_shape(own(update).init, params)


def own(update: Callable[..., Any], init: Callable[..., Any] = lambda params: ()) -> md.optim.Optimizer:
    return md.optim.from_optax(optax.GradientTransformation(init, update))


@pytest.mark.parametrize(("update", "message"), [
    (lambda g, s, p: ({"w": g["w"] + jnp.arange(15.0).reshape(3, 5), "v": g["v"]}, s), "not elementwise"),
    (lambda g, s, p: ({"w": g["w"] * np.arange(15.0).reshape(3, 5), "v": g["v"]}, s), r"shape \[3, 5\]"),
    (lambda g, s, p: ({"w": g["w"] + g["v"], "v": g["v"]}, s), "combines elements of the parameters 'v' and 'w'"),
    (lambda g, s, p: ({"w": g["v"], "v": g["w"]}, s), "combines elements of the parameters"),
    (lambda g, s, p: ({"w": g["w"][::-1], "v": g["v"]}, s), "rev of"),
    (lambda g, s, p: ({"w": jnp.cumsum(g["w"], 0), "v": g["v"]}, s), "cumsum of"),
    (lambda g, s, p: ({"w": g["w"] / g["w"].max(), "v": g["v"]}, s), "reduce_max of"),
    (lambda g, s, p: ({"w": g["w"] @ g["w"].T @ g["w"], "v": g["v"]}, s), r"transpose of|dot_general of"),
    (lambda g, s, p: (g, {"x": jnp.zeros(3)}), "changes the structure of its state"),
])  # fmt: skip
def test_from_optax_refuses_non_elementwise_user_transformations(update: Any, message: str):
    params = {"w": md.spec("a:3 b:5"), "v": md.spec("c:3 d:5")}
    with pytest.raises(md.MeshdslError, match=message):
        md.eval_shape(own(update).init, params)


def test_from_optax_refuses_state_of_unknown_dims():
    optimizer = own(lambda g, s, p: (g, s), lambda p: {"x": jnp.zeros((3, 5))})
    with pytest.raises(md.MeshdslError, match=r"the dims of its state array 'x' of shape \(3, 5\) are unknown"):
        md.eval_shape(optimizer.init, {"w": md.spec("a:3 b:5"), "v": md.spec("b:3 a:5")})
    only = {"w": md.spec("a:3 b:5")}  # no update can tell the dims of x apart from those of the one such parameter
    assert md.eval_shape(optimizer.init, only)["optax"]["x"].dims == only["w"].dims


def test_from_optax_refuses_sums_of_parameters_whose_dims_have_another_order():
    optimizer = own(lambda g, s, p: ({"w": g["w"] + g["v"], "v": g["v"]}, s))
    with pytest.raises(md.MeshdslError, match="combines elements of the parameters 'v' and 'w'"):
        md.eval_shape(optimizer.init, {"w": md.spec("a:3 b:3"), "v": md.spec("b:3 a:3")})
