"""The planner is right and minimal on every pair of shardings of small tensors over up to three axes.

Right: the plan, run by `simulate` on a value laid out by definition, gives the target's blocks by definition.
Minimal: no plan by the same rules sends fewer bytes, then uses fewer collectives, then fewer steps, then sends fewer
bytes over the first axes; the reference is Floyd-Warshall over the graph of all shardings, with every collective tried
on every one of them.
By time: right, never slower than the plan by bytes, and as fast as any plan over all axes of the mesh.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import random
import weakref
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.network import Network, NetworkTier, Placement, place
from meshdsl.dims import dims, names
from meshdsl.errors import InternalError, LayoutError
from meshdsl.layouts import Extents, Mesh, Sharding
from meshdsl.lowering.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from meshdsl.lowering.partition.planner import Reshard, Seconds
from tests.lowering.definitions import (
    COMBINE,
    Case,
    blocks_of,
    case,
    holds,
    parts_of,
    run,
    sent_elements,
    states,
    value_of,
)

Axes = tuple[str, ...]


CASES = [
    case("a:2 b:2 c:2", "x:8 y:8", "sum", 5139),
    case("a:2 b:2 c:2", "x:5 y:11", "sum", 5139),
    case("a:2 b:2 c:2", "x:4 y:8", "sum", 4329, padded=False, itemsize=1),
    case("a:2 b:2 c:2", "x:8 y:5", "max", 5139),
    case("a:2 b:3 c:2", "x:12 y:12", "sum", 5139),
    case("a:2 b:4", "x:8 y:8", "sum", 223),
    case("a:4 b:2", "x:13 y:8", "sum", 223),
    case("a:2 b:3", "x:6 y:6", "sum", 223),
    case("a:2 b:3", "x:5 y:7", "sum", 223, itemsize=2),
    case("a:2 b:3", "x:4 y:9", "min", 49, padded=False),
    case("a:2 b:3", "x:6 y:6 z:6", "sum", 573),
    case("a:2 b:4", "x:8 y:8 z:2", "max", 341, padded=False),
    case("a:2 b:3", "x:0 y:7", "sum", 223),
    case("a:2 b:3", "x:1 y:0", "min", 223),
]
# three axes, thousands of pairs: one of the five runs by default
LONG: dict[int, pytest.MarkDecorator] = dict.fromkeys((0, 2, 3, 4), pytest.mark.slow)


# --- the reference ------------------------------------------------------------------------------------------


def candidates(c: Case, all_states: list[Sharding]) -> Iterator[Step]:
    """Every collective there is, applicable or not; relabellings are those between the states."""
    axes = tuple(c.mesh.axes)
    tuples = [t for n in range(1, len(axes) + 1) for t in itertools.permutations(axes, n)]
    for t in tuples:
        yield from (AllReduce(t, kind) for kind in COMBINE if t == tuple(sorted(t)))
        for dim in names(c.shape):
            yield from (Slice(dim, t), AllGather(dim, t), ReduceScatter(dim, t))
            yield from (AllToAll(dim, to, t) for to in names(c.shape) if to != dim)
    yield from {Permute.between(s, t) for s in all_states for t in all_states if s.partial == t.partial}


def ring_bytes(name: str, n: int, local: int) -> int:
    """The bytes that one device sends by the textbook formula, rounded up."""
    return {
        "slice": 0,
        "all_gather": (n - 1) * local,
        "all_to_all": math.ceil((n - 1) * local / n),
        "reduce_scatter": math.ceil((n - 1) * local / n),
        "all_reduce": math.ceil(2 * (n - 1) * local / n),
        "permute": local,
    }[name]


def priced(sent: int, collectives: int, steps: int, outer: int) -> int:
    return ((sent * 100 + collectives) * 100 + steps) * 100_000 + outer


def outer_bytes(c: Case, step: Step, sent: int) -> int:
    """The bytes of a step, each counted more often the earlier in the mesh the first of its axes is."""
    return sent * max(len(c.mesh.axes) - list(c.mesh.axes).index(axis) for axis in step.axes)


def network_of(c: Case) -> Placement:
    """A network on which the last axis of the mesh is fast, and each axis before it eight times slower."""
    tiers = [NetworkTier("switch", {a: n}, 64.0 / 8**i, 0.5) for i, (a, n) in enumerate(reversed(c.mesh.axes.items()))]
    return place(Network(tuple(tiers), launch=1.0), c.mesh)


def timed(c: Case, source: Sharding, steps: Sequence[Step], seconds: Seconds) -> int:
    """The picoseconds of these collectives, one after the other."""
    total = 0
    for step in steps:
        local = c.itemsize * sent_elements(c, step, source)
        n = math.prod(c.mesh.axes[a] for a in step.axes)
        size = local * (n if step.name in ("all_gather", "all_to_all") else 1)
        total += round(1e12 * seconds(step.name, step.axes, size)) if step.name != "slice" else 0
        source = step.step(source, c.mesh)
    return total


@cache
def reference(index: int, by_time: bool = False) -> tuple[list[Sharding], dict[frozenset[str], np.ndarray]]:
    """All shardings, and the least price from each to each by the axes that may be used on the way."""
    c = CASES[index]
    seconds = network_of(c).seconds
    all_states = states(c)
    number = {s: i for i, s in enumerate(all_states)}
    unreachable = 1 << 60
    edges = np.full((len(all_states),) * 2, unreachable)
    np.fill_diagonal(edges, 0)
    for step in candidates(c, all_states):
        for i, s in enumerate(all_states):
            try:
                j = number.get(step.step(s, c.mesh))
            except InternalError:
                continue
            if j is not None:
                local = c.itemsize * sent_elements(c, step, s)
                n = math.prod(c.mesh.axes[a] for a in step.axes)
                sent = ring_bytes(step.name, n, local)
                price = priced(sent, step.name != "slice", 1, outer_bytes(c, step, sent))
                price = timed(c, s, [step], seconds) if by_time else price
                edges[i, j] = min(edges[i, j], price)
    found: dict[frozenset[str], np.ndarray] = {}
    for n in range(len(c.mesh.axes) + 1):
        for usable in map(frozenset, itertools.combinations(c.mesh.axes, n)):
            closed = np.array([s.varying <= usable for s in all_states])
            best = np.where(closed[:, None] & closed[None, :], edges, unreachable)
            for k in range(len(all_states)):
                best = np.minimum(best, best[:, k, None] + best[None, k, :])
            found[usable] = best
    return all_states, found


# --- the law ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [pytest.param(i, id=str(c), marks=LONG.get(i, ())) for i, c in enumerate(CASES)])
def test_every_pair(index: int):
    c = CASES[index]
    all_states, least = reference(index)
    value = value_of(c)
    laid_out = {s: blocks_of(c, s, parts_of(value, c.mesh.count(s.partial), c.kind)) for s in all_states}
    wanted = {s: np.stack(blocks_of(c, s.whole(), [value])) for s in all_states}
    pairs = 0
    for i, source in enumerate(all_states):
        # the blocks after some collectives: plans from one sharding begin alike
        after: dict[tuple[Step, ...], list[np.ndarray]] = {(): laid_out[source]}
        for j, target in enumerate(all_states):
            if not set(target.partial) <= set(source.partial):
                continue
            pairs += 1
            steps = Reshard(source, target, c.shape, c.mesh, c.extents, c.itemsize).steps
            here, sent, outer = source, 0, 0
            for k, step in enumerate(steps):
                own = step.bytes_sent(sent_elements(c, step, here) * c.itemsize, c.mesh)
                sent, outer = sent + own, outer + outer_bytes(c, step, own)
                if steps[: k + 1] not in after:
                    after[steps[: k + 1]] = run(c, step, here, after[steps[:k]])
                here = step.step(here, c.mesh)
            price = priced(sent, sum(step.name != "slice" for step in steps), len(steps), outer)
            right = {
                "target": here == target,
                "blocks": holds(c, target, after[steps], wanted[target]),
                "least": price == least[source.varying | target.varying][i, j],
                "cost": sent == Reshard(source, target, c.shape, c.mesh, c.extents, c.itemsize).cost,
            }
            assert all(right.values()), f"{source} to {target}: {'; '.join(map(str, steps))}: {right}"
    print(f"{c}: {pairs} pairs of {len(all_states)} shardings")
    assert pairs == c.pairs


@pytest.mark.parametrize("index", [6, 8, 9, 11])
def test_every_pair_by_time(index: int):
    c = CASES[index]
    all_states, least = reference(index, by_time=True)
    value, seconds = value_of(c), network_of(c).seconds
    faster = 0
    for (i, source), (j, target) in itertools.product(enumerate(all_states), repeat=2):
        if not set(target.partial) <= set(source.partial):
            continue
        arguments = (source, target, c.shape, c.mesh, c.extents, c.itemsize)
        flat, steps = Reshard(*arguments).steps, Reshard(*arguments, seconds).steps
        blocks, here = blocks_of(c, source, parts_of(value, c.mesh.count(source.partial), c.kind)), source
        for step in steps:
            blocks = run(c, step, here, blocks)
            here = step.step(here, c.mesh)
        said = f"{source} to {target}: {'; '.join(map(str, steps))}"
        assert here == target, said
        assert holds(c, target, blocks, np.stack(blocks_of(c, target.whole(), [value]))), said
        time = timed(c, source, steps, seconds)
        assert time == Reshard(*arguments, seconds).cost == least[frozenset(c.mesh.axes)][i, j], said
        assert time <= timed(c, source, flat, seconds), said
        faster += time < timed(c, source, flat, seconds)
        assert not any(fused(source, flat, c.mesh)), said
        for one, before, pair in fused(source, steps, c.mesh):  # where two are faster than one
            assert timed(c, before, [one], seconds) >= timed(c, before, pair, seconds), said
    print(f"{c}: {faster} pairs are faster")
    assert faster


def fused(source: Sharding, steps: Sequence[Step], mesh: Mesh) -> Iterator[tuple[Step, Sharding, list[Step]]]:
    """Two collectives of one kind in a row that one could replace: the one, the sharding before, and the two."""
    for step, other in itertools.pairwise(steps):
        middle = step.step(source, mesh)
        for axes in (step.axes + other.axes, other.axes + step.axes):
            if type(step) is type(other) and step.sends and not isinstance(step, Permute):
                one = dataclasses.replace(step, axes=axes)
                try:
                    if one.step(source, mesh) == other.step(middle, mesh):
                        yield one, source, [step, other]
                except InternalError:
                    pass
        source = middle


def test_a_detour_over_an_idle_fast_axis():
    """A value replicated on the fast axis is sliced there first, so the slow axis sends less."""
    network = Network((NetworkTier("switch", {"gpu": 4}, 64e9), NetworkTier("switch", {"node": 2}, 1e9)))
    mesh = Mesh("node:2 gpu:4")
    arguments = (Sharding.of({}, ["node"]), Sharding(), dims("x:4096 y:8"), mesh, Extents(), 4)
    assert list(map(str, Reshard(*arguments).steps)) == ["all_reduce(sum) over node"]
    assert list(map(str, Reshard(*arguments, place(network, mesh).seconds).steps)) == [
        "slice x over gpu", "reduce_scatter x over node", "all_gather x over gpu,node"
    ]  # fmt: skip


def test_noticed_when_broken():
    """The comparison above sees a dropped step, axes in the wrong order, and a sum taken twice."""
    noticed = {"dropped": 0, "reordered": 0, "doubled": 0}
    for c in (CASES[1], CASES[3], CASES[8]):
        value = value_of(c)
        all_states = states(c)
        for source, target in random.Random(0).sample(list(itertools.product(all_states, repeat=2)), 200):
            if not set(target.partial) <= set(source.partial):
                continue
            blocks = blocks_of(c, source, parts_of(value, c.mesh.count(source.partial), c.kind))
            wanted = np.stack(blocks_of(c, target.whole(), [value]))
            steps = Reshard(source, target, c.shape, c.mesh, c.extents, c.itemsize).steps
            for what, broken in mutants(steps):
                try:
                    got = blocks
                    for step in broken:  # not by way of `step`: the rule itself refuses most of these
                        got = step.simulate(got, c.shape, source, c.mesh)
                except (ValueError, InternalError):  # blocks that no longer divide
                    pass
                else:
                    said = f"{what} {source} to {target}: {'; '.join(map(str, broken))}"
                    assert not holds(c, target, got, wanted), said
                noticed[what] += 1
    print(noticed)
    assert all(count > 20 for count in noticed.values())


def mutants(steps: tuple[Step, ...]) -> Iterator[tuple[str, list[Step]]]:
    for i, step in enumerate(steps):
        before, after = list(steps[:i]), list(steps[i + 1 :])
        yield "dropped", [*before, *after]
        if isinstance(step, AllReduce) and step.kind == "sum":
            yield "doubled", [*before, step, step, *after]
        elif not isinstance(step, AllReduce | Permute) and len(step.axes) > 1:
            yield "reordered", [*before, dataclasses.replace(step, axes=step.axes[::-1]), *after]


@pytest.mark.parametrize(("mesh", "pairs"), [("a:2 b:2 c:3 d:2", 60), ("a:2 b:2 c:2 d:2 e:2 f:2", 15)])
def test_many_axes(mesh: str, pairs: int):
    """With more axes than are searched exactly, plans are right and never send more than gathering everything."""
    c = case(mesh, "x:24 y:20" if pairs > 20 else "x:64 y:64", "sum", 0, padded=pairs > 20)
    value = value_of(c)
    homes = (None, "pending", "x", "y")
    draw = random.Random(0)

    def some_sharding(pending: list[str]) -> Sharding:
        order = draw.sample(list(c.mesh.axes), len(c.mesh.axes))
        home = {a: draw.choice([h for h in homes if h != "pending" or a in pending]) for a in order}
        split = {d: [a for a in order if home[a] == d] for d in names(c.shape)}
        return Sharding.of(split, [a for a in order if home[a] == "pending"])

    for _ in range(pairs):
        source = some_sharding(list(c.mesh.axes))
        target = some_sharding(list(source.partial))
        whole = Sharding.of({}, target.partial)
        arguments = (c.shape, c.mesh, c.extents, c.itemsize)
        steps = Reshard(source, target, *arguments).steps
        blocks = blocks_of(c, source, parts_of(value, c.mesh.count(source.partial), c.kind))
        here, wanted = source, np.stack(blocks_of(c, target.whole(), [value]))
        for step in steps:
            blocks = run(c, step, here, blocks)
            here = step.step(here, c.mesh)
        assert here == target and holds(c, target, blocks, wanted), f"{source} to {target}"
        assert Reshard(source, target, *arguments).cost <= Reshard(source, whole, *arguments).cost, (
            f"{source} to {target}"
        )


def test_the_example_of_a_scratch_dim():
    """Two dims swap axes of unequal sizes most cheaply through a third."""
    mesh, shape = Mesh("a:2 b:3"), dims("x:6 y:6 z:6")
    steps = Reshard(
        Sharding.of({"x": "a", "y": "b"}), Sharding.of({"x": "b", "y": "a"}), shape, mesh, Extents(), 4
    ).steps
    assert list(map(str, steps)) == [
        "all_to_all x -> z over a",
        "all_to_all y -> x over b",
        "all_to_all z -> y over a",
    ]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (Sharding(), Sharding.of({"x": "b"}), "stored size 8 does not divide by 3"),
        (Sharding(), Sharding.of({}, "a"), "can reduce a pending sum, max or min, but not create"),
        (Sharding.of({}, "ab", "max"), Sharding.of({}, "a", "sum"), "but not create or change one"),
        (Sharding(), Sharding.of({"xx": "a"}), "no dim 'xx' to split over a; did you mean 'x'"),
        (Sharding(), Sharding.of({"x": "q"}), "the mesh has no axis 'q'"),
    ],
)
def test_what_cannot_be(source: Sharding, target: Sharding, message: str):
    with pytest.raises(LayoutError, match=message):
        _ = Reshard(source, target, dims("x:8 y:8"), Mesh("a:2 b:3"), Extents(), 4).steps


def test_plans_by_time_keep_no_placement_alive() -> None:
    def by_time() -> weakref.ref[Placement]:
        placed = place(md.machine("tpu-v4").network, Mesh("a:2 b:4"))
        source, target = Sharding.of({"x": ("a",)}), Sharding.of({"y": ("a", "b")})
        move = Reshard(source, target, dims("x:8 y:8"), Mesh("a:2 b:4"), Extents(), 4, placed.seconds)
        assert move.cost > 0 and move.steps
        return weakref.ref(placed)

    placed = by_time()
    gc.collect()
    assert placed() is None
