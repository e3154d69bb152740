"""Names and layouts from annotations: boxes, variables, named arrays, shardings and constraints."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshdsl as md

X, UP, DOWN = jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones((6, 4))
MESH = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    """As `flax.linen.Partitioned`."""

    value: Any
    names: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Axis:
    name: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named:
    """As `haliax.NamedArray`."""

    array: Any
    axes: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Variable:
    """As `flax.nnx.Variable`."""

    value: Any
    words: Any = dataclasses.field(metadata={"static": True})

    def get_metadata(self):
        return {"out_sharding": self.words}


def loss(params, x):
    up, down = jax.tree.leaves(params)
    return jnp.mean((jnp.tanh(x @ up) @ down - x) ** 2)


@pytest.mark.parametrize(
    "box", [Box, Variable, lambda x, names: Named(x, tuple(map(Axis, names)))], ids=["linen", "nnx", "haliax"]
)
def test_containers_name_dims_and_end_paths(box):
    m = md.from_jax(loss, {"a": box(UP, ("embed", "mlp")), "b": box(DOWN, ("mlp", "embed"))}, X, names={"x": "batch ."})
    assert m.dims == {"embed": 4, "mlp": 6, "batch": 8}
    with pytest.raises(md.ShapeError, match=r"params/a has the shape \(4, 6\)"):
        m.tensors({"a": box(DOWN, ("embed", "mlp")), "b": box(DOWN, ("mlp", "embed"))}, X)
    assert "nobody named" not in str(m) and not m.layout


def test_hints_that_the_function_contradicts_are_dropped_with_a_note():
    params = {"a": Box(UP, ("embed", "embed")), "b": Box(DOWN, (None, "out"))}
    text = str(md.from_jax(loss, params, X, names={"x": "batch model"}))
    assert "dims model:4 embed:6 batch:8" in text
    assert "params/a, axis 0, is annotated embed, and is model; the annotation is not used" in text


def test_axes_of_a_mesh_propose_a_layout():
    def spec(shape, *axes):
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(MESH, PartitionSpec(*axes)))

    def constrained(params, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec("data")))
        return loss(params, x)

    params = {"a": spec((4, 6), "data", "model"), "b": spec((6, 4), "model", "data")}
    m = md.from_jax(constrained, params, X, names={"x": "batch model", "*/a": "model d_ff"})
    assert m.layout == "batch:data; d_ff:model; params:data"
    assert "shardings in the code, as a layout: batch:data; d_ff:model; params:data" in str(m)
    assert md.compile(md.value_and_grad(m), "data:2 model:2", m.layout).program(*m.specs).collectives


def test_a_word_names_a_dim_unless_a_mesh_has_it():
    params = {"a": Box(UP, ("data", "hidden")), "b": DOWN}
    plain = md.from_jax(loss, params, X, names={"x": "batch ."})
    assert plain.dims == {"data": 4, "hidden": 6, "batch": 8} and not plain.layout
    sharded = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(MESH, PartitionSpec("data")))
    m = md.from_jax(loss, params, sharded, names={"x": "batch ."})
    assert m.dims == {"a_0": 4, "hidden": 6, "batch": 8} and m.layout == "batch:data; params:data"
