"""Routing equals an independent reference and hand-checked cases, under every layout, and says what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.nn import moe
from tests.nn import moe_reference as ref

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "routing.json").read_text())["cases"]
ROUTER_OF = {
    "gshard_alg1_literal": "gshard_paper",
    "gshard_top2_mask_before_cumsum": "top2",
    "gshard_first_before_second": "top2",
    "gshard_top2_padding": "top2",
    "switch_top1": "switch",
    "batch_prioritised_top1": "batch_prioritised",
    "expert_choice": "expert_choice",
    "hash_mod": "hash",
}
SIX = [[0.6, 0.3, 0.1], [0.55, 0.05, 0.4], [0.7, 0.1, 0.2], [0.2, 0.5, 0.3], [0.1, 0.15, 0.75], [0.25, 0.65, 0.1]]
SLOT = md.Dim("slot", 2)


def gates(rows: Any = SIX) -> md.Tensor:
    return md.tensor(np.asarray(rows, np.float64), "token expert")


def route(x: Any = None, **options: Any) -> moe.Routing:
    given = {"tokens": "token", "experts": "expert", "capacity": SLOT, "router": "top2", **options}
    return moe.route(gates() if x is None else x, **given)


def routed(x: Any = None, **options: Any) -> Any:
    """The same as arrays; tensors among the options are inputs."""
    tensors = {name: value for name, value in options.items() if isinstance(value, md.Tensor)}
    return ref.simulated(lambda x, tensors: route(x, **{**options, **tensors}), gates() if x is None else x, tensors)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_route_equals_hand_checked_cases(case: dict[str, Any]):
    given = dict(case["inputs"])
    named: dict[str, Any] = {"capacity": md.Dim("slot", given.pop("C")), "router": ROUTER_OF[case["name"]]}
    named["tokens"], named["experts"] = "token", "expert"
    for old, new in {"rnd": "uniforms", "nonpad": "nonpadding", "token_ids": "token_ids"}.items():
        if old in given:
            named[new] = md.tensor(np.array(given.pop(old)), "token")
    if given.pop("vocab", None):
        named["experts"] = md.Dim("expert", given.pop("E"))
    probs = given.pop("probs", None)
    if probs is not None:
        got = ref.simulated(lambda x: ref.outputs(moe.assign(x, **named, **given)), gates(probs))
    else:
        got = ref.simulated(lambda: ref.outputs(moe.assign(None, **named, **given)))
    assert list(got["dispatch"].shape) == case["shape_SEC"]
    assert np.argwhere(got["dispatch"]).tolist() == case["dispatch_true"]
    weights = [[*map(int, at), got["combine"][tuple(at)]] for at in np.argwhere(got["combine"])]
    np.testing.assert_allclose(weights, case["combine_nonzero"], rtol=1e-12)
    np.testing.assert_allclose(got["aux"], case["aux"], rtol=1e-12)
    assert [got[name].tolist() for name in ("counts", "demand")] == [case["counts"], case["demand"]]
    assert got["dropped"].astype(int).tolist() == case["dropped"]


@pytest.mark.parametrize("router", ref.ROUTERS)
def test_route_equals_the_reference(router: str):
    rng = np.random.default_rng([7, ref.ROUTERS.index(router)])
    assert not ref.check(router, rng, 40)


@pytest.mark.slow
@pytest.mark.parametrize("router", ref.ROUTERS)
def test_route_equals_the_reference_on_a_thousand(router: str):
    rng = np.random.default_rng([8, ref.ROUTERS.index(router)])
    for _ in range(20):
        assert not ref.check(router, rng, 50)


LAYOUTS = [
    ("rows:2", "group:rows"), ("rows:4", "group:rows"), ("rows:8", "group:rows"),
    ("rows:8", "token:rows"), ("rows:4", "expert:rows"), ("rows:2", "slot:rows"),
    ("rows:2 cols:4", "group:rows token:cols"), ("rows:2 cols:4", "token:rows expert:cols"),
]  # fmt: skip


def drawn(router: str) -> dict[str, Any]:
    """Eight groups whose padding, coins and ties all matter."""
    rng = np.random.default_rng(3)
    case = {"router": router, "gates": ref.draw_gates(rng, 8, 13, 4), "capacity": 3, "options": {}, "extra": {}}
    case["extra"]["nonpadding"] = rng.random((8, 13)) < 0.8
    if router in ("gshard_paper", "top2"):
        case["extra"]["uniforms"] = rng.random((8, 13))
    if router in ("hash", "random"):
        case["extra"]["ids"] = rng.integers(0, 4, (8, 13))
    if router in ("top_k", "batch_prioritised"):
        case["options"] = {"k": 2}
    return case


@pytest.mark.parametrize("router", ref.ROUTERS)
def test_route_is_equal_under_every_layout(router: str):
    tensors, call = ref.arguments(drawn(router))

    def f(tensors: dict[str, md.Tensor]) -> dict[str, md.Tensor]:
        return ref.outputs(call(tensors))

    want = ref.simulated(f, tensors)
    for mesh, layout in LAYOUTS:
        got = ref.simulated(f, tensors, mesh=mesh, layout=layout)
        same(got, want, layout)


@pytest.mark.parametrize("router", ["top2", "batch_prioritised", "expert_choice"])
def test_route_run_equals_simulate(router: str):
    tensors, call = ref.arguments(drawn(router))
    want = ref.simulated(lambda tensors: ref.outputs(call(tensors)), tensors)
    compiled = md.compile(lambda tensors: ref.outputs(call(tensors)), "rows:2 cols:4", "group:rows token:cols")
    same({name: x.numpy() for name, x in compiled(tensors).items()}, want, "compiled")


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: str) -> None:
    for name in ("dispatch", "counts", "dropped", "used", "demand"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name}: {what}")
    for name in ("combine", "aux"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, err_msg=f"{name}: {what}")


@pytest.mark.parametrize("router", ref.ROUTERS)
def test_route_sends_nothing_between_groups(router: str):
    tensors, call = ref.arguments(drawn(router))

    def all_but_the_loss(tensors: dict[str, md.Tensor]) -> list[md.Tensor]:
        return [x for name, x in ref.outputs(call(tensors)).items() if name != "aux"]

    program = md.compile(all_but_the_loss, "rows:8", "group:rows").program(tensors)
    assert program.collectives == ()


@pytest.mark.parametrize("name", moe.PRESETS)
def test_route_accepts_every_preset(name: str):
    x = gates(np.random.default_rng(0).dirichlet(np.ones(16), 6))
    routing = routed(x, router=name, uniforms=md.tensor(np.full(6, 0.5), "token"))
    assert routing.counts.sum() == routing.dispatch.sum() > 0


def test_a_bias_and_groups_decide_the_choice_and_not_the_weights():
    rng = np.random.default_rng(1)
    x, bias = rng.random((6, 8)), rng.normal(size=8)
    by_bias = x + bias
    groups = np.sort(by_bias.reshape(6, 4, 2), -1).sum(-1)
    best = np.argsort(-groups, -1)[:, :2]
    allowed = (np.arange(8)[None] // 2 == best[..., None]).any(1)
    chosen = np.argsort(-np.where(allowed, by_bias, -np.inf), -1)[:, :3]
    expected = np.zeros((6, 8))
    for token, experts in enumerate(chosen):
        expected[token, experts] = 2.5 * x[token, experts] / x[token, experts].sum()
    options = {"k": 3, "normalize": "before", "groups": 4, "best_groups": 2, "scale": 2.5}
    options |= {"bias": md.tensor(bias, "expert"), "capacity": md.Dim("slot", 6)}
    np.testing.assert_allclose(routed(gates(x), router="top_k", **options).combine.sum(-1), expected)
    with pytest.raises(md.ShapeError, match="the best 1 of 4 equal groups of expert=8 must have the 3 experts"):
        routed(gates(x), router="top_k", **{**options, "best_groups": 1})


def test_presets_differ_like_the_published_code():
    x = gates([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])  # the second choice of token 1 finds expert 1 full
    np.testing.assert_allclose(routed(x, router="mesh_tf", policy="all").combine[1].sum(), 0.625)
    np.testing.assert_allclose(routed(x, router="tutel").combine[1].sum(), 0.625)
    np.testing.assert_allclose(routed(x, router="v_moe").combine[1].sum(), 0.5)
    np.testing.assert_allclose(routed(x, router="mixtral").combine[1].sum(), 0.625)
    np.testing.assert_allclose(routed(x, router="deepspeed").combine[1].sum(), 1)
    coins = md.tensor(np.array([0.1, 0.9, 0.3, 0.8, 0.05, 0.5]), "token")
    assert routed(router="gshard", uniforms=coins).dropped.tolist() == [False, False, True, False, False, False]


def test_capacity_of_formulas():
    at = moe.capacity_of
    assert at(24, 16, factor=0.1, formula="all") == 24
    assert at(128, 8) == 32 and at(10, 4) == 5 and at(10, 3) == 7  # ceil(2 S / E)
    assert at(128, 8, factor=1.25, formula="mesh_tf") == 20 and at(16, 8, factor=1.0, formula="mesh_tf") == 4
    assert at(100, 8, factor=1.0, k=1, formula="deepspeed") == 13 and at(8, 8, k=1, formula="deepspeed") == 4
    assert at(100, 8, factor=1.5, k=2, formula="tutel") == 2 * 19 and at(100, 8, factor=1.5, formula="switch") == 19
    assert at(3, 8, factor=9.0, formula="mesh_tf") == 3 and at(24, 16, formula="switch", minimum=8) == 8
    # a part of a split batch takes the whole one's capacity: its own would be another
    assert [at(s, 16, factor=1.0, k=1, formula="switch") * n for s, n in ((24, 1), (6, 4))] == [2, 4]


def test_route_with_used_equals_the_whole_batch():
    rng = np.random.default_rng(0)
    x = ref.draw_gates(rng, 1, 24, 16)[0]
    slot = md.Dim("slot", moe.capacity_of(24, 16, k=1, formula="switch"))
    whole = routed(gates(x), router="switch", capacity=slot)
    used, dropped, counts = np.zeros(16, np.int32), [], 0
    for part in np.split(x, 4):
        one = routed(gates(part), router="switch", capacity=slot, used=md.tensor(used, "expert"))
        used, counts = one.used, counts + one.counts
        dropped += one.dropped.tolist()
    assert dropped == whole.dropped.tolist() and any(dropped)
    np.testing.assert_array_equal(counts, whole.counts)
    np.testing.assert_array_equal(used, whole.used)


@pytest.mark.parametrize("router", ["gshard_paper", "top2", "switch", "top_k", "batch_prioritised", "expert_choice"])
def test_route_gradients_flow_only_through_weights(router: str):
    rng = np.random.default_rng(5)
    x = np.exp(rng.standard_normal((2, 9, 4)))
    x /= x.sum(-1, keepdims=True)
    case = {**drawn(router), "gates": x}
    case["extra"] = {name: value[:2, :9] for name, value in case["extra"].items()}
    tensors, call = ref.arguments(case)
    scale = md.tensor(rng.standard_normal((2, 9, 4, 3)), "group token expert slot")

    def loss(g: md.Tensor) -> md.Tensor:
        out = ref.outputs(call({**tensors, "gates": g}))
        return md.sum(out["combine"] * scale) + out["aux"]

    got = ref.simulated(md.grad(loss), tensors["gates"])
    step = rng.standard_normal(x.shape)
    # steps too small to change a choice: the slope along a direction, to rounding
    ahead, behind = (
        float(ref.simulated(loss, md.tensor(x + sign * 1e-6 * step, "group token expert"))) for sign in (1, -1)
    )
    np.testing.assert_allclose((got * step).sum(), (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)


def test_route_casts_narrow_gates_to_float32():
    x = md.tensor(np.array(SIX, "bfloat16"), "token expert")
    assert routed(x).combine.dtype == np.float32 and routed(x).counts.dtype == np.int32
    many = md.tensor(np.array([[1, 0]] * 600, "bfloat16"), "token expert")
    one = routed(many, router="switch", capacity=md.Dim("slot", 600))
    assert one.counts.tolist() == [600, 0]  # a bfloat16 count stops at 256


def test_route_rejects_a_uniform_equal_to_the_weight():
    x = gates([[0.875, 0.125, 0.0]] * 3)  # twice the second weight is 0.25
    coins = md.tensor(np.array([0.25, 0.25 - 1e-9, 0.5]), "token")
    assert routed(x, uniforms=coins).counts.tolist() == [2, 1, 0]
    assert routed(x, policy="threshold", threshold=0.125).counts.tolist() == [2, 0, 0]


def test_route_gives_zero_weight_choices_a_slot():
    routing = routed(gates([[1.0, 0.0], [0.0, 1.0]]), router="top2")
    assert routing.dispatch.sum() == 4 and np.count_nonzero(routing.combine) == 2


def test_route_accepts_capacity_above_tokens():
    routing = routed(router="expert_choice", capacity=md.Dim("slot", 8))
    assert routing.dispatch.shape == (6, 3, 8) and routing.counts.tolist() == [6, 6, 6]
    np.testing.assert_allclose(routing.combine.sum(-1), SIX)
    assert not routing.dispatch[..., 6:].any() and not routing.dropped.any()


def test_route_accepts_dims_as_text():
    want = routed(router="switch")
    same_as = routed(router="switch", tokens="token:6", experts=md.Dim("expert", 3), capacity="slot:2")
    np.testing.assert_array_equal(same_as.combine, want.combine)


def test_route_hash_broadcasts_ids_and_accepts_array_tables():
    x = md.broadcast(gates(), [md.Dim("group", 2), *gates().dims])
    ids = md.tensor(np.array([0, 1, 2, 3, 0, 0], np.int32), "token")
    routing = route(x, router="hash", token_ids=ids, table=moe.balanced_table([4, 3, 2, 1], 3))
    assert routing.dispatch.dims[0] == x.dims[0]
    assert routing.counts.numpy().tolist() == [[2, 1, 2]] * 2


REFUSED = {
    "router": (lambda: route(router="top3"), "unknown router 'top3'; did you mean 'top2'?"),
    "option": (lambda: route(normalise="after"), "no option 'normalise'; did you mean 'normalize'?"),
    "option of another": (lambda: route(router="switch", k=1), "'switch' has no option 'k'"),
    "no options": (lambda: route(router="expert_choice", policy="all"), "it has no options"),
    "value": (lambda: route(policy="some"), "'all', 'random', 'threshold'; got 'some'"),
    "number": (lambda: route(router="top_k", k="two"), "must be an integer from 0"),
    "too many choices": (lambda: route(router="top_k", k=4), "chooses 4 experts per token, and expert=3 has 3"),
    "uniforms": (lambda: route(policy="random"), "needs uniforms="),
    "used": (lambda: route(used=md.broadcast(0, "expert:3")), "'top2' does not support used="),
    "capacity": (lambda: route(capacity=2), "the capacity must have a size, as in md.Dim('name', 8)"),
    "capacity's name": (lambda: route(capacity="slot"), "or 'name:8'; got 'slot'"),
    "no router": (lambda: route(router=None), "unknown router None; known"),
    "a half choice": (lambda: route(router="top_k", k=1.5), "'k' must be an integer from 0; got 1.5"),
    "no threshold": (lambda: route(threshold=float("nan")), "must be a number from 0; got nan"),
    "an array": (lambda: route(np.ones((3, 2))), "gates must be a tensor, got ndarray\n  name an array's dims with"),
    "whole gates": (lambda: route(gates(SIX) > 0.5), "gates must have a float dtype, got bool"),
    "sizes": (
        lambda: route(experts=md.Dim("expert", 9)),
        "dim 'expert' has size 3 here, and size 9 was asked for",
    ),
    "one dim for two": (lambda: route(tokens="expert"), "got expert=3 for both"),
    "padding of experts": (
        lambda: route(nonpadding=md.broadcast(1, "token:6 expert:3")),
        "nonpadding may only have dims among [token=6]",
    ),
    "coins of others": (
        lambda: route(uniforms=md.broadcast(0.5, "token:7")),
        "uniforms may only have dims among [token=6]",
    ),
    "used by tokens": (
        lambda: route(router="switch", used=md.broadcast(0, "token:6")),
        "used may only have dims among [expert=3]",
    ),
    "fractions of ids": (
        lambda: route(router="random", ids=md.broadcast(0.5, "token:6")),
        "must have an integer dtype, got float",
    ),
    "ids of others": (
        lambda: route(router="random", ids=md.broadcast(0, "token:9")),
        "the token ids may only have dims among",
    ),
    "a table of two dims": (
        lambda: route(router="hash", token_ids=md.broadcast(0, "token:6"), table=md.broadcast(0, "id:4 more:2")),
        "table= must have one dim, the token id",
    ),
    "gates": (lambda: moe.route(None, tokens="t", experts="e", capacity=SLOT, router="top2"), "needs gates"),
    "experts": (lambda: moe.route(None, tokens="t", experts="e", capacity=SLOT, router="hash"), "md.Dim('e', n)"),
    "ids": (lambda: route(router="random"), "needs ids="),
    "token ids": (lambda: route(router="hash"), "needs token_ids="),
    "a dim": (lambda: route(tokens="tokens"), "no dim 'tokens'"),
    "formula": (lambda: moe.capacity_of(8, 2, formula="mesh"), "did you mean 'mesh_tf'?"),
    "factor": (lambda: moe.capacity_of(8, 2, factor=0.0), "positive factor"),
    "no factor": (lambda: moe.capacity_of(8, 2, factor=float("nan")), "positive factor"),
    "a factor in words": (lambda: moe.capacity_of(8, 2, factor="two"), "positive factor"),  # pyright: ignore
}


@pytest.mark.parametrize("call,text", REFUSED.values(), ids=REFUSED)
def test_route_errors(call: Any, text: str):
    with pytest.raises(md.ShapeError) as caught:
        call()
    assert text in str(caught.value)
