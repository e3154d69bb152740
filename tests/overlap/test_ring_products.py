"""Ring products have the bits of the gather and the product, on random programs of whole numbers, and equal bytes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import verify
from meshdsl.lowering.check import check
from meshdsl.lowering.program import Program
from meshdsl.lowering.unroll import unroll
from meshdsl.overlap import ring_products as ring_module
from meshdsl.overlap.ring_products import ring_products, rings
from tests.lowering.maker import whole_numbers
from tests.lowering.programs import same_bits


def draw(seed: int) -> tuple[Program, list[np.ndarray]]:
    """Products of a sharded value with one that is stored along a dim of its own and gathered, maybe in a loop."""
    rng = random.Random(seed)
    n = rng.choice([2, 3, 4])
    mesh = rng.choice([f"x:{n}", f"x:{n} y:2", f"y:2 x:{n}"])
    axes = rng.choice(["x", "x", "x,y", "y,x"]) if "y" in mesh else "x"
    ways = n * (2 if "," in axes else 1)
    size = {name: rng.choice([1, 2, 3]) * ways for name in "abcd"}
    stored = rng.choice("bc")  # the dim of the weights that is stored sharded: a summed one, or one of the result
    outs = rng.sample("ac", 2), rng.sample("abd", rng.choice([2, 3]))
    looped, gradient = rng.random() < 0.4, rng.random() < 0.5
    size[stored] += rng.choice([0, 1])  # `own` is padded then, and `stored` is not
    numbers = np.random.default_rng(seed)
    shapes = [
        f"a:{size['a']} b:{size['b']}",
        "layer:2 " + " ".join(f"{d if d != stored else 'own'}:{size[d]}" for d in rng.sample("bc", 2)),
        f"b:{size['b']} d:{size['d']}",
    ]
    args = [whole_numbers(numbers, md.spec(shape).dims, "float32") for shape in shapes]

    def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        w = md.rename(w, own=stored)
        y = md.einsum(x, w, out=outs[0])
        return md.einsum(y, md.sign(w), out="a b") if gradient else x + md.sum(y, "c")

    def f(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> Any:
        def total(x: md.Tensor, w: md.Tensor) -> md.Tensor:
            if looped:
                return md.scan(lambda t, row: (md.sign(product(t, row)), None), x, w, over="layer")[0]
            return product(product(x, md.unstack(w, "layer")[0]), md.unstack(w, "layer")[1])

        y = md.einsum(total(x, w), v, out=outs[1])
        return (y, md.grad(lambda w: md.sum(total(x, w)))(w)) if gradient else y

    return md.compile(f, mesh, f"a:{axes}; own:{axes}").program(*args), [x.numpy() for x in args]


def sent(program: Program) -> int:
    """Bytes that one device sends."""
    return round(sum(record.wire_bytes * record.count for record in program.collectives))


def law(seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            program, arrays = draw(seed)
        except md.LayoutError:
            continue
        flat = unroll(program)
        gathers, wanted = rings(flat), md.simulate(program, *arrays)
        for most, kind in ((8, "turns"), (1, "loops")):
            monkeypatch.setattr(ring_module, "UNROLLED", most)
            ring = check(verify(ring_products(flat, gathers), "ring"), "ring")
            assert same_bits(md.simulate(ring, *arrays), wanted), f"seed {seed} {kind}"
            assert sent(ring) == sent(flat), f"seed {seed} {kind}"
            counts[kind] += sum(eqn.scan is not None for eqn in ring.eqns)
        counts["programs"] += 1
        counts["rings"] += len(gathers)
        counts["padded"] += any(flat.is_padded(ring.gather.ins[0], ring.stored) for ring in gathers)
    return counts


def test_ring_products_keep_bits_and_bytes_of_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = law(range(60), monkeypatch)
    assert counts["rings"] > 40 and counts["padded"] > 10 and counts["loops"] > 30, counts


def test_a_ring_of_many_devices_is_one_loop() -> None:
    def product(a: md.Tensor, b: md.Tensor) -> md.Tensor:
        return md.prefer(md.einsum(a, b, out="n k"), "n")

    def program(devices: int, size: int) -> Program:
        step = md.compile(product, f"a:{devices}", "n:a; k:a", overlap="ring", machine="tpu-v4")
        return step.program(md.spec("n:8192 m:64"), md.spec(f"m:64 k:{size}"))

    few, many = program(64, 8192), program(256, 8190)  # 8,190 are padded
    assert [len(one.collectives) for one in (few, many)] == [1, 1]
    assert [c.count for one in (few, many) for c in one.collectives] == [63, 255]
    assert few.instructions <= many.instructions <= few.instructions + 1
    assert md.memory(many).peak < md.memory(few).peak / 2


@pytest.mark.slow
def test_ring_products_keep_bits_and_bytes_of_many_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    law(range(1_000, 3_000), monkeypatch)


MACHINE = "a100-p4de"
TYPES = {"w": md.spec("own:4096 hidden:4096"), "v": md.spec("hidden:4096 out:1024")}


def step(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
    h = md.relu(md.dot(x, md.rename(params["w"], own="io"), "io"))
    return md.dot(h, params["v"], "hidden")


def test_overlap_ring_hides_the_gather_behind_its_product() -> None:
    types = TYPES, md.spec("batch:16384 io:4096")
    compiled = md.compile(step, "rows:8", "batch:rows; own:rows", overlap="ring", machine=MACHINE)
    program = compiled.program(*types)
    assert [record.kind for record in program.collectives] == ["permute"] * 7
    plan = compiled.overlap
    assert plan.chosen == "1 of 1 rings" and plan.after.exposed < 0.1 * plan.before.exposed
    assert len(plan.windows) == 7 and all(window.inside for window in plan.windows)
    assert "permute io__block over rows" in str(plan) and "block by block beside the product" in str(plan)


def test_overlap_auto_takes_rings_only_if_the_step_is_faster() -> None:
    def chosen(batch: int) -> str:
        compiled = md.compile(step, "rows:8", "batch:rows; own:rows", overlap="auto", machine=MACHINE)
        compiled.program(TYPES, md.spec(f"batch:{batch} io:4096"))
        assert compiled.overlap.after.seconds <= compiled.overlap.before.seconds
        return compiled.overlap.chosen

    assert chosen(16384) == "1 of 1 rings" and "ring" not in chosen(8)


@pytest.mark.parametrize(("size", "most"), [(16, 8), (14, 1)])
def test_overlap_ring_runs_on_devices_as_simulated(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "UNROLLED", most)
    rng = np.random.default_rng(0)
    given = [md.tensor(rng.integers(-2, 3, shape).astype("float32"), names) for shape, names in (
        ((size, 8), "own hidden"), ((8, 4), "hidden out"), ((8, size), "batch io"),
    )]  # fmt: skip
    w, v, x = given
    plain = md.compile(step, "rows:4", "batch:rows; own:rows")({"w": w, "v": v}, x)
    ring = md.compile(step, "rows:4", "batch:rows; own:rows", overlap="ring", machine=MACHINE)({"w": w, "v": v}, x)
    assert same_bits([plain.numpy()], [ring.numpy()])


def test_overlap_ring_without_a_gather_is_refused() -> None:
    with pytest.raises(md.LayoutError, match="no operand of a product is gathered"):
        compiled = md.compile(lambda x, w: md.dot(x, w, "i"), "rows:4", "i:rows", overlap="ring", machine=MACHINE)
        compiled.program(md.spec("b:8 i:16"), md.spec("i:16 h:8"))
