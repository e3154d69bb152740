"""The update of a weight is sharded over two dims if no single one is long enough (Xu et al., 2020)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md


def step(w: md.Tensor, m: md.Tensor, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    grad = md.grad(lambda w: md.sum(md.square(md.einsum(x, w, out="batch c d"))))(w)
    m = 2 * m + grad
    return w - m, m


def program(w: str, devices: int, **options: Any) -> md.Program:
    compiled = md.compile(step, f"all:{devices}", "batch:all", weight_update=md.WeightUpdate("sharded", **options))
    return compiled.program(md.spec(w), md.spec(w), md.spec(f"batch:{devices} a:3 b:3"))


def test_the_two_parts_of_an_axis_shard_two_dims_without_padding():
    found = program("a:3 b:3 c:8 d:8", 32)
    assert list(found.mesh.axes) == ["all.outer", "all.inner"]
    momentum = found.ins[1]
    assert 32 * found.local_bytes(momentum) == 9 * 64 * 4  # on one dim, of 8: four times as much
    grouped = program("a:3 b:3 c:8 d:8", 32, group="all")  # a group that is given stays as it is
    assert str(grouped.mesh) == "all:32" and 32 * grouped.local_bytes(grouped.ins[1]) == 4 * 9 * 64 * 4


@pytest.mark.parametrize(("w", "devices"), [("a:3 b:3 c:64 d:8", 32), ("a:3 b:3 c:4 d:8", 4)])
def test_an_axis_stays_whole_where_a_dim_is_long_enough(w: str, devices: int):
    assert str(program(w, devices).mesh) == f"all:{devices}"


def test_results_are_those_of_the_replicated_update():
    rng = np.random.default_rng(0)
    w, m = (md.tensor(rng.integers(-2, 3, (3, 3, 2, 4)), "a b c d") for _ in range(2))
    args = [md.cast(each, "float32") for each in (w, m, md.tensor(rng.integers(-2, 3, (8, 3, 3)), "batch a b"))]
    replicated, sharded = (
        md.compile(step, "all:8", "batch:all", weight_update=mode) for mode in ("replicated", "sharded")
    )
    assert "all.outer" in str(sharded.program(*args).mesh)
    for a, b in zip(replicated(*args), sharded(*args), strict=True):
        assert np.array_equal(a.numpy(), b.numpy())


def test_auto_is_never_slower_than_either_mode():
    def step(ws: dict[str, md.Tensor], ms: dict[str, md.Tensor], x: md.Tensor) -> tuple[Any, Any]:
        def loss(ws: dict[str, md.Tensor]) -> md.Tensor:
            return md.sum(md.square(md.einsum(x, ws["w"], out="batch c d"))) + md.sum(
                md.square(md.einsum(x, ws["v"], out="batch e"))
            )

        grads = md.grad(loss)(ws)
        ms = {name: 2 * ms[name] + grads[name] for name in ws}
        return {name: ws[name] - ms[name] for name in ws}, ms

    weights = {"w": md.spec("a:16 b:3 c:64 d:64"), "v": md.spec("a:16 b:3 e:8")}

    def seconds(mode: str, **machine: Any) -> float:
        update = md.WeightUpdate(mode, bucket_bytes=0 if machine else None)
        compiled = md.compile(step, "all:8", "batch:all", weight_update=update, **machine)
        return compiled.cost(weights, weights, md.spec("batch:8 a:16 b:3"), machine="tpu-v3").seconds

    assert seconds("auto", machine="tpu-v3") <= min(map(seconds, ("replicated", "sharded")))
