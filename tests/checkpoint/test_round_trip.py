"""A checkpoint saved under one mesh and layout is restored under any other, bit for bit; no padding is stored."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import jax
import numpy as np
import pytest

import meshdsl as md

from . import trees

Tree = dict[str, md.Tensor]


def total_bytes(values: object) -> int:
    return sum(v.nbytes for v in jax.tree_util.tree_leaves(values))


@pytest.mark.parametrize("seed", range(12))
def test_restore_from_any_layout_to_any_other(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    specs = trees.specs(seed)
    values = trees.values_for(specs, seed)
    tree = trees.tensors(specs, values, *trees.random_place(draw))
    with md.Checkpoints(tmp_path, chunk_bytes=draw.choice([1, 16, 64, 4 << 20])) as checkpoints:
        checkpoints.save(seed, tree)
        for _ in range(3):
            mesh, layout = trees.random_place(draw)
            found = checkpoints.restore(like=specs, mesh=mesh, layout=layout)
            trees.same(found.tree, values)
        found = checkpoints.restore(like=tree)
        trees.same(found.tree, values)
        for x, like in zip(jax.tree_util.tree_leaves(found.tree), jax.tree_util.tree_leaves(tree), strict=True):
            assert x.stored.sharding == like.stored.sharding and x.stored.shape == like.stored.shape
    (part,) = (tmp_path / f"step-{seed:08d}").glob("part-*.bin")
    assert part.stat().st_size == total_bytes(values), "no padding, and replicas once"


def test_restore_matches_dims_by_name(tmp_path: Path):
    x = md.tensor(np.arange(24.0).reshape(2, 3, 4), "a b c")
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, x)
        mesh, layout = md.Mesh("rows:4"), md.Layout("b:rows")
        found = checkpoints.restore(like=md.spec("c:4 a:2 b:3", "float64"), mesh=mesh, layout=layout).tree
    assert [d.name for d in found.dims] == ["c", "a", "b"]
    assert np.array_equal(found.numpy(), x.numpy().transpose(2, 0, 1))


def test_restore_returns_config_data_and_key(tmp_path: Path):
    key = md.random.key(3)
    config = {"d_model": 512, "betas": [0.9, 0.999], "name": "näme", "big": 2**100, "none": None}
    with md.Checkpoints(tmp_path / "new" / "run") as checkpoints:
        checkpoints.save(5, {"w": 1.5, "n": 3}, config=config, data={"epoch": 1, "batch": 17}, key=key)
        found = checkpoints.restore()
    assert found.config == config and found.data == {"epoch": 1, "batch": 17} and found.step == 5
    assert found.key is not None and np.array_equal(found.key.numpy(), key.numpy())
    assert {path: x.item() for path, x in found.tree.items()} == {"w": 1.5, "n": 3}


def test_restore_reads_only_overlapping_chunks(tmp_path: Path):
    x = md.tensor(np.arange(64 * 64, dtype=np.float32).reshape(64, 64), "io hidden")
    with md.Checkpoints(tmp_path, chunk_bytes=1024) as checkpoints:
        checkpoints.save(0, {"w": x, "v": x})
        found = checkpoints.restore(like={"w": md.spec("io:64 hidden:64")})
        assert found.bytes_read == 64 * 64 * 4, "the other tensor was left alone"
        from meshdsl.train.checkpoint.grid import Box
        from meshdsl.train.checkpoint.read import ReadRequest, open_step

        with open_step(tmp_path, 0) as reader:
            column = np.zeros((64, 16), np.float32)
            reader.read(reader.manifest.tensors["w"], [ReadRequest(Box((0, 48), (64, 16)), column)])
            assert np.array_equal(column, x.numpy()[:, 48:])
            assert reader.bytes_read == column.nbytes


def test_restore_with_program_needs_no_reshard(tmp_path: Path):
    """A compiled step finds its arguments where it wants them: nothing goes through the host."""
    mesh, layout = md.Mesh("rows:4"), md.Layout("hidden:rows")
    step = md.compile(lambda w, x: md.einsum(x, w, out="batch hidden"), mesh, layout)
    types = md.spec("io:3 hidden:6"), md.spec("batch:2 io:3")
    like = {"w": types[0]}
    w = md.tensor(np.arange(18, dtype=np.float32).reshape(3, 6), "io hidden")
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": w})
        for found in (
            checkpoints.restore(like=like, program=step.program(*types)).tree["w"],
            checkpoints.restore(like=like, mesh=mesh, layout=layout).tree["w"],
        ):
            assert found.stored.shape == (3, 8)
            result = step(found, md.tensor(np.ones((2, 3), np.float32), "batch io"))
            assert np.array_equal(result.numpy(), np.ones((2, 3)) @ w.numpy())


def test_restore_between_replicated_and_sharded_updates(tmp_path: Path):
    """Optimizer state that one run keeps whole, the next keeps in shards, and back; the run does not notice."""

    def step(params: Tree, state: Tree, x: md.Tensor) -> tuple[Tree, Tree]:
        g = md.grad(lambda w: md.sum(md.square(md.einsum(x, w, out="batch hidden"))))(params["w"])
        m = state["m"] * 0.5 + g
        return {"w": params["w"] - m * 0.25}, {"m": m}

    mesh, layout = md.Mesh("rows:4"), md.Layout("batch:rows")
    types = {"w": md.spec("io:6 hidden:5")}, {"m": md.spec("io:6 hidden:5")}
    x = md.tensor(np.ones((8, 6), np.float32), "batch io")
    runs = {mode: md.compile(step, mesh, layout, weight_update=mode) for mode in ("replicated", "sharded")}
    w = md.tensor(np.arange(30, dtype=np.float32).reshape(6, 5), "io hidden")
    alone = moved = ({"w": w}, {"m": w})
    with md.Checkpoints(tmp_path) as checkpoints:
        for n, mode in enumerate(["replicated", "sharded", "sharded", "replicated"]):
            checkpoints.save(n, {"params": moved[0], "state": moved[1]})
            program = runs[mode].program(*types, x)
            found = checkpoints.restore(like={"params": types[0], "state": types[1]}, program=program).tree
            block = found["state"]["m"].stored.addressable_shards[0].data.size
            assert block == math.prod(program.local_shape(next(v for v in program.ins if v.name == "state/m")))
            assert (block < 30) == (mode == "sharded"), "each device has what the program takes, and no more"
            moved = runs[mode](found["params"], found["state"], x)
            alone = runs["replicated"](*alone, x)
    assert np.array_equal(moved[0]["w"].numpy(), alone[0]["w"].numpy())
    assert np.array_equal(moved[1]["m"].numpy(), alone[1]["m"].numpy())


def test_manifest_is_json(tmp_path: Path):
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": md.tensor(np.zeros(3), "io")})
    manifest = json.loads((tmp_path / "step-00000000" / "manifest.json").read_text())
    assert manifest["tensors"][0]["dims"] == [["io", 3]]
    assert manifest["header"]["files"] == [24]


def test_save_copies_before_donation(tmp_path: Path):
    mesh, layout = md.Mesh("rows:4"), md.Layout("io:rows")
    step = md.compile(lambda w: w * 2, mesh, layout, donate=0)
    w = step(md.tensor(np.arange(1 << 16, dtype=np.float32), "io"))
    before = w.numpy().copy()
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, w)
        for _ in range(5):
            w = step(w)
        assert np.array_equal(checkpoints.restore().tree["value"].numpy(), before)
