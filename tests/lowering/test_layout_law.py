"""Layouts never change results: every operation, and random programs with their gradients, under random layouts.

The program of a mesh and a layout, simulated on every device with poisoned padding, gives the bits of the undivided
function. Inputs are small whole numbers, where a missing or doubled sum cannot hide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshdsl as md
from meshdsl import backend
from meshdsl.ir import Graph, walk
from meshdsl.layouts import Layout, Mesh
from meshdsl.lowering import Program
from meshdsl.lowering.emit import partition_spec
from meshdsl.lowering.partition import partition
from meshdsl.lowering.simulate import poison
from meshdsl.trace import Tensor
from tests.laws import INDEX, INDICES, Row, rows, run
from tests.laws import SIZES as NAMES
from tests.lowering.maker import Draw, weights
from tests.lowering.programs import FINE, MESHES, draw, draw_layout, judge, same_bits, shrink, tensors

ROWS = rows()
SIZES = [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11]  # 0, 1, primes, and sizes that few meshes divide
SIZES_PER_ROW, LAYOUTS_PER_SIZE = 3, 5
PROGRAMS, BLOCKS = 160, 4


@cache
def has_floats(row: Row) -> bool:
    """True if a result is floating, whatever the sizes."""
    return any(v.dtype.kind == "f" for v in row.graph({**NAMES, "v": 1}).outs)


def weighted(row: Row) -> Any:
    """The row's results and, where it is differentiable, the gradient of their sum with whole weights."""

    def results_of(*xs: Tensor) -> list[Tensor]:
        return [x for x in jax.tree_util.tree_leaves(row.call(*xs)) if isinstance(x, Tensor)]

    def loss(*xs: Tensor) -> Any:
        results = results_of(*xs)
        total = md.tensor(np.float64(0))
        for x in results:
            if x.dtype.kind == "f":
                total = total + md.cast(md.sum(x * md.cast(weights(x.dims), x.dtype)), "float64")
        return total, results

    def with_gradient(*xs: Tensor) -> Any:
        floating = [i for i, x in enumerate(xs) if x.dtype.kind == "f"]
        if not (row.differentiable and floating and has_floats(row)):
            return results_of(*xs)
        return md.value_and_grad(loss, argnums=floating, has_aux=True)(*xs)

    return with_gradient


@dataclass(frozen=True)
class Drawn:
    """One operation with its gradient: sizes, the dtype of its indices, and its operands."""

    name: str
    sizes: dict[str, int]
    index: str
    odd: bool  # NaN of either sign, infinities and -0.0 are among the values
    graph: Graph
    arrays: list[np.ndarray]

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} {self.index}{' odd' if self.odd else ''}"


def drawn(row: Row, rng: Draw, numbers: np.random.Generator, dtype: str = "") -> Drawn:
    """Sizes (0 too, where the operation takes it), a dtype for the indices, and values; all at random.

    A fifth of the cases is the operation under `md.vmap`, with some of its operands mapped.
    """
    index = rng.choice(INDICES) if any(operand.dtype == INDEX for operand in row.ins) else INDICES[0]
    odd = row.odd and rng.random() < 0.3
    while True:
        sizes = {name: rng.choice(SIZES) for name in NAMES}
        other = Draw(f"{row.name} {sizes}")
        mapped = [other.random() < 0.7 for _ in row.ins]
        vectorised = any(mapped) and other.random() < 0.2
        if vectorised:
            sizes["v"] = other.choice([1, 2, 3, 4, 5])
        one = row.vectorised(mapped) if vectorised else row
        try:
            graph = md.compile(weighted(one), "", "").graph(*one.types(sizes, dtype, index))
        except md.ShapeError:
            if row.empty or 0 not in sizes.values():
                raise
            continue
        return Drawn(one.name, sizes, index, odd, graph, one.arrays(numbers, sizes, dtype=dtype, index=index, odd=odd))


def close(row: Row, got: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits for an exact row; else float64 to a few roundings."""
    if row.exact or got.dtype.kind != "f":
        return same_bits([got], [wanted])
    scale = np.max(np.abs(wanted), initial=1, where=np.isfinite(wanted))
    return got.shape == wanted.shape and np.allclose(got, wanted, rtol=1e-11, atol=1e-11 * scale, equal_nan=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_operation_gives_the_same_bits_under_every_layout(row: Row) -> None:
    rng, random = Draw(row.name), np.random.default_rng(list(row.name.encode()))
    counts: Counter[str] = Counter()
    dtype = "" if row.exact else "float64"
    for _ in range(SIZES_PER_ROW):
        case = drawn(row, rng, random, dtype)
        with np.errstate(all="ignore"):
            wanted = run(case.graph, case.arrays, backend.NumPy)
        differentiated = has_backward(case.graph)
        for mesh, layout, program in legal(rng, case.graph, counts):
            assert differentiated or not has_backward(program), f"no gradient here: {row.name} {case} under {layout}"
            got = md.simulate(program, *case.arrays)
            wrong = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if not close(row, a, b)]
            assert not wrong, f"results {wrong} differ: {case} on {mesh} under {layout}"
    assert counts["illegal"] < counts["legal"], "most layouts that are drawn should be legal"


def has_backward(graph: Graph) -> bool:
    """True if an equation of the graph or of its loops is marked as created by differentiation."""
    return any(eqn.backward for eqn, _ in walk(graph))


def legal(rng: Draw, graph: Graph, counts: Counter[str]) -> Iterator[tuple[str, Layout, Program]]:
    """Programs of the graph under legal layouts; the illegal ones that were drawn are counted."""
    found = 0
    while found < LAYOUTS_PER_SIZE:
        mesh = rng.choice(MESHES)
        layout = Layout(dict(draw_layout(rng, mesh, tensors(graph))))
        try:
            program = partition(graph, Mesh(mesh), layout)
        except md.LayoutError:
            counts["illegal"] += 1
            continue
        counts["legal"] += 1
        found += 1
        yield mesh, layout, program


def test_the_table_makes_at_least_four_thousand_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    cases = len(ROWS) * SIZES_PER_ROW * LAYOUTS_PER_SIZE
    with capsys.disabled():
        print(f"layout_law: {cases} cases of {len(ROWS)} operations")
    assert cases >= 4000


def law_of_programs(seeds: range) -> Counter[str]:
    """The number of programs by outcome; fails on the first wrong one, shrunk."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        case = draw(seed)
        verdict = judge(case)
        if verdict not in FINE:
            small = shrink(case)
            pytest.fail(f"{verdict}\n  {case!r}\n  shrunk: {small!r}\n  {judge(small)}", pytrace=False)
        counts[verdict] += 1
    return counts


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_give_the_same_bits_under_random_layouts(
    block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    n = PROGRAMS // BLOCKS
    counts = law_of_programs(range(block * n, (block + 1) * n))
    with capsys.disabled():
        print(f"layout_law: random programs {dict(counts)}")
    assert counts["ok"] >= 0.9 * n


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_thousands_of_random_programs(block: int) -> None:
    start = Draw().randrange(1 << 40)
    counts = law_of_programs(range(start, start + 250))
    assert counts["ok"] >= 0.85 * 250


def placed(program: Program, arrays: list[np.ndarray]) -> list[Tensor]:
    """The arguments on devices as the program wants them, their padding poisoned."""
    mesh, found = program.mesh.bind(), []
    for v, x in zip(program.ins, arrays, strict=True):
        pads = [(0, size - there) for size, there in zip(program.stored_shape(v), x.shape, strict=True)]
        stored = np.pad(x, pads, constant_values=poison(x.dtype)) if pads else x
        sharding = NamedSharding(mesh, partition_spec(v.dims, v.sharding))
        array = jax.make_array_from_callback(stored.shape, sharding, lambda index, stored=stored: stored[index])
        found.append(Tensor(v.dims, v.dtype, array=array))
    return found


def emitted(compiled: Any, arguments: list[md.Tensor]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results on real devices, arguments placed with poisoned padding, and those of the simulation."""
    program = compiled.program(*arguments)
    real = jax.tree_util.tree_leaves(compiled(*placed(program, [x.numpy() for x in arguments])))
    return [x.numpy() for x in real], md.simulate(program, *arguments)


GROUPS = 6
ON_DEVICES = ["x:2 y:4", "x:2 y:2 z:2", "x:8", "x:5", "x:2 y:3", "x:7"]


def odd(row: Row) -> bool:
    """True if NaN and infinities may be among the values on devices.

    XLA for CPU gives two values to one minimum or maximum of NaN and infinities: NaN as a result, and -inf where a
    fusion computes it again. So `ties / sum(ties)` of plain `jnp` is 0 instead of NaN; `jax.jit(lambda x: (x ==
    (y := x.min())) / jnp.sum(x == y))` shows it. It also leaves out the products of a kernel with the zeros between the
    elements of a dilated input, which is what the gradient of a strided convolution reads, and, at some sizes, with the
    zeros beside the input: 0 * NaN is 0 there. Without a TPU's kernel it computes `lax.ragged_dot`, which TPUs get, as
    all rows times all matrices, the rows of other groups being 0: 0 * NaN is NaN there.
    """
    return row.odd and not row.name.startswith(("max", "min", "conv", "grouped"))


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("group", range(GROUPS))
def test_devices_compute_what_is_simulated(group: int) -> None:
    """Every sixth operation of the table in one program, on eight real devices or fewer; padding poisoned."""
    some = [row for row in ROWS[group::GROUPS] if row.exact]
    rng, random, mesh = Draw(group), np.random.default_rng(group), ON_DEVICES[group]
    sizes = {name: rng.choice([2, 3, 5, 6]) for name in NAMES}
    operands = [row.make(random, sizes, index=rng.choice(INDICES), odd=rng.random() < 0.5 and odd(row)) for row in some]
    counts = np.cumsum([0, *map(len, operands)])

    def everything(*xs: md.Tensor) -> Any:
        return [weighted(row)(*xs[a:b]) for row, (a, b) in zip(some, pairwise(counts), strict=True)]

    flat = [x for xs in operands for x in xs]
    compiled = md.compile(everything, "", "")
    graph, layout = compiled.graph(*flat), Layout("")
    for _ in range(50):
        layout = Layout(dict(draw_layout(rng, mesh, tensors(graph))))
        try:
            partition(graph, Mesh(mesh), layout)
        except md.LayoutError:
            continue
        if layout.rules:
            break
    real, simulated = emitted(compiled.under(mesh, layout), flat)
    wrong = [k for k, (a, b) in enumerate(zip(real, simulated, strict=True)) if not same_bits([a], [b])]
    assert not wrong, f"results {wrong} differ on {mesh} under {layout}"


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("seed", range(700, 712))
def test_devices_compute_what_is_simulated_of_random_programs(seed: int) -> None:
    case = draw(seed)
    try:
        real, simulated = emitted(*case.compiled())
    except md.LayoutError:
        return
    assert same_bits(real, simulated), case
