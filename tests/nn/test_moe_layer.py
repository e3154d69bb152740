"""The layer equals its definition token by token, by either dispatch, under every layout; what it sends is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.nn import moe
from tests.nn.moe_reference import reference, simulated

DOUBLE = md.nn.Precision("float64", "float64", "float64")
EXPERT, HIDDEN = md.dims("expert:4 expert_hidden:6")
X = "batch:4 length:8 model:6"
METHODS = ("index", "einsum")
GROUPED = (*METHODS, "grouped")  # where tokens choose


def layer(precision: md.nn.Precision = DOUBLE, expert: md.Dim = EXPERT, **options: Any) -> md.Model:
    return md.model(lambda x, *key: md.nn.moe_layer(x, expert, HIDDEN, precision=precision, **keyed(key), **options))


@pytest.mark.parametrize("router", [
    {"kind": "gshard", "capacity_factor": 1.0, "policy": "all", "z_weight": 0.1},
    {"kind": "top_k", "k": 3, "capacity_formula": "paper", "eval_capacity_factor": 0.5},
], ids=lambda options: options["kind"])  # fmt: skip
def test_values_say_what_options_say(router: dict[str, Any]) -> None:
    sending = {"exchange": "ragged", "weigh": "hidden"}
    flat = {"router": router["kind"], **{name: v for name, v in router.items() if name != "kind"}, **sending}
    values = {"router": moe.Router(**router), "dispatch": moe.TokenExchange("index", **sending)}
    one, other = (layer(**options, train=False) for options in ({"dispatch": "index", **flat}, values))
    params, x = inputs(one)
    texts = [str(md.compile(model, "rows:4", "batch:rows; expert:rows").program(params, x)) for model in (one, other)]
    assert texts[0] == texts[1]


def test_values_take_no_options_beside_them() -> None:
    with pytest.raises(md.ShapeError, match=r"(?s)router=.*has its own options.*: k\n.*md.nn.moe.Router"):
        layer(router=moe.Router("top_k"), k=1).specs(md.spec(X))
    with pytest.raises(md.ShapeError, match=r"(?s)dispatch=.*has its own options.*weigh\n.*md.nn.moe.TokenExchange"):
        layer(dispatch=moe.TokenExchange(), weigh="hidden").specs(md.spec(X))


def keyed(key: tuple[md.Tensor, ...]) -> dict[str, Any]:
    return {"key": key[0]} if key else {}


def inputs(model: md.Model, *key: md.Tensor, seed: int = 0, batch: int = 4) -> tuple[dict[str, md.Tensor], md.Tensor]:
    rng = np.random.default_rng(seed)
    x = md.tensor(rng.standard_normal((batch, 8, 6)), X.replace("batch:4", f"batch:{batch}"))
    params = {
        name: md.tensor(0.5 * rng.standard_normal([d.size for d in kind.dims]), kind.dims)
        for name, kind in model.specs(x, *key).items()
    }
    return params, x


def value_and_grads(model: md.Model) -> Callable[..., Any]:
    def loss(params: dict[str, md.Tensor], x: md.Tensor, *key: md.Tensor) -> md.Tensor:
        y, aux = model(params, x, *key)
        return md.sum(md.sin(y)) + aux

    return md.value_and_grad(loss, argnums=(0, 1))


def close(got: Any, want: Any, what: str, rtol: float = 1e-12) -> None:
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        b = dict(jax.tree_util.tree_leaves_with_path(want))[path]
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=f"{what} {path}")


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("gated", [False, True])
def test_moe_layer_equals_the_weighted_sum_of_experts(method: str, gated: bool):
    capacity = {"capacity_factor": 1.0, "capacity_formula": "switch"}
    model = layer(dispatch=method, router="top2", aux_weight=0.5, z_weight=0.25, gated=gated, **capacity)
    params, x = inputs(model)
    y, aux = simulated(model, params, x)
    w = {name.removeprefix("moe/"): value.numpy() for name, value in params.items()}
    logits = x.numpy() @ w["gate"]
    gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    told = {"k": 2, "policy": "all", "normalize": "before", "hole": False, "aux": "E2_mean"}
    losses, dropped = [], 0
    for g in range(4):
        want = reference("top2", gates[g], 2, told, {})
        losses.append(want["aux"])
        dropped += want["dropped"].sum()
        for s in range(8):
            total = np.zeros(6)
            for e in range(4):
                h = np.maximum(x.numpy()[g, s] @ (w["wi_gate"] if gated else w["wi"])[e], 0)
                h = h * (x.numpy()[g, s] @ w["wi"][e]) if gated else h
                total += want["combine"][s, e].sum() * (h @ w["wo"][e])
            np.testing.assert_allclose(y[g, s], total, rtol=1e-10, atol=1e-12)
    assert dropped
    z = np.log(np.exp(logits).sum(-1)) ** 2
    np.testing.assert_allclose(aux, 0.5 * np.mean(losses) + 0.25 * z.mean(), rtol=1e-12)


LAYOUTS = [
    ("rows:4", "batch:rows"),
    ("rows:4", "batch:rows expert:rows"),
    ("rows:2", "batch:rows expert:rows"),  # more experts than devices
    ("rows:8", "expert:rows"),  # fewer
    ("rows:2 cols:2", "batch:rows expert:rows expert_hidden:cols"),
    ("rows:2 cols:4", "batch:rows expert:rows expert_hidden:cols"),  # 6 over 4
    ("rows:2 cols:2", "batch:cols,rows expert:rows expert_batch:cols"),
    ("rows:2 cols:4", "batch:rows length:cols expert:rows"),
    ("rows:2 cols:2", "batch:rows length:cols expert:rows,cols"),
    ("rows:2 cols:2", "model:cols expert:rows"),
    ("rows:4", "gate:rows"),
    ("rows:2 cols:2", "batch:rows expert:rows slot:cols"),
]
ROUTERS = ("top2", "tutel_prioritised", "expert_choice")


@pytest.mark.parametrize("router", ROUTERS)
def test_moe_layer_is_equal_under_every_layout_and_dispatch(router: str):
    key = md.random.key(3)
    options = {"router": router, "capacity_factor": 1.0, "capacity_formula": "switch", "jitter": 0.1, "z_weight": 0.1}
    methods = METHODS if router == "expert_choice" else GROUPED
    models = {method: layer(dispatch=method, **options) for method in methods}
    params, x = inputs(models["index"], key)
    want = simulated(value_and_grads(models["einsum"]), params, x, key)
    close(simulated(value_and_grads(models["index"]), params, x, key), want, "index")
    for method in methods:
        chosen = LAYOUTS[1::4] if router != "top2" else LAYOUTS if method == "index" else LAYOUTS[1::3]
        for mesh, layout in chosen:
            got = simulated(value_and_grads(models[method]), params, x, key, mesh=mesh, layout=layout)
            close(got, want, f"{method} under {layout}")


def test_moe_layer_run_equals_simulate():
    model = layer(dispatch="index")
    params, x = inputs(model)
    want = simulated(value_and_grads(model), params, x)
    ran = md.compile(value_and_grads(model), "rows:4 cols:2", "batch:rows expert:rows expert_hidden:cols")(params, x)
    close(jax.tree.map(lambda x: x.numpy(), ran, is_leaf=lambda x: isinstance(x, md.Tensor)), want, "compiled")


def sent(model: md.Model, mesh: str, layout: str, x: str = X) -> list[Any]:
    spec = md.spec(x)
    return list(md.compile(value_and_grads(model), mesh, layout).program(model.specs(spec), spec).collectives)


@pytest.mark.parametrize(("router", "method"), [("top2", "index"), ("mixtral", "grouped"), ("expert_choice", "index")])
def test_weights_on_the_hidden_layer_give_the_same_sum(router: str, method: str):
    options = {"router": router, "dispatch": method, "capacity_factor": 1.0, "gated": True}
    params, x = inputs(layer(**options))
    want = simulated(value_and_grads(layer(**options)), params, x)
    step = value_and_grads(layer(**options, weigh="hidden"))
    for mesh, layout in [LAYOUTS[0], ("rows:2 cols:2", "batch:rows expert:rows expert_hidden:cols")]:
        close(simulated(step, params, x, mesh=mesh, layout=layout), want, f"weights on the hidden layer under {layout}")


def test_weights_on_the_hidden_layer_reduce_tokens_instead_of_slots():
    """Slots are four times the tokens here."""

    def largest(weigh: str) -> int:
        model = layer(md.nn.Precision(), router="mixtral", dispatch="einsum", weigh=weigh)
        return max(c.bytes for c in sent(model, "cols:2", "expert_hidden:cols"))

    assert largest("output") == 4 * largest("hidden") == 4 * 4 * 8 * 6 * 4


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_grouped_products_in_bfloat16_reduce_tokens_instead_of_choices(reduce: str):
    precision = md.nn.Precision("float32", "bfloat16", reduce)
    model = layer(precision, router="mixtral", dispatch="grouped", weigh="hidden")
    spec = md.spec(X)
    program = md.compile(lambda p, x: model(p, x)[0], "cols:2", "expert_hidden:cols").program(model.specs(spec), spec)
    (one,) = program.collectives
    assert one.bytes == np.dtype(reduce).itemsize * math.prod(d.size for d in spec.dims)


@pytest.mark.parametrize("method", METHODS)
def test_moe_layer_under_expert_parallelism_has_four_all_to_alls(method: str):
    model = layer(md.nn.Precision(), dispatch=method)
    found = sent(model, "rows:4", "batch:rows expert:rows")
    exchanges = [c for c in found if c.kind == "all_to_all"]
    assert [c.bytes for c in exchanges] == [4 * 4 * 6 * 4] * 4  # experts x slots x model x 4 bytes
    rest = [c for c in found if c not in exchanges]
    assert sorted((c.kind, c.bytes) for c in rest) == [("all_reduce", 4), ("all_reduce", 6 * 4 * 4)]  # loss, gate
    both = sent(model, "rows:2 cols:2", "batch:cols,rows expert:rows expert_batch:cols")
    assert sum(c.kind == "all_to_all" for c in both) == 4


@pytest.mark.parametrize(("experts", "batch", "devices"), [(6, 4, 4), (2, 4, 4), (4, 3, 2), (3, 5, 4)])
def test_moe_layer_exchanges_uneven_experts_and_groups(experts: int, batch: int, devices: int):
    model = layer(expert=md.Dim("expert", experts), dispatch="index")
    params, x = inputs(model, batch=batch)
    mesh, layout = f"rows:{devices}", "batch:rows expert:rows"
    found = md.compile(value_and_grads(model), mesh, layout).program(params, x).collectives
    both = experts % devices and batch % devices  # padded on both sides: gathered
    kinds = [c.kind for c in found if c.kind not in ("all_reduce", "reduce_scatter")]
    assert kinds == ["all_gather" if both else "all_to_all"] * 4
    got = simulated(value_and_grads(model), params, x, mesh=mesh, layout=layout)
    close(got, simulated(value_and_grads(model), params, x), layout)


@pytest.mark.parametrize("method", METHODS)
def test_dispatch_sends_the_compute_dtype(method: str):
    model = layer(md.nn.Precision(compute="bfloat16"), dispatch=method)
    found = [c for c in sent(model, "rows:4", "batch:rows expert:rows") if c.kind == "all_to_all"]
    assert [str(c.dtype) for c in found] == ["bfloat16"] * 4
    assert {c.bytes for c in found} == {4 * 4 * 6 * 2}


@pytest.mark.parametrize("router", ["top2", "expert_choice"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dispatch_methods_agree_in_narrow_dtypes(router: str, dtype: str):
    methods = METHODS if router == "expert_choice" else GROUPED
    made = {method: layer(md.nn.Precision(compute=dtype), dispatch=method, router=router) for method in methods}
    params, x = inputs(made["index"])
    narrow = {name: md.tensor(p.numpy().astype("float32"), p.dims) for name, p in params.items()}
    x = md.tensor(x.numpy().astype(dtype), x.dims)
    got = {method: simulated(value_and_grads(model), narrow, x) for method, model in made.items()}
    as_float = jax.tree.map(lambda a: np.asarray(a, np.float64), got)
    for method in methods:
        close(as_float[method], as_float["einsum"], dtype, rtol=1e-5 if dtype == "float32" else 3e-2)


def test_grouped_dispatch_sends_gradients_and_gathers_split_experts():
    """No slots are sent, and partial sums over a split hidden dim are reduced for each token, not for each choice."""
    model = layer(md.nn.Precision(), dispatch="grouped", router="mixtral", weigh="hidden", aux_weight=0.0)
    weights, gate, y = 4 * 6 * 6 * 4, 6 * 4 * 4, 4 * 8 * 6 * 4
    data = sent(model, "rows:4", "batch:rows")
    assert {c.kind for c in data} == {"all_reduce"} and sum(c.bytes for c in data) == 4 + gate + 2 * weights
    experts = [c for c in sent(model, "rows:4", "batch:rows expert:rows") if c.bytes == weights]
    assert sorted(c.kind for c in experts) == [*["all_gather"] * 2, *["reduce_scatter"] * 2]
    hidden = sent(model, "cols:2", "expert_hidden:cols")
    assert {c.kind for c in hidden} == {"all_reduce"} and max(c.bytes for c in hidden) == y


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "expert_choice"}, "for routers where tokens choose"),
        ({"exchange": "ragged"}, "dispatch='grouped' has none"),
    ],
)
def test_grouped_dispatch_refuses_what_it_cannot_do(options: dict[str, Any], message: str):
    with pytest.raises(md.ShapeError, match=message):
        layer(dispatch="grouped", **options).specs(md.spec(X))


def test_moe_layer_does_not_route_padding():
    real = np.arange(8) < np.array([[8], [5], [0], [3]])
    model = md.model(
        lambda x, real: md.nn.moe_layer(x, EXPERT, HIDDEN, nonpadding=real, z_weight=1.0, precision=DOUBLE)
    )
    x = md.tensor(np.random.default_rng(0).standard_normal((4, 8, 6)), X)
    mask = md.tensor(real, "batch length")
    params = {name: md.tensor(np.ones([d.size for d in k.dims]), k.dims) for name, k in model.specs(x, mask).items()}
    y, aux = simulated(model, params, x, mask)
    assert not y[~real].any() and y[real].any()
    far = md.tensor(np.where(real[..., None], x.numpy(), 1e3), X)
    changed, loss = simulated(model, params, far, mask)
    np.testing.assert_array_equal(changed, y)
    np.testing.assert_allclose(loss, aux)


def test_moe_layer_capacity_and_jitter_follow_train():
    options = {"capacity_factor": 0.5, "eval_capacity_factor": 4.0, "capacity_formula": "switch", "jitter": 0.5}
    training, evaluation = (layer(train=train, dispatch="index", **options) for train in (True, False))
    key = md.random.key(0)
    params, x = inputs(training, key)
    few, many = (simulated(m, params, x, key)[0] for m in (training, evaluation))
    assert (np.abs(few).sum(-1) == 0).any() and (np.abs(many).sum(-1) > 0).all()
    again = simulated(training, params, x, md.random.key(1))[0]
    assert not np.allclose(again, few)
    np.testing.assert_array_equal(simulated(evaluation, params, x)[0], many)


def test_moe_layer_under_scan_and_checkpoint():
    depth = md.Dim("layer", 3)

    def stack(remat: bool) -> md.Model:
        def block(carry: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
            x, total = carry
            y, aux = md.nn.moe_layer(x, EXPERT, HIDDEN, precision=DOUBLE)
            return x + y, total + aux

        zero = np.float64(0)
        return md.model(lambda x: md.layers(block, (x, md.tensor(zero)), over=depth, remat=remat))

    params, x = inputs(stack(False))
    want = simulated(value_and_grads(stack(False)), params, x)
    layout = {"mesh": "rows:4", "layout": "batch:rows expert:rows"}
    close(simulated(value_and_grads(stack(True)), params, x, **layout), want, "remat")
    program = md.compile(stack(False), "rows:4", "batch:rows expert:rows").program(params, x)
    assert [c.count for c in program.collectives if c.kind == "all_to_all"] == [3, 3]


def test_dispatch_auto_uses_index_for_large_masks():
    def places(tokens: int, machine: str | None = None) -> bool:
        graph = md.compile(layer(dispatch="auto"), "rows:1", "", machine=machine).graph(
            layer().specs(md.spec(f"batch:1 length:{tokens} model:6")), md.spec(f"batch:1 length:{tokens} model:6")
        )
        return any(str(eqn.op) == "inverse_index" for eqn in graph.eqns)

    # capacity is tokens / 2: tokens x 4 x tokens / 2 places
    assert moe.INDEX_FROM["cpu"] == 4096 and not places(44) and places(46)
    assert moe.INDEX_FROM["tpu"] == 2**20 and not places(724, "tpu-v5e") and places(726, "tpu-v5e")


@pytest.mark.parametrize(
    "options,text",
    [
        ({"exchange": "raged"}, "did you mean 'ragged'?"),
        ({"weigh": "hiden"}, "unknown weigh 'hiden'; did you mean 'hidden'?"),
        ({"dispatch": "indices"}, "unknown dispatch 'indices'; did you mean 'index'?"),
        ({"router": "topk"}, "unknown router 'topk'; did you mean 'top_k'?"),
        ({"activation": "relu6"}, "unknown activation 'relu6'"),
        ({"capacity_formula": "gshard"}, "unknown capacity formula 'gshard'"),
        ({"tokens": "time"}, "no dim 'time'"),
        ({"expert": 4}, "or 'name:8'; got 4"),
        ({"treshold": 0.1}, "did you mean 'threshold'?"),
    ],
)
def test_moe_layer_errors(options: dict[str, Any], text: str):
    with pytest.raises(md.ShapeError) as caught:
        layer(**options).specs(md.spec(X))
    assert text in str(caught.value)
