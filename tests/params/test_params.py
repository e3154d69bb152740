"""Parameters: a flat dict by path, drawn independently of each other, of depth and of the layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
import pytest

import meshdsl as md

IO, HIDDEN, LAYER = md.dims("io:4 hidden:6 layer:3")
X = md.spec("batch:2 io:4")


def two_scopes(x: md.Tensor) -> md.Tensor:
    with md.scope("first"):
        h = md.einsum(x, md.param("w", [IO, HIDDEN]), out="batch hidden")
    with md.scope("second"):
        return md.einsum(h, md.param("w", [HIDDEN, IO]), out="batch io")


def block(x: md.Tensor) -> md.Tensor:
    with md.scope("block"):
        h = md.tanh(md.einsum(x, md.param("w", [IO, HIDDEN]), out="batch hidden"))
        return x + md.einsum(h, md.param("v", [HIDDEN, IO]), out="batch io")


def deep(x: md.Tensor) -> md.Tensor:
    return md.layers(block, x, over=LAYER)


def drawn(model: md.Model, *inputs: Any, seed: int = 0) -> dict[str, np.ndarray]:
    return {path: p.numpy() for path, p in model.init(md.random.key(seed), *inputs).items()}


def test_param_paths_are_scopes_and_names():
    specs = md.model(two_scopes).specs(X)
    assert specs == {"first/w": md.spec([IO, HIDDEN]), "second/w": md.spec([HIDDEN, IO])}


def test_model_specs_equal_init_types():
    for f in (two_scopes, deep):
        model = md.model(f)
        params = model.init(md.random.key(0), X)
        assert {path: p.type for path, p in params.items()} == model.specs(X)
        assert md.eval_shape(model.init, md.random.key(0), X) == model.specs(X)


def test_model_init_depends_only_on_path_and_key():
    before = drawn(md.model(two_scopes), X)

    def longer(x: md.Tensor) -> md.Tensor:
        md.param("bias", HIDDEN)
        return two_scopes(x)

    after = drawn(md.model(longer), X)
    for path in before:
        np.testing.assert_array_equal(before[path], after[path])
    assert not np.array_equal(before["first/w"], drawn(md.model(two_scopes), X, seed=1)["first/w"])
    assert not np.array_equal(before["first/w"].T, before["second/w"])


def test_model_init_is_equal_under_every_layout():
    model = md.model(deep)
    x = md.tensor(np.zeros((2, 4), np.float32), "batch io")

    def compiled(mesh: str, layout: str) -> dict[str, np.ndarray]:
        params = md.compile(model.init, md.Mesh(mesh), md.Layout(layout))(md.random.key(0), x)
        return {path: p.numpy() for path, p in params.items()}

    whole = compiled("a:1", "")
    for path, p in drawn(model, x).items():  # one operation at a time: a product of constants is rounded in between
        np.testing.assert_allclose(p, whole[path], rtol=3e-7)
    for mesh, layout in (("a:2 b:4", "io:a hidden:b"), ("a:8", "hidden:a"), ("a:3", "layer:a"), ("a:2", "batch:a")):
        for path, p in compiled(mesh, layout).items():
            np.testing.assert_array_equal(p, whole[path])


def test_model_init_compiled_creates_each_shard_on_its_device():
    model = md.model(two_scopes)
    x = md.tensor(np.zeros((2, 4), np.float32), "batch io")
    init = md.compile(model.init, md.Mesh("a:2 b:2"), md.Layout("io:a hidden:b"))
    assert init.program(md.random.key(0), x).collectives == ()
    stored = init(md.random.key(0), x)["first/w"].stored
    assert {shard.data.shape for shard in stored.addressable_shards} == {(2, 3)}


def test_layers_are_one_scan_with_stacked_parameters():
    model = md.model(deep)
    assert model.specs(X)["block/w"] == md.spec([LAYER, IO, HIDDEN])
    rng = np.random.default_rng(0)
    params = {path: rng.standard_normal([d.size for d in spec.dims]) for path, spec in model.specs(X).items()}
    x = rng.standard_normal((2, 4))
    expected = x
    for w, v in zip(params["block/w"], params["block/v"], strict=True):
        expected = expected + np.tanh(expected @ w) @ v
    given = {path: md.tensor(p.astype(np.float32), model.specs(X)[path].dims) for path, p in params.items()}
    found = model(given, md.tensor(x.astype(np.float32), "batch io"))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    graph = md.compile(model, md.Mesh("a:1"), md.Layout("")).graph(model.specs(X), X)
    assert [str(eqn.op) for eqn in graph.eqns] == ["scan"]


def test_layers_remat_has_the_same_gradient():
    def gradient(remat: bool) -> dict[str, md.Tensor]:
        model = md.model(lambda x: md.layers(block, x, over=LAYER, remat=remat))
        x = md.tensor(np.ones((2, 4), np.float32), "batch io")
        params = model.init(md.random.key(0), x)
        step = md.compile(md.grad(lambda p, x: md.sum(model(p, x))), md.Mesh("a:2"), md.Layout("hidden:a"))
        return step(params, x)

    plain, remat = gradient(False), gradient(True)
    for path in plain:
        np.testing.assert_allclose(plain[path].numpy(), remat[path].numpy(), rtol=1e-6)


def test_layers_take_slices_and_nest():
    rows = md.tensor(np.arange(6, dtype=np.float32).reshape(3, 2), "outer inner")

    def inner(x: md.Tensor, row: md.Tensor) -> md.Tensor:
        return 2 * x + row * md.param("scale", (), init=md.init.ones())

    def outer(x: md.Tensor, row: md.Tensor) -> md.Tensor:
        with md.scope("inner"):
            return md.layers(inner, x, over="inner", xs=row)

    model = md.model(lambda: md.layers(outer, md.cast(0, "float32"), over="outer", xs=rows))
    params = model.init(md.random.key(0))
    assert {path: p.dims for path, p in params.items()} == {"inner/scale": md.dims("outer:3 inner:2")}
    total = 0.0
    for row in range(6):
        total = 2 * total + row
    assert model(params).item() == total


def test_param_inside_gradients_and_branches():
    def f(x: md.Tensor) -> md.Tensor:
        w = md.param("w", "io:4", init=md.init.constant(3.0))
        return md.grad(lambda x: md.sum(w * md.square(x) * md.param("v", "io:4", init=md.init.ones())))(x)

    model, x = md.model(f), md.tensor(np.ones(4, np.float32), "io")
    params = model.init(md.random.key(0), x)
    assert list(params) == ["w", "v"]
    np.testing.assert_array_equal(model(params, x).numpy(), [6, 6, 6, 6])


def test_model_passes_static_arguments_and_keywords():
    def f(x: md.Tensor, wide: bool, *, times: int) -> md.Tensor:
        assert isinstance(wide, bool) and isinstance(times, int)
        return x * md.param("wide" if wide else "narrow", "io:4") * times

    model = md.model(f)
    assert list(model.specs(X, True, times=2)) == ["wide"]
    params = model.init(md.random.key(0), X, False, times=2)
    assert list(params) == ["narrow"]
    assert model(params, md.tensor(np.ones((2, 4), np.float32), "batch io"), False, times=2).shape == (2, 4)


# Statistics: with n draws a sample mean is within 5 deviations of it, and a sample variance within 5 of its own.
DIMS = md.dims("a:40 b:50 c:5")
UNIFORM = 1.8  # kurtosis
NORMAL = 3.0
TRUNCATED = 2.3685  # of the normal cut at two deviations
INITS = {
    "normal": (md.init.normal(0.5, mean=2.0), 2.0, 0.25, NORMAL),
    "uniform": (md.init.uniform(-1.0, 3.0), 1.0, 16 / 12, UNIFORM),
    "truncated_normal": (md.init.truncated_normal(2.0), 0.0, 4 * 0.774134, TRUNCATED),
    "lecun": (md.init.lecun("a"), 0.0, 1 / 40, NORMAL),
    "he": (md.init.he("a c", distribution="uniform"), 0.0, 2 / 200, UNIFORM),
    "glorot": (md.init.glorot("a", "b"), 0.0, 2 / 90, UNIFORM),
    "truncated scaling": (md.init.lecun("b", distribution="truncated_normal"), 0.0, 1 / 50, TRUNCATED),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", INITS)
def test_init_moments(name: str, dtype: str):
    init, mean, variance, kurtosis = INITS[name]
    x = init(md.random.key(3), DIMS, dtype)
    assert x.type == md.spec(DIMS, dtype)
    values = x.numpy().astype(np.float64)
    n = values.size
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / n)
    assert abs(values.var() - variance) < 5 * variance * math.sqrt((kurtosis - 1) / n)


def test_init_truncated_normal_stays_within_bound():
    values = md.init.truncated_normal(2.0, mean=1.0, bound=1.5)(md.random.key(0), DIMS, "float32").numpy()
    assert np.abs(values - 1).max() <= 3.0 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32"])
def test_init_constant_has_the_requested_dtype(dtype: str):
    for init, value in ((md.init.zeros(), 0), (md.init.ones(), 1), (md.init.constant(2), 2)):
        x = init(md.random.key(0), DIMS, dtype)
        assert x.type == md.spec(DIMS, dtype)
        assert (x.numpy() == value).all()


def test_init_narrow_values_are_rounded_float32():
    wide = md.init.normal()(md.random.key(0), DIMS, "float32")
    narrow = md.init.normal()(md.random.key(0), DIMS, "bfloat16")
    np.testing.assert_array_equal(narrow.numpy(), md.cast(wide, "bfloat16").numpy())


def test_init_normal_equals_jax():
    ours = md.init.normal()(md.random.key(7), DIMS, "float32").numpy()
    np.testing.assert_array_equal(ours, jax.random.normal(jax.random.key(7), (40, 50, 5), "float32"))


def leak() -> None:
    md.model(two_scopes).specs(X)
    md.param("w", "io:4")


def wrong_parameters() -> None:
    model = md.model(two_scopes)
    params = model.init(md.random.key(0), X)
    given = {"first/w": md.cast(params["first/w"], "float64"), "secnd/w": params["second/w"]}
    model(given, md.tensor(np.zeros((2, 4), np.float32), "batch io"))


def array_for_a_parameter() -> None:
    model = md.model(lambda x: x * md.param("w", "io:4"))
    wrong: Any = {"w": np.zeros(4)}
    model(wrong, md.tensor(np.zeros((2, 4), np.float32), "batch io"))


MISTAKES: dict[str, Callable[[], Any]] = {
    "made twice": lambda: md.model(lambda: (md.param("w", "a:2"), md.param("w", "a:2"))).specs(),
    "made twice by layers": lambda: md.model(
        lambda x: md.layers(lambda x: x * md.param("w", "io:4"), x * md.param("w", "io:4"), over=LAYER)
    ).specs(X),
    "outside a model": leak,
    "scope outside a model": lambda: md.scope("a").__enter__(),
    "layers outside a model": lambda: md.layers(lambda x: x, 0.0, over=LAYER),
    "bad name": lambda: md.model(lambda: md.param("my weight", "a:2")).specs(),
    "no size": lambda: md.model(lambda: md.param("w", "a")).specs(),
    "same dim twice": lambda: md.model(lambda: md.param("w", "a:2 a:3")).specs(),
    "wrong parameters": wrong_parameters,
    "array for a parameter": array_for_a_parameter,
    "not a dict": lambda: md.model(two_scopes)(cast(Any, md.tensor([1.0], "io")), 0),
    "init of other dims": lambda: md.model(
        lambda: md.param("w", "a:2", init=lambda key, dims, dtype: md.iota("b:2", dtype))
    ).init(md.random.key(0)),
    "layer changes dims": lambda: md.model(
        lambda x: md.layers(lambda x: md.einsum(x, md.param("w", [IO, HIDDEN]), out="batch hidden"), x, over=LAYER)
    ).specs(X),
    "layers without a size": lambda: md.model(lambda x: md.layers(lambda x: x, x, over="layer")).specs(X),
    "fan of another dim": lambda: md.model(lambda: md.param("w", "io:4", init=md.init.he("oi"))).init(md.random.key(0)),
    "no fan": lambda: md.init.variance_scaling(2.0),
    "no such distribution": lambda: md.init.lecun("io", distribution="gaussian"),
}


def test_param_errors_match_golden_text(golden: Callable[[str, str], None]):
    texts = []
    for name, mistake in MISTAKES.items():
        with pytest.raises(md.MeshdslError) as caught:
            mistake()
        message, _, line = str(caught.value).rpartition("\n  at ")
        assert line.startswith("tests/params/test_params.py:"), f"{name}: {caught.value}"
        message = re.sub(r"(test_params.py):[0-9]+", r"\1:LINE", message)
        texts.append(f"{type(caught.value).__name__}: {message}")
    golden("params_mistakes", "\n\n".join(texts))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float64"])
def test_initial_values_of_every_float_are_drawn_in_float32_or_wider(dtype: str):
    draw = md.init.normal(1.0)
    wide = draw(md.random.key(0), md.dims("io:64"), "float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(draw(md.random.key(0), md.dims("io:64"), dtype).numpy(), md.cast(wide, dtype).numpy())
