"""A `jax.sharding.Mesh` is a mesh, with Auto and with Explicit axes, wherever a mesh is taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.tools.compilers.verify import verify

SIZES, NAMES, LAYOUT = (2, 4), ("dp", "tp"), "batch:dp; hidden:tp"
EXPLICIT = jax.make_mesh(SIZES, NAMES)
AUTO = jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 2)
MESHES = {
    "explicit": EXPLICIT,
    "auto": AUTO,
    "mixed": jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Explicit, AxisType.Auto)),
    "backwards": jax.make_mesh(SIZES, NAMES, devices=jax.devices()[7::-1]),
    "abstract": AbstractMesh(SIZES, NAMES, axis_types=(AxisType.Explicit,) * 2),
}
X = np.arange(64, dtype=np.float32).reshape(8, 8) % 5
W = np.arange(96, dtype=np.float32).reshape(8, 12) % 3


def layer(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.relu(md.dot(x, w, "io"))


SPECS = md.spec("batch:8 io:8"), md.spec("io:8 hidden:12")


def put(array: Any, mesh: Any, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


TAKE_A_MESH: dict[str, Callable[[Any], Any]] = {
    "Mesh": lambda mesh: str(md.Mesh(mesh)),
    "Mesh of a Mesh": lambda mesh: str(md.Mesh(md.Mesh(mesh))),
    "compile": lambda mesh: str(md.compile(layer, mesh, LAYOUT).program(*SPECS)),
    "under": lambda mesh: str(md.compile(layer, "all:1").under(mesh, LAYOUT).program(*SPECS)),
    "Plan": lambda mesh: str(md.compile(layer, plan=md.Plan(mesh, LAYOUT)).program(*SPECS)),
    "search": lambda mesh: str(md.search(layer, *SPECS, mesh=mesh).best.layout),
    "search of several": lambda mesh: str(md.search(layer, *SPECS, mesh=[mesh, "all:1"]).best.layout),
    "show": lambda mesh: str(md.show(SPECS[1], LAYOUT, mesh)),
}


@pytest.mark.parametrize("place", TAKE_A_MESH)
@pytest.mark.parametrize("kind", ["explicit", "abstract"])
def test_a_mesh_of_jax_is_taken_where_a_mesh_is(place: str, kind: str) -> None:
    assert TAKE_A_MESH[place](MESHES[kind]) == TAKE_A_MESH[place]("dp:2 tp:4")


def test_a_checkpoint_is_restored_on_a_mesh_of_jax(tmp_path: Path) -> None:
    checkpoints = md.Checkpoints(tmp_path)
    checkpoints.save(1, {"w": md.tensor(W, "io hidden")})
    restored = checkpoints.restore(like={"w": SPECS[1]}, mesh=EXPLICIT, layout=md.Layout("hidden:tp"))
    assert restored.tree["w"].stored.sharding.is_equivalent_to(NamedSharding(EXPLICIT, P(None, "tp")), 2)


def test_meshes_differ_by_devices_and_by_explicit_axes() -> None:
    assert md.Mesh(AUTO) == md.Mesh("dp:2 tp:4").on(jax.devices()) != md.Mesh(EXPLICIT)
    assert md.Mesh(MESHES["backwards"]) != md.Mesh(EXPLICIT) == md.Mesh(md.Mesh(EXPLICIT))
    assert hash(md.Mesh(EXPLICIT)) == hash(md.Mesh(md.Mesh(EXPLICIT)))


@pytest.mark.parametrize("kind", MESHES)
def test_results_are_over_the_callers_mesh(kind: str) -> None:
    """Arguments that fit are taken without a copy; results enter a jit with shardings over the same mesh."""
    mesh = MESHES[kind]
    on: Any = EXPLICIT if kind == "abstract" else mesh
    compiled = md.compile(layer, mesh, LAYOUT)
    args = md.tensor(put(X, on, "dp"), "batch io"), md.tensor(put(W, on, None, "tp"), "io hidden")
    y = compiled(*args).array
    assert y.sharding == NamedSharding(on, P("dp", "tp"))
    assert str(jax.typeof(y)) == {"auto": "float32[8,12]", "mixed": "float32[8@dp,12]"}.get(kind, "float32[8@dp,12@tp]")
    stages, leaves = compiled._for(args)
    assert all(array is x.stored for array, x in zip(stages.arrays(leaves), args, strict=True))
    doubled = jax.jit(lambda y: 2 * y, in_shardings=NamedSharding(on, P("dp", "tp")))(y)
    np.testing.assert_array_equal(doubled, 2 * np.maximum(X @ W, 0))
    assert verify(compiled.lower(*SPECS).as_text(), compiled.program(*SPECS)).equal


def test_arguments_that_do_not_fit_are_resharded() -> None:
    other = jax.make_mesh((8,), ("other",))
    compiled = md.compile(layer, EXPLICIT, LAYOUT)
    for x in (X, jnp.asarray(X), put(X, EXPLICIT, None, "dp"), put(X, AUTO, "dp"), put(X, other, None, "other")):
        y = compiled(md.tensor(x, "batch io"), md.tensor(W, "io hidden"))
        np.testing.assert_array_equal(y.numpy(), np.maximum(X @ W, 0))
    auto = md.compile(layer, "rows:8", "batch:rows")  # whose axis has another name
    y = auto(md.tensor(put(X, other, "other"), "batch io"), md.tensor(W, "io hidden"))
    np.testing.assert_array_equal(y.numpy(), np.maximum(X @ W, 0))
    donating = md.compile(lambda x: x + 1, "rows:8", "batch:rows", donate=0)
    mine = put(X, other, "other")
    assert donating(md.tensor(mine, "batch io")).numpy().sum() == X.sum() + 64
    np.testing.assert_array_equal(mine, X)  # it is another array than the one that was overwritten


def test_a_dim_that_does_not_divide_stays_sharded() -> None:
    """The type of an array cannot say it, so this result alone is over Auto axes."""
    compiled = md.compile(lambda x: (x + 1, md.sum(x, "batch")), EXPLICIT, "batch:tp; io:dp")
    first, second = compiled(md.tensor(X[:7], "batch io"))
    assert first.stored.shape == (8, 8) and first.stored.sharding.spec[0] == "tp"
    assert str(jax.typeof(second.array)) == "float32[8@dp]"
    again = compiled(first)[0]
    np.testing.assert_array_equal(again.array, X[:7] + 2)
    f: Any = md.jaxify(compiled, md.spec("batch:7 io:8"))
    for call in (f, jax.jit(f)):
        np.testing.assert_array_equal(call(put(X[:7], EXPLICIT, None, "dp"))[0], X[:7] + 1)


@pytest.mark.parametrize("update", ["replicated", "sharded", md.WeightUpdate("sharded", group={"dp": 2, "tp": 2})])
def test_steps_follow_each_other_on_explicit_axes(update: Any) -> None:
    """Weights sharded in groups are over parts of an axis, which only the program's own mesh has."""

    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return w - 0.125 * md.grad(lambda w: md.sum(md.square(layer(x, w)), ("batch", "hidden")))(w)

    results = []
    for mesh in (EXPLICIT, "dp:2 tp:4"):
        compiled = md.compile(step, mesh, "batch:dp,tp", weight_update=update)
        w, x = md.tensor(put(W, EXPLICIT), "io hidden"), md.tensor(put(X, EXPLICIT, ("dp", "tp")), "batch io")
        for _ in range(2):
            w = compiled(w, x)
        results.append(w)
    np.testing.assert_array_equal(results[0].numpy(), results[1].numpy())
    if not isinstance(update, md.WeightUpdate):
        assert str(jax.typeof(results[0].array)).startswith("float32[8" + ("@" if update == "sharded" else ","))


@pytest.mark.parametrize("context", [None, EXPLICIT, AUTO, jax.make_mesh((8,), ("other",))], ids=str)
@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO, "rows:2 cols:4"], ids=str)
def test_a_mesh_that_the_caller_set_is_not_the_programs(context: Any, mesh: Any) -> None:
    compiled = md.compile(layer, mesh, "batch:rows" if isinstance(mesh, str) else LAYOUT)
    with nullcontext() if context is None else jax.set_mesh(context):
        y = compiled(md.tensor(X, "batch io"), md.tensor(W, "io hidden"))
        np.testing.assert_array_equal(y.numpy(), np.maximum(X @ W, 0))
        if context is not None and context.axis_names == ("other",):
            return  # a jax.jit looks for the shardings of its results in the mesh that was set
        np.testing.assert_array_equal(jax.jit(md.jaxify(compiled, *SPECS))(X, W), y.numpy())


@pytest.mark.parametrize("context", [False, True])
def test_inside_jax_types_are_those_of_the_callers_mesh(context: bool) -> None:
    f: Any = md.jaxify(md.compile(layer, EXPLICIT, LAYOUT), *SPECS)
    assert f.in_shardings[0] == NamedSharding(EXPLICIT, P("dp", None))
    assert f.out_shardings == NamedSharding(EXPLICIT, P("dp", "tp"))
    types = []

    def loss(f: Any) -> Callable[..., Any]:
        def of(x: Any, w: Any) -> Any:
            y = f(x, w)
            types.append(str(jax.typeof(y)))
            return jnp.sum(y * y)

        return of

    wanted = jax.grad(loss(lambda x, w: jnp.maximum(x @ w, 0)), (0, 1))(X, W)
    types.clear()
    with jax.set_mesh(EXPLICIT) if context else nullcontext():
        for x in (put(X, EXPLICIT, "dp"), put(X, EXPLICIT, None, "tp"), X):
            grads = jax.jit(jax.grad(loss(f), (0, 1)))(x, put(W, EXPLICIT, None, "tp"))
            for grad, array in zip(grads, wanted, strict=True):
                np.testing.assert_allclose(grad, array, rtol=1e-6)
            assert str(jax.typeof(grads[1])) == "float32[8,12@tp]"
            assert str(jax.typeof(grads[0])) == str(jax.typeof(x))
    assert set(types) == {"float32[8@dp,12@tp]"}


def test_jvp_and_vmap_of_a_function_on_explicit_axes() -> None:
    f: Any = md.jaxify(md.compile(layer, EXPLICIT, LAYOUT), *SPECS)
    x, w = put(X, EXPLICIT, "dp"), put(W, EXPLICIT, None, "tp")
    y, moved = jax.jit(lambda x, w: jax.jvp(f, (x, w), (x, w)))(x, w)
    assert jax.typeof(y) == jax.typeof(moved)
    np.testing.assert_array_equal(moved, 2 * np.asarray(y))
    many = jax.jit(jax.vmap(f, (0, None)))(put(np.stack([X, 2 * X]), EXPLICIT, None, "dp"), w)
    assert str(jax.typeof(many)) == "float32[2,8@dp,12@tp]"
    np.testing.assert_array_equal(many, np.stack([np.maximum(X @ W, 0), np.maximum(2 * X @ W, 0)]))


def test_operations_outside_a_trace_take_results_on_explicit_axes() -> None:
    x = md.compile(lambda x: x + 0, EXPLICIT, "batch:dp; io:tp")(md.tensor(X, "batch io"))
    assert str(jax.typeof(x.array)) == "float32[8@dp,8@tp]"
    np.testing.assert_array_equal(md.dot(x, md.rename(x, batch="other"), "io").numpy(), X @ X.T)
    np.testing.assert_array_equal(md.take(x, md.tensor([1, 2], "k"), "batch").numpy(), X[[1, 2]])
    np.testing.assert_array_equal(md.flatten(x, ("io", "batch"), "all").numpy(), X.T.ravel())


def test_a_mesh_inside_shard_map_is_refused() -> None:
    def inside(x: Any) -> Any:
        with pytest.raises(md.LayoutError, match=r"Manual, as inside jax\.shard_map"):
            md.Mesh(jax.sharding.get_abstract_mesh())
        return x

    jax.jit(jax.shard_map(inside, mesh=AUTO, in_specs=P("dp"), out_specs=P("dp")))(X)
