"""Adafactor, LAMB and LARS: hand-checked numbers, the unsplit result under every layout, one weight of many stacked."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.optim.per_tensor import norm, rms
from tests.optim.simulated import Simulated, drawn, simulated

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "optimizers.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
PARAM, GRADS = np.array(GOLDEN["param"]), [np.array(g) for g in GOLDEN["grads"]]
TINY: dict[str, Any] = {"min_dim_to_factor": 2}  # the tensors of the tests are small
WHOLE: dict[str, Any] = {"min_dim_to_factor": 1000}


def of(name: str) -> md.optim.Optimizer:
    """The optimizer that a golden case describes. Its learning rate min(1e-2, 1 / sqrt(t)) is 0.01 in both steps."""
    h = CASES[name]["hyper"]
    if name == "adam":
        return md.optim.adam(h["lr"], h["b1"], h["b2"], h["eps"])
    if name == "lamb":
        return md.optim.lamb(h["lr"], h["b1"], h["b2"], h["eps"], h["wd"])
    if name == "lars":
        return md.optim.lars(h["lr"], h["momentum"], h["wd"], trust=h["trust"], eps=h["eps"], denominator="norm_of_sum")
    return md.optim.adafactor(
        0.01,
        decay_exponent=h.get("decay", 0.8),
        clip_threshold=h["clip"],
        scale_by_parameter=h.get("param_scale", True),
        eps=h.get("eps1", 1e-30),
        min_scale=h.get("eps2", 1e-3),
        **(TINY if h.get("factored", True) else WHOLE),
    )


def problem(name: str) -> tuple[np.ndarray, list[np.ndarray], str]:
    """The parameter, its two gradients and its dims in a golden case."""
    if name == "adafactor_vector":
        return PARAM.ravel()[:5], [g.ravel()[:5] for g in GRADS], "io"
    if name == "adafactor_zero_param_eps2":
        return np.zeros_like(PARAM), GRADS, "io hidden"
    scale = CASES[name]["hyper"].get("grad_scale_step2", 1)
    return PARAM, [GRADS[0], GRADS[1] * scale], "io hidden"


@cache
def update_of(name: str) -> Simulated:
    """The update of a golden case, whose trace all layouts share."""
    return simulated(of(name).update, "one:1", "")


# io has 3 indices and hidden 4, so the first is never split evenly
@pytest.mark.parametrize("layout", ["", "io:r hidden:c", "io:c,r"])
@pytest.mark.parametrize("name", CASES)
def test_per_tensor_two_steps_equal_golden(name: str, layout: str):
    p, grads, dims = problem(name)
    layout = " ".join(rule for rule in layout.split() if rule.partition(":")[0] in dims)
    params = {"w": md.tensor(p, dims)}
    update = update_of(name).under("r:2 c:4", layout)
    state = of(name).init(params)
    for g, expected in zip(grads, CASES[name]["p_after"], strict=True):
        params, state = update({"w": md.tensor(g, dims)}, state, params)
        np.testing.assert_allclose(params["w"].numpy(), expected, rtol=1e-12, atol=1e-16)


def test_adafactor_clips_in_the_golden_case():
    p, grads, dims = problem("adafactor_clipping_active")
    sizes = []
    optimizer = md.optim.adafactor(1.0, clip_threshold=0.0, scale_by_parameter=False, **TINY)
    params = {"w": md.tensor(p, dims)}
    state = optimizer.init(params)
    for g in grads:
        after, state = optimizer.update({"w": md.tensor(g, dims)}, state, params)
        sizes.append(rms(params["w"] - after["w"], params["w"].dims).item())
    expected = CASES["adafactor_clipping_active"]["hyper"]["rms_u_before_clip"]
    np.testing.assert_allclose(sizes, expected, rtol=1e-12)


def test_per_tensor_norm_of_sharded_weight():
    traps = GOLDEN["sharded_norms"]
    x = md.tensor(PARAM, "io hidden")
    split = md.compile(lambda x: norm(x, x.dims), md.Mesh("r:2"), md.Layout("io:r"))
    program = split.program(x)
    assert program.local_shape(program.ins[0]) == (traps["padded_rows"] // traps["shards"], 4)
    np.testing.assert_allclose(split(x).item(), traps["full_norm"], rtol=1e-14)
    assert all(abs(split(x).item() - wrong) > 0.1 for wrong in traps["per_shard_param_norms_WRONG"])
    np.testing.assert_allclose(split(md.tensor(GRADS[0], "io hidden")).item(), traps["grad_norm"], rtol=1e-14)


def test_per_tensor_rms_ignores_padding():
    traps = GOLDEN["rms_with_padding_trap"]
    x = md.tensor(PARAM, "io hidden")
    split = md.compile(lambda x: rms(x, x.dims), md.Mesh("r:2"), md.Layout("io:r"))
    np.testing.assert_allclose(split(x).item(), traps["true_rms"], rtol=1e-14)
    assert abs(split(x).item() - traps["rms_if_padded_count_used"]) > 0.05


@pytest.mark.parametrize(("denominator", "key"), [("norm_of_sum", "optax_style"), ("sum_of_norms", "mlperf_style")])
def test_lars_denominators(denominator: str, key: str):
    """With learning rate 1 and no momentum, p - after is ratio (g + weight_decay p)."""
    h = CASES["lars"]["hyper"]
    optimizer = md.optim.lars(1.0, 0.0, h["wd"], trust=h["trust"], denominator=denominator)
    params, grads = {"w": md.tensor(PARAM, "io hidden")}, {"w": md.tensor(GRADS[0], "io hidden")}
    after = optimizer.update(grads, optimizer.init(params), params)[0]["w"].numpy()
    found = (PARAM - after) / (GRADS[0] + h["wd"] * PARAM)
    np.testing.assert_allclose(found, GOLDEN["lars_variant_trust_ratio"][key], rtol=1e-11)


def test_lars_error_for_unknown_denominator():
    with pytest.raises(md.MeshdslError, match="unknown denominator of LARS 'optax'; known: sum_of_norms, norm_of_sum"):
        md.optim.lars(0.1, denominator="optax")


OPTIMIZERS: dict[str, md.optim.Optimizer] = {
    "sgd": md.optim.sgd(0.1),
    "momentum": md.optim.momentum(0.1, nesterov=True),
    "adamw": md.optim.adamw(0.1, weight_decay=0.1),
    "adafactor": md.optim.adafactor(0.1, **TINY),
    "adafactor with momentum": md.optim.adafactor(0.1, momentum=0.9, max_b2=0.3, **WHOLE),
    "lamb": md.optim.lamb(0.1),
    "lars": md.optim.lars(0.1, trust=0.1, nesterov=True),
    "lars, norm of sum": md.optim.lars(0.1, weight_decay=0.1, trust=0.1, denominator="norm_of_sum"),
    "muon": md.optim.muon(0.1),
    "muon with decay": md.optim.muon(0.1, nesterov=False, rms=0.2, weight_decay=0.1, others=md.optim.sgd(0.1)),
    "clipped lamb": md.optim.with_clipping(md.optim.lamb(0.1), 0.5),
}
SHAPES = {
    "w": "io:5 hidden:7",
    "b": "hidden:7",
    "layer/w": "layer:3 hidden:7 io:5",
    "conv": "k:2 io:5 hidden:7",
    "s": "",
}
LAYOUTS = [  # nothing divides; the last two have shards that hold padding alone
    "io:r hidden:c", "hidden:r,c", "layer:r; hidden:c", "layer:c; io:r", "io:c,r",
]  # fmt: skip


def two_steps(optimizer: md.optim.Optimizer) -> Callable[..., Any]:
    """All parameters and state after two updates, from the first parameters and the gradients."""

    def run(params: Any, *grads: Any) -> Any:
        state = optimizer.init(params)
        for g in grads:
            params, state = optimizer.update(g, state, params)
        return {"params": params, "state": state}

    return run


def check_equal(found: Any, expected: Any, what: str) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        where = f"{what}: {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(y.numpy(), x.numpy(), rtol=1e-12, atol=1e-12, err_msg=where)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_per_tensor_update_is_equal_under_every_layout(name: str):
    run, tensors = two_steps(OPTIMIZERS[name]), [drawn(seed, SHAPES) for seed in range(3)]
    whole = simulated(run, "one:1", "")
    expected = whole(*tensors)
    first = list(OPTIMIZERS).index(name)
    for layout in (LAYOUTS[(first + i) % len(LAYOUTS)] for i in range(3)):  # all of them, over the optimizers
        check_equal(whole.under("r:2 c:4", layout)(*tensors), expected, layout)


def test_per_tensor_run_equals_simulate():
    run = two_steps(md.optim.adafactor(0.1, momentum=0.9, **TINY))
    tensors = [drawn(seed, SHAPES) for seed in range(3)]
    mesh, layout = "r:2 c:4", LAYOUTS[-1]
    check_equal(
        md.compile(run, md.Mesh(mesh), md.Layout(layout))(*tensors), simulated(run, "one:1", "")(*tensors), layout
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_per_tensor_scanned_layers_equal_unrolled(name: str):
    """Stacked, or as one parameter for each index: the same update of each. The global norm is that of all anyway."""
    optimizer = OPTIMIZERS[name]

    def apart(tree: dict[str, md.Tensor]) -> dict[str, md.Tensor]:
        return {str(i): x for i, x in enumerate(md.unstack(tree["w"], "layer"))}

    shapes = {"w": "layer:3 io:5 hidden:7"}
    run, tensors = two_steps(optimizer), [drawn(seed, shapes) for seed in range(3)]
    together = simulated(run, "one:1", "")(*tensors)
    alone = simulated(run, "one:1", "")(*map(apart, tensors))
    for i, x in apart(together["params"]).items():
        np.testing.assert_allclose(x.numpy(), alone["params"][i].numpy(), rtol=1e-12)


def test_per_tensor_unlisted_layer_dim_is_part_of_the_weight():
    params = drawn(0, {"w": "block:3 io:5 hidden:7"})
    for stacked, ratios in (("layer*", 1), ("block", 3), ("x b*ck", 3), ("", 1)):
        optimizer = md.optim.lamb(1.0, eps=0.0, weight_decay=0.0, stacked=stacked)
        after, _ = optimizer.update(params, optimizer.init(params), params)  # Adam's first step is the sign
        steps = np.abs(params["w"].numpy() - after["w"].numpy()).round(6)
        assert len(np.unique(steps)) == ratios, stacked


@pytest.mark.parametrize(("shape", "state"), [
    ("io:128 hidden:256", {"row": "io:128", "col": "hidden:256"}),
    ("hidden:256 io:128", {"row": "io:128", "col": "hidden:256"}),
    ("io:127 hidden:256", None),
    ("hidden:256", None),
    ("layer:512 io:128 hidden:256", {"row": "layer:512 io:128", "col": "layer:512 hidden:256"}),
    ("a:200 b:200 c:200", {"row": "a:200 b:200", "col": "a:200 c:200"}),
    ("kh:3 kw:3 io:128 hidden:128", {"row": "kh:3 kw:3 io:128", "col": "kh:3 kw:3 hidden:128"}),
])  # fmt: skip
def test_adafactor_factored_dims(shape: str, state: dict[str, str] | None):
    found = md.eval_shape(md.optim.adafactor(0.1).init, {"w": md.spec(shape)})
    expected = md.spec(shape) if state is None else {name: md.spec(dims) for name, dims in state.items()}
    assert found["v"]["w"] == expected
    assert sorted(found) == ["step", "v"]


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5, 2), (2, 5, 3, 7), (6, 6, 6), (4, 2, 4)])
def test_adafactor_factors_like_optax(sizes: tuple[int, ...]):
    """optax's decay rate at step t is one minus t to the -0.8 too, in float32."""
    shapes = {"w": " ".join(f"d{i}:{size}" for i, size in enumerate(sizes))}
    ours = md.optim.adafactor(0.1, momentum=0.9, **TINY)
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9)
    params = drawn(0, shapes)
    expected: Any = {"w": params["w"].array}
    state, their_state = ours.init(params), theirs.init(expected)
    update, their_update = simulated(ours.update, "one:1", ""), jax.jit(theirs.update)
    for seed in range(1, 4):
        grads = drawn(seed, shapes)
        params, state = update(grads, state, params)
        changes, their_state = their_update({"w": grads["w"].array}, their_state, expected)
        expected = optax.apply_updates(expected, changes)
        np.testing.assert_allclose(params["w"].numpy(), expected["w"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("rate", [0.1, md.optim.inverse_sqrt(1.0, 10)], ids=["number", "schedule"])
def test_per_tensor_update_keeps_types(dtype: str, rate: Any):
    for optimizer in (
        md.optim.adafactor(rate, momentum=0.9, **TINY), md.optim.adafactor(rate), md.optim.lamb(rate),
        md.optim.lars(rate), md.optim.lars(rate, denominator="norm_of_sum", nesterov=True),
        md.optim.muon(rate, rms=0.2, weight_decay=0.1),
    ):  # fmt: skip
        params = {"w": md.spec("a:2 b:3", dtype), "s": md.spec("", dtype)}
        state = md.eval_shape(optimizer.init, params)
        assert md.eval_shape(optimizer.update, params, state, params) == (params, state)


def test_per_tensor_narrow_weights_have_float32_moments():
    params = {"w": md.broadcast(md.cast(1, "bfloat16"), "io:1000")}
    state = md.optim.adafactor(0.1).init(params)
    assert state["v"]["w"].dtype == np.float32
    assert norm(params["w"], params["w"].dims).item() == pytest.approx(1000**0.5, rel=1e-6)


@pytest.mark.parametrize("make", [md.optim.lamb, md.optim.lars])
def test_per_tensor_zero_weight_is_updated(make: Any):
    """Its trust ratio is 1: it would never leave zero otherwise."""
    params, grads = {"w": md.tensor(np.zeros(3), "io")}, {"w": md.tensor(np.ones(3), "io")}
    after, _ = make(0.1).update(grads, make(0.1).init(params), params)
    np.testing.assert_allclose(after["w"].numpy(), -0.1, rtol=1e-5)
    same, _ = make(0.1).update(params, make(0.1).init(params), params)
    np.testing.assert_array_equal(same["w"].numpy(), 0.0)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_per_tensor_excluded_weights_do_not_adapt_or_decay(name: str):
    """A bias that neither adapts nor decays takes Adam's, or momentum's, step."""
    chosen: dict[str, Any] = {"decays": lambda path: path != "b", "adapts": lambda path: path != "b"}
    ours, plain = {
        "lamb": (md.optim.lamb(0.1, **chosen), md.optim.adam(0.1, eps=1e-6)),
        "lars": (md.optim.lars(0.1, **chosen), md.optim.momentum(0.1)),
    }[name]
    params, grads = drawn(0, SHAPES), drawn(1, SHAPES)
    found, expected = (o.update(grads, o.init(params), params)[0] for o in (ours, plain))
    np.testing.assert_allclose(found["b"].numpy(), expected["b"].numpy(), rtol=1e-12)
    assert np.abs(found["w"].numpy() - expected["w"].numpy()).max() > 1e-3


def test_adafactor_sends_only_reduced_sums():
    """A factored weight split both ways: row and column sums, and scalars; never a weight."""
    optimizer = md.optim.adafactor(0.01)
    params = {"w": md.spec("io:256 hidden:512")}
    state = md.eval_shape(optimizer.init, params)
    program = md.compile(optimizer.update, md.Mesh("r:2 c:4"), md.Layout("io:r hidden:c")).program(
        params, state, params
    )
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    assert max(c.bytes for c in program.collectives) == 256 / 2 * 4
