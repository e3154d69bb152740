"""Mistakes with layouts, meshes and arguments: a text says what was asked, what is there, and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.mlp import ILLEGAL, mlp

MLP = mlp.replace(batch=8, io=4, hidden=16)
X = md.spec("batch:8 io:4")


def two_layers(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
    h = md.relu(md.einsum(x, params["w"], out="batch hidden"))
    return md.einsum(h, params["v"], out="batch io")


PARAMS = {"w": md.spec("io:4 hidden:16"), "v": md.spec("hidden:16 io:4")}


def under(layout: Any, mesh: Any = "rows:2 cols:4", f: Any = two_layers, args: Any = (PARAMS, X)) -> Callable[[], Any]:
    return lambda: md.compile(f, mesh, layout).program(*args)


def numbers(text: str, dtype: str = "float32") -> md.Tensor:
    shape = md.dims(text)
    return md.tensor(np.ones([d.size for d in shape], dtype), shape)


def called(*args: Any) -> Callable[[], Any]:
    return lambda: md.compile(two_layers, "rows:2 cols:4", "batch:rows")(*args)


def closed_over() -> Any:
    x = md.compile(lambda x: x * 2, "rows:8", "batch:rows")(numbers("batch:8 io:4"))
    return md.compile(lambda y: x + y, "rows:8", "batch:rows").program(X)


def inside_a_trace() -> Any:
    inner = md.compile(lambda x: x * 2, "rows:8")
    return md.compile(lambda x: inner(x), "rows:8").program(X)


def placed(split: dict[str, Any]) -> Callable[[], Any]:
    return under("", f=lambda x: md.shard(x, split), args=(X,))


WEIGHTS = numbers("io:4 hidden:16"), numbers("hidden:16 io:4")
GIVEN = {"w": WEIGHTS[0], "v": WEIGHTS[1]}

MISTAKES: dict[str, Callable[[], Any]] = {
    "layout_dim_typo": under("batsh:rows"),
    "layout_dim_far": under("tokens:rows"),
    "layout_axis_typo": under("batch:row"),
    "layout_axis_twice": under("batch:rows,rows"),
    "layout_text": under("batch=rows"),
    "layout_dim_twice": under("batch:rows; batch:cols"),
    "two_dims_of_a_parameter": under("io:cols; hidden:cols"),
    "two_dims_of_a_result": under("batch:all; hidden:all", "all:8"),
    "two_dims_of_the_two_layer_model": lambda: md.compile(MLP.train_step(), *ILLEGAL).program(*MLP.specs()),
    "no_free_axis": under("batch:rows; hidden:rows", "rows:8"),
    "several_problems": under("batsh:rows; hidden:col; io:cols,cols"),
    "a_typo_and_a_conflict": under("batsh:rows; io:cols; hidden:cols"),
    "several_conflicts": under("batch:cols; io:cols; hidden:cols"),
    "override_matches_nothing": under(md.Layout("batch:rows", overrides={"moe/*": {"io": "cols"}})),
    "override_dim": under(md.Layout("batch:rows", overrides={"w": {"batch": "cols"}})),
    "override_axis": under(md.Layout("batch:rows", overrides={"w": {"io": "colls"}})),
    "shard_axis": placed({"batch": "row"}),
    "shard_axis_twice": placed({"batch": "rows", "io": "rows"}),
    "shard_dim": placed({"batsh": "rows"}),
    "too_few_devices": lambda: md.compile(two_layers, "rows:64 cols:4", "batch:rows")(GIVEN, numbers("batch:8 io:4")),
    "argument_missing": called(GIVEN),
    "argument_tree": called({"w": WEIGHTS[0]}, numbers("batch:8 io:4")),
    "argument_shape": called(GIVEN, numbers("batch:8 io:5")),
    "argument_array": called(GIVEN, np.ones((8, 4))),
    "argument_spec": called(GIVEN, X),
    "closed_over": closed_over,
    "inside_a_trace": inside_a_trace,
    "simulate_shape": lambda: md.simulate(under("batch:rows")(), np.ones((16, 4)), np.ones((4, 16)), np.ones((8, 5))),
    "mesh_text": lambda: md.Mesh("rows=2"),
    "mesh_axis_twice": lambda: md.Mesh("rows:2 rows:4"),
    "mesh_size": lambda: md.Mesh(rows=0),
    "mesh_order": lambda: md.Mesh("rows:4", device_order=[0, 1, 2]),
    "mesh_order_twice": lambda: md.Mesh("rows:4", device_order=[0, 1, 2, 2]),
    "mesh_order_unknown": lambda: md.Mesh("rows:4", device_order=[0, 1, 2, 99]).bind(),
    "donate": lambda: md.compile(two_layers, "rows:8", donate=(5,)).program(PARAMS, X),
    "overlap": lambda: md.compile(two_layers, "rows:8", overlap="all"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises((md.MeshdslError, KeyError)) as raised:
        MISTAKES[name]()
    notes = getattr(raised.value, "__notes__", [])
    golden(f"layouts/{name}", "\n".join([f"{type(raised.value).__name__}: {raised.value}", *notes]))


@pytest.mark.parametrize("name", ["\N{LATIN SMALL LETTER O WITH DIAERESIS}", "1", "", "a-b", 'a"b', "a\nb"])
def test_mesh_errors_for_axis_names(name: Any):
    """XLA aborts the whole process for names that are not ASCII."""
    with pytest.raises(md.LayoutError, match="a mesh axis is named like a Python variable"):
        md.Mesh({name: 2})
    with pytest.raises(md.LayoutError, match="a mesh axis is"):
        md.Mesh(f"{name}:2")


@pytest.mark.parametrize("size", ["\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}", "9" * 5000, "-1", "2.0"])
def test_mesh_errors_for_sizes(size: str):
    with pytest.raises(md.LayoutError, match="a mesh axis is written name:size") as caught:
        md.Mesh(f"rows:{size}")
    assert len(str(caught.value)) < 300
