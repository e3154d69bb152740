"""Every layer equals a few lines of jax.numpy in float64, and so do its gradients, of inputs and parameters alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

DOUBLE = md.nn.Precision("float64", "float64", "float64")
HEADS, HEAD, GROUP = md.dims("heads:2 head:4 group:3")
X = "batch:2 length:5 model:6"
MEMORY = "batch:2 memory:7 model:6"


class Row(NamedTuple):
    """A layer, its inputs by dims, and the same layer on whole arrays: `reference(params, *inputs)`."""

    name: str
    layer: Callable[..., Any]
    inputs: tuple[str, ...]
    reference: Callable[..., Any]


def softmax_attention(q: Any, k: Any, v: Any, allowed: Any = True) -> Any:
    """[batch, length, heads, head], in the order of the paper's formula."""
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), -1), v)


def attention(p: dict[str, Any], x: Any, memory: Any = None, allowed: Any = True, turn: Any = lambda q: q) -> Any:
    memory = x if memory is None else memory
    q = turn(jnp.einsum("blm,mhd->blhd", x, p["attention/wq"]))
    k = turn(jnp.einsum("blm,mhd->blhd", memory, p["attention/wk"]))
    v = jnp.einsum("blm,mhd->blhd", memory, p["attention/wv"])
    return jnp.einsum("blhd,hdm->blm", softmax_attention(q, k, v, allowed), p["attention/wo"])


def grouped_attention(p: dict[str, Any], x: Any) -> Any:
    """Keys and values repeated for each query of their group: the definition of grouped-query attention."""
    q = jnp.einsum("blm,mhgd->blhgd", x, p["attention/wq"])
    k, v = (jnp.repeat(jnp.einsum("blm,mhd->blhd", x, p[f"attention/w{n}"]), GROUP.size, 2) for n in "kv")
    flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
    mixed = softmax_attention(flat, k, v, causal(x.shape[1]))
    return jnp.einsum("blhgd,hgdm->blm", mixed.reshape(q.shape), p["attention/wo"])


def causal(n: int) -> Any:
    return jnp.arange(n)[:, None] >= jnp.arange(n)[None, :]


def turned(q: Any) -> Any:
    """Rotary positions as multiplication by complex numbers of modulus one."""
    half = q.shape[-1] // 2
    z = q[..., :half] + 1j * q[..., half:]
    speed = 10000.0 ** (-jnp.arange(half) / half)
    z = z * jnp.exp(1j * jnp.arange(q.shape[1])[:, None, None] * speed)
    return jnp.concatenate([z.real, z.imag], -1)


def layer_norm(p: dict[str, Any], x: Any) -> Any:
    normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return normal * p["norm/scale"] + p["norm/bias"]


def feed_forward(act: Callable[..., Any], gated: bool) -> Callable[..., Any]:
    def reference(p: dict[str, Any], x: Any) -> Any:
        h = x @ p["feed_forward/w_in"] + p.get("feed_forward/b_in", 0)
        h = act(x @ p["feed_forward/w_gate"]) * h if gated else act(h)
        return h @ p["feed_forward/w_out"] + p.get("feed_forward/b_out", 0)

    return reference


def self_attention(**options: Any) -> Callable[..., Any]:
    return lambda x, *more: md.nn.multi_head_attention(x, HEADS, HEAD, precision=DOUBLE, **options)


def cross_attention(x: md.Tensor, memory: md.Tensor) -> md.Tensor:
    mask = md.broadcast(md.iota("memory:7") < 5, "batch:2 memory:7")
    return md.nn.multi_head_attention(x, HEADS, HEAD, memory=memory, mask=mask, precision=DOUBLE)


FF = md.Dim("d_ff", 8)
ROWS = [
    Row(
        "dense",
        lambda x: md.nn.dense(x, "model", "hidden:3", precision=DOUBLE),
        (X,),
        lambda p, x: x @ p["dense/w"] + p["dense/b"],
    ),
    Row(
        "dense over two dims",
        lambda x: md.nn.dense(x, "length model", "a:3 b:2", bias=False, precision=DOUBLE),
        (X,),
        lambda p, x: jnp.einsum("blm,lmxy->bxy", x, p["dense/w"]),
    ),
    Row("positions", lambda x: md.nn.learned_positions(x, precision=DOUBLE), (X,), lambda p, x: x + p["positions"]),
    Row("layer norm", lambda x: md.nn.layer_norm(x, precision=DOUBLE), (X,), layer_norm),
    Row(
        "rms norm",
        lambda x: md.nn.rms_norm(x, precision=DOUBLE),
        (X,),
        lambda p, x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["norm/scale"],
    ),
    Row("relu", lambda x: md.nn.feed_forward(x, FF, precision=DOUBLE), (X,), feed_forward(jax.nn.relu, False)),
    Row(
        "gelu and biases",
        lambda x: md.nn.feed_forward(x, FF, activation="gelu", bias=True, precision=DOUBLE),
        (X,),
        feed_forward(jax.nn.gelu, False),
    ),
    Row(
        "gated silu",
        lambda x: md.nn.feed_forward(x, FF, activation="silu", gated=True, precision=DOUBLE),
        (X,),
        feed_forward(jax.nn.silu, True),
    ),
    Row("attention", self_attention(), (X,), attention),
    Row("causal attention", self_attention(causal=True), (X,), lambda p, x: attention(p, x, allowed=causal(5))),
    Row("cross attention", cross_attention, (X, MEMORY), lambda p, x, m: attention(p, x, m, allowed=jnp.arange(7) < 5)),
    Row("rotary attention", self_attention(positions="rotary"), (X,), lambda p, x: attention(p, x, turn=turned)),
    Row("grouped attention", self_attention(causal=True, group=GROUP), (X,), grouped_attention),
    Row(
        "grouped attention without scores",
        self_attention(causal=True, group=GROUP, method="auto"),
        (X,),
        grouped_attention,
    ),
]


def drawn(row: Row) -> tuple[md.Model, dict[str, md.Tensor], list[md.Tensor]]:
    """The model, parameters that are all random (no ones or zeros), and inputs."""
    rng = np.random.default_rng(0)
    model = md.model(row.layer)

    def normal(spec: Any) -> md.Tensor:
        return md.tensor(rng.standard_normal([d.size for d in spec.dims]), spec.dims)

    specs = [md.spec(dims, "float64") for dims in row.inputs]
    return model, {path: normal(spec) for path, spec in model.specs(*specs).items()}, [normal(spec) for spec in specs]


def on_one_device(f: Callable[..., Any]) -> Any:
    return md.compile(f, md.Mesh("one:1"), md.Layout(""))


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_layer_equals_its_reference(row: Row):
    model, params, inputs = drawn(row)
    out = md.eval_shape(model, params, *inputs)
    weights = np.cos(np.arange(math.prod(d.size for d in out.dims))).reshape([d.size for d in out.dims])

    def our_loss(params: dict[str, md.Tensor], *inputs: md.Tensor) -> Any:  # weighs every element differently
        y = model(params, *inputs)
        return md.sum(y * md.tensor(weights, y.dims)), y

    def loss(params: dict[str, Any], *inputs: Any) -> Any:
        y = row.reference(params, *inputs)
        return jnp.sum(y * weights), y

    arrays = ({path: p.array for path, p in params.items()}, *(x.array for x in inputs))
    args = tuple(range(1 + len(inputs)))
    found = on_one_device(md.value_and_grad(our_loss, args, has_aux=True))(params, *inputs)
    wanted = jax.jit(jax.value_and_grad(loss, args, has_aux=True))(*arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "norm" in row.name or row.name == "attention"], ids=lambda r: r.name
)
def test_layer_custom_gradient_is_differentiable(row: Row):
    model, params, (x,) = drawn(row)
    arrays = {path: p.array for path, p in params.items()}

    def slope(x: md.Tensor) -> md.Tensor:
        return md.sum(md.square(md.grad(lambda x: md.sum(md.sin(model(params, x))))(x)))

    def reference(x: Any) -> Any:
        return jnp.sum(jnp.square(jax.grad(lambda x: jnp.sum(jnp.sin(row.reference(arrays, x))))(x)))

    found, wanted = on_one_device(md.grad(slope))(x), jax.jit(jax.grad(reference))(x.array)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-8, atol=1e-10)


def test_embedding_gradient_sums_rows():
    vocab, wide = md.dims("vocab:5 model:3")
    model = md.model(lambda ids: md.nn.embedding(ids, vocab, wide, precision=DOUBLE)[0])
    ids = md.tensor(np.array([[4, 0, 4]], np.int32), "batch length")
    params = model.init(md.random.key(0), ids)
    np.testing.assert_array_equal(model(params, ids).numpy(), params["embed"].numpy()[ids.numpy()])
    grad = md.grad(lambda p: md.sum(model(p, ids)))(params)["embed"].numpy()
    np.testing.assert_array_equal(grad, np.array([1, 0, 0, 0, 2])[:, None] * np.ones(3))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z", [0.0, 0.01])
def test_softmax_cross_entropy_equals_its_definition(smoothing: float, z: float):
    rng = np.random.default_rng(1)
    logits, targets = 5 * rng.standard_normal((4, 3, 7)), rng.integers(0, 7, (4, 3))

    def reference(logits: Any) -> Any:
        log_p = jax.nn.log_softmax(logits)
        aim = (1 - smoothing) * jax.nn.one_hot(targets, 7, dtype=logits.dtype) + smoothing / 7
        return -(aim * log_p).sum(-1) + z * jax.nn.logsumexp(logits, -1) ** 2

    def ours(logits: md.Tensor) -> md.Tensor:
        at = md.tensor(targets, "batch length")
        return md.nn.softmax_cross_entropy(logits, at, z_loss=z, label_smoothing=smoothing)

    def with_mean(f: Callable[..., Any]) -> Callable[..., Any]:
        mean = jnp.mean if f is reference else md.mean
        return lambda x: (mean(y := f(x)), y)

    found = on_one_device(md.value_and_grad(with_mean(ours), has_aux=True))(md.tensor(logits, "batch length vocab"))
    wanted = jax.jit(jax.value_and_grad(with_mean(reference), has_aux=True))(jnp.asarray(logits))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-9, atol=1e-14)


def test_softmax_cross_entropy_of_large_and_nan_logits():
    targets = md.tensor(np.array([0, 0, 0]), "batch")
    logits = md.tensor(np.array([[1e4, -1e4], [-1e4, 1e4], [np.nan, 0.0]], np.float32), "batch vocab")
    np.testing.assert_array_equal(md.nn.softmax_cross_entropy(logits, targets).numpy(), [0, 2e4, np.nan])


def test_attention_of_a_fully_masked_query_is_uniform():
    model = md.model(
        lambda x: md.nn.multi_head_attention(x, HEADS, HEAD, mask=md.iota("memory:5") < 0, precision=DOUBLE)
    )
    x = md.tensor(np.random.default_rng(0).standard_normal((2, 5, 6)), X)
    params = model.init(md.random.key(0), x)
    y = model(params, x).numpy()
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape), rtol=1e-12)


def test_attention_stores_no_scores_from_4096_keys():
    def ops(length: int, **options: Any) -> set[str]:
        model = md.model(lambda x: md.nn.multi_head_attention(x, HEADS, HEAD, **options))
        x = md.spec(f"length:{length} model:6")
        return {str(eqn.op) for eqn in md.compile(model, "", "").graph(model.specs(x), x).eqns}

    assert "attention" not in ops(4095) and "attention" in ops(4096)
    assert "attention" in ops(8, method="ring") and "attention" not in ops(4096, method="plain")
    assert "attention" not in ops(4096, dropout=0.5)


def test_rotary_positions_count_from_the_offset():
    x = md.tensor(np.random.default_rng(0).standard_normal((2, 5, 4)), "batch length head")
    wanted = md.slice(md.nn.rotary(x, "length", "head"), "length", 2, 3).numpy()
    tail = md.slice(x, "length", 2, 3)
    for offset in (2, md.tensor(np.int32(2), ""), md.tensor(np.array([2, 2], np.int32), "batch")):
        np.testing.assert_allclose(md.nn.rotary(tail, "length", "head", offset=offset).numpy(), wanted, rtol=1e-12)
    one = md.nn.rotary(md.tensor(x.numpy()[:, 4], "batch head"), None, "head", offset=4)
    np.testing.assert_allclose(one.numpy(), md.nn.rotary(x, "length", "head").numpy()[:, 4], rtol=1e-12)


@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_one_position_at_a_time_equals_all_at_once(positions: str):
    """Cached attention with grouped queries reads the positions before; the cache is longer than the text."""
    model = md.model(
        lambda x: md.nn.multi_head_attention(
            x, HEADS, HEAD, causal=True, group=GROUP, positions=positions, precision=DOUBLE
        )
    )
    x = md.tensor(np.random.default_rng(0).standard_normal((2, 5, 6)), X)
    params = model.init(md.random.key(0), x)

    def step(x: md.Tensor, cache: dict[str, md.Tensor], at: md.Tensor) -> Any:
        return md.nn.cached_attention(
            x, cache, HEADS, HEAD, position=at, mask=md.iota("memory:7") <= at, group=GROUP, positions=positions,
            precision=DOUBLE,
        )  # fmt: skip

    one = md.compile(md.model(step), "", "")
    cache = {kind: md.tensor(np.zeros((2, 7, 2, 4)), "batch memory heads head") for kind in ("k", "v")}
    wanted = model(params, x).numpy()
    for t in range(5):
        y, cache = one(params, md.tensor(x.numpy()[:, t], "batch model"), cache, md.tensor(np.int32(t), ""))
        np.testing.assert_allclose(y.numpy(), wanted[:, t], rtol=1e-10, atol=1e-12)


def test_dropout_keeps_the_mean_and_is_identity_without_a_key():
    x = md.broadcast(md.cast(1, "float32"), "a:100 b:100")
    y = md.nn.dropout(x, 0.25, md.random.key(0)).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    deviation = math.sqrt(0.25 / 0.75 / y.size)  # of the mean of y, exactly
    assert abs(y.mean() - 1) < 5 * deviation
    assert md.nn.dropout(x, 0.25, None) is x
    assert md.nn.dropout(x, 0.0, md.random.key(0)) is x
    together = md.nn.dropout(x, 0.25, md.random.key(0), shared="b").numpy()
    assert (together == together[:, :1]).all()
    np.testing.assert_array_equal(y, md.nn.dropout(x, 0.25, md.random.key(0)).numpy())


def test_precision_sets_param_compute_and_reduce_dtypes():
    precision = md.nn.Precision("float32", "bfloat16", "float32")

    def block(x: md.Tensor) -> md.Tensor:
        y = md.nn.layer_norm(x, precision=precision)
        y = md.nn.multi_head_attention(y, HEADS, HEAD, causal=True, precision=precision)
        return md.nn.feed_forward(y, FF, precision=precision)

    model, x = md.model(block), md.spec(X, "bfloat16")
    assert {spec.dtype.name for spec in model.specs(x).values()} == {"float32"}
    step = on_one_device(md.value_and_grad(lambda p, x: md.sum(md.cast(model(p, x), "float32"))))
    graph = step.graph(model.specs(x), x)
    products = [eqn for eqn in graph.eqns if str(eqn.op) == "einsum" and not eqn.backward]
    assert {v.dtype.name for eqn in products for v in eqn.ins} == {"bfloat16"}
    assert {eqn.outs[0].dtype.name for eqn in products} == {"float32"}
    grads = md.eval_shape(
        md.grad(lambda p: md.sum(md.cast(model(p, md.tensor(np.ones((2, 5, 6), jnp.bfloat16), X)), "float32"))),
        model.specs(x),
    )
    assert grads == model.specs(x)


MISTAKES = {
    "positions": lambda x: md.nn.multi_head_attention(x, HEADS, HEAD, positions="learned"),
    "causal_memory": lambda x: md.nn.multi_head_attention(x, HEADS, HEAD, memory=x, causal=True),
    "no_weights": lambda x: md.nn.multi_head_attention(x, HEADS, HEAD, method="ring", dropout=0.5),
    "odd_head": lambda x: md.nn.rotary(x, "length", md.Dim("batch", 3)),
    "activation": lambda x: md.nn.feed_forward(x, FF, activation="rellu"),
    "no_such_dim": lambda x: md.nn.dense(x, "modell", "hidden:3"),
    "dropout_rate": lambda x: md.nn.dropout(x, 1.0, md.random.key(0)),
}


def test_layer_errors_match_golden_text(golden: Callable[[str, str], None]):
    texts = []
    for name, layer in MISTAKES.items():
        with pytest.raises(md.ShapeError) as caught:
            md.model(layer).specs(md.spec("batch:3 length:5 model:6"))
        texts.append(f"{name}: {str(caught.value).rpartition(chr(10) + '  at ')[0] or caught.value}")
    golden("nn_mistakes", "\n\n".join(texts))


IGNORING: list[dict[str, Any]] = [
    {}, {"z_loss": 0.1}, {"label_smoothing": 0.2}, {"z_loss": 0.1, "label_smoothing": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("ignore", [-100, 0, -1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_cross_entropy_of_ignored_targets_is_zero(ignore: int, dtype: str):
    bad = [0.0, np.inf, -np.inf, np.nan]
    logits = np.random.default_rng(2).standard_normal((4 * len(bad), 3)).astype("float32")
    for i, value in enumerate(bad):
        logits[4 * i] = value if value else logits[4 * i]
    targets = np.array([ignore, 1, ignore, 2] * len(bad), "int32")

    def slopes(x: md.Tensor, targets: md.Tensor, ignore: int | None) -> Any:
        def loss(options: dict[str, Any], x: md.Tensor) -> Any:
            each = md.nn.softmax_cross_entropy(x, targets, "sums", ignore=ignore, **options)
            return md.sum(each), each

        return [md.value_and_grad(partial(loss, options), has_aux=True)(x) for options in IGNORING]

    def simulated(layout: str, rows: slice, ignore: int | None) -> list[np.ndarray]:
        x, at = md.cast(md.tensor(logits[rows], "row sums"), dtype), md.tensor(targets[rows], "row")
        program = md.compile(slopes, "c:2", layout, static=2).program(x, at, ignore)
        return [np.asarray(y) for y in md.simulate(program, x, at)]

    wanted = simulated("", slice(1, None, 2), None)
    for layout in ("", "row:c", "sums:c"):
        found = simulated(layout, slice(None), ignore)
        for k in range(len(IGNORING)):
            (_, each, slope), (*_, slope_of_counted) = found[3 * k : 3 * k + 3], wanted[3 * k : 3 * k + 3]
            np.testing.assert_array_equal(each[::2], 0)
            np.testing.assert_array_equal(slope[::2].astype("float32"), 0)
            counted = slope[1::2].astype("float32")
            np.testing.assert_allclose(counted, slope_of_counted.astype("float32"), rtol=1e-5, atol=1e-6)


def test_softmax_cross_entropy_ignores_nothing_that_a_dtype_lacks():
    logits = md.tensor(np.eye(3, dtype="float32"), "loss__sums vocab")
    found = md.nn.softmax_cross_entropy(logits, md.tensor(np.arange(3, dtype="uint8"), "loss__sums"))
    np.testing.assert_allclose(found.numpy(), np.full(3, np.log(np.e + 2) - 1), rtol=1e-6)
    with_none = md.nn.softmax_cross_entropy(logits, md.tensor(np.array([-100, 0, 1]), "loss__sums"), ignore=None)
    assert (with_none.numpy() > 0).all()
