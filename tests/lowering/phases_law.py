"""A program with collectives in steps gives the results of the flat one, bit for bit on whole numbers.

Cases are random programs of `tests.lowering.programs`, and functions that need each kind of collective over several
axes, at times in a loop, on meshes whose axes are on two or three levels of a network; so does one whose reshards are
planned by time. In the flat program, no two collectives of one kind in a row could be one. The programs run on the
simulator, which fills padding with NaN; every fourth one is compared with its StableHLO, every eighth runs on devices.

    python -m tests.lowering.phases_law --cases 1000 --seed 1    # the last line is JSON
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from typing import Any, cast

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl.cost.network import Network, NetworkTier, place
from meshdsl.errors import InternalError
from meshdsl.ir import Because, Eqn, verify, walk
from meshdsl.lowering import Program
from meshdsl.lowering.check import check
from meshdsl.lowering.collective_steps import in_steps
from meshdsl.lowering.partition import partition
from tests.lowering.programs import draw, same_bits
from tests.stablehlo import cost_law

MESHES = ("x:2 y:4", "x:4 y:2", "x:2 y:2", "x:2 y:3", "x:3 y:2", "x:2 y:2 z:2")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
H100 = md.machine("h100")


def machine(mesh: str, levels: int) -> md.Machine:
    """A machine on which the minor axis of the mesh is fast, and each axis before it slower, on so many levels."""
    sizes = list(md.Mesh(mesh).axes.values())
    outer = int(np.prod(sizes[: len(sizes) - levels + 1]))
    members = [*reversed(sizes[len(sizes) - levels + 1 :]), outer]
    tiers = tuple(NetworkTier("switch", {f"level{i}": n}, 400e9 / 8**i, 1e-6 * 5**i) for i, n in enumerate(members))
    return dataclasses.replace(H100, name="test", network=Network(tiers, launch=5e-6))


def function(kind: str, rng: np.random.Generator, mesh: str) -> tuple[Any, str, list[md.Tensor]]:
    """A function with a collective of this kind, its layout, and arguments."""
    axes = list(md.Mesh(mesh).axes)
    rng.shuffle(axes)
    count = 2 if len(axes) == 2 else int(rng.integers(2, 4))
    over, rest = ",".join(axes[:count]), axes[count:]
    other = f"; n:{rest[0]}" if rest and rng.random() < 0.6 else ""
    sizes = [md.Dim(name, int(rng.choice([1, 2, 3, 5, 8, 12, 17, 24]))) for name in ("a", "b", "n")]
    order = [sizes[i] for i in rng.permutation(3)]
    dtype = str(rng.choice(["float32", "int32", "bfloat16", "float64"]))
    loop = [md.Dim("layer", int(rng.integers(1, 4)))] if rng.random() < 0.3 else []
    dims = [*loop, *order]
    x = md.cast(md.tensor(rng.integers(-3, 4, [d.size for d in dims]), dims), dtype)

    def body(x: md.Tensor) -> md.Tensor:
        match kind:
            case "all_reduce":
                return md.sum(x, "a")
            case "all_gather":
                return md.rename(x, a="c")
            case "reduce_scatter":
                return md.rename(md.sum(x, "a"), b="d")
            case _:
                return md.rename(x, a="c", b="d")

    def f(x: md.Tensor) -> md.Tensor:
        if not loop:
            return body(x)
        return md.scan(lambda carry, row: (carry * 2 + 1, body(row * carry)), md.cast(1, x.dtype), x, over="layer")[1]

    into = f"; d:{over}" if kind in ("reduce_scatter", "all_to_all") else ""
    return f, f"a:{over}{into}{other}", [x]


def compiled(seed: int) -> tuple[md.Compiled, list[md.Tensor]]:
    """The function of a case, without steps, and its arguments."""
    rng = np.random.default_rng(seed)
    if seed % 5 == 0:
        return draw(seed).compiled()
    mesh = str(rng.choice(MESHES))
    f, layout, args = function(str(rng.choice(KINDS)), rng, mesh)
    return md.compile(f, mesh, layout), args


def stepped(flat: Program, mesh: md.Mesh, levels: int) -> tuple[Program, md.Machine]:
    """The program in steps on a machine with so many levels; raises `LayoutError` if nothing can be in steps."""
    on = machine(str(mesh), levels)
    return in_steps(flat, "always", on.name, place(on.network, mesh)), on


def kinds(program: Program) -> Counter[str]:
    """The collectives in steps, by kind."""
    return Counter(
        str(eqn.collective.name)
        for eqn, _ in walk(program)
        if eqn.collective is not None and eqn.cause.kind is Because.STEPS
    )


def in_a_row(program: Program) -> list[Eqn]:
    """Collectives that could be one with that of their operand, which only they read and no `md.shard` asked for."""
    found: list[Eqn] = []
    for graph in (program, *(body for eqn, _ in walk(program) for body in eqn.graphs().values())):
        makers = {v: eqn for eqn in graph.eqns for v in eqn.outs}
        reads = Counter([v for eqn in graph.eqns for v in eqn.ins] + list(graph.outs))
        for eqn in graph.eqns:
            before = makers.get(eqn.ins[0]) if eqn.sends and eqn.collective is not None else None
            if before is None or not before.sends or type(before.collective) is not type(eqn.collective):
                continue
            asked = str(before.cause).startswith("shard needs") or program.padded_bytes(before)  # trimmed: less is sent
            if reads[eqn.ins[0]] == 1 and not asked and could_be_one(program, before, eqn):
                found.append(eqn)
    return found


def could_be_one(program: Program, first: Eqn, second: Eqn) -> bool:
    """True if one collective, over the axes of both in some order, gives the sharding that the two give."""
    one, other = first.collective, second.collective
    assert one is not None and other is not None
    for axes in (one.axes + other.axes, other.axes + one.axes):
        try:
            whole: Any = dataclasses.replace(cast(Any, other), axes=axes)
            if whole.step(first.ins[0].sharding, program.mesh) == second.outs[0].sharding:
                return True
        except (InternalError, TypeError):  # it does not apply, or has no axes of its own
            pass
    return False


def by_time(step: md.Compiled, args: list[md.Tensor], levels: int) -> Counter[str]:
    """Check the program whose reshards are planned by time; returns whether it is another one."""
    network = machine(str(step.mesh), levels).network
    graph, seconds = step.graph(*args), place(network, step.mesh).seconds
    flat, program = (partition(graph, step.mesh, step.layout, seconds=each) for each in (None, seconds))
    leaves = jax.tree.leaves(args)
    assert same_bits(md.simulate(program, *leaves), md.simulate(flat, *leaves)), f"{step}: results differ\n{program}"
    return Counter({"by time": 1} if str(program) != str(flat) else {})


def case(seed: int) -> Counter[str]:
    """Check one case; returns what it was: illegal, flat, or equal, with the kinds of its steps."""
    step, args = compiled(seed)
    axes = [n for n in step.mesh.axes.values() if n > 1]
    try:
        flat = step.program(*args)
    except md.LayoutError:
        return Counter(illegal=1)
    assert not in_a_row(flat), f"seed {seed}: two collectives could be one\n{flat}"
    if len(axes) < 2:
        return Counter(flat=1)
    leaves, levels = jax.tree.leaves(args), 2 if len(axes) == 2 or seed % 3 else 3
    wanted, counts = md.simulate(flat, *leaves), by_time(step, args, levels)
    try:
        program, on = stepped(flat, step.mesh, levels)
    except md.LayoutError as error:
        assert "no effect" in str(error)
        return Counter(flat=1) + counts
    check(verify(program, "steps"), "steps")
    assert same_bits(md.simulate(program, *leaves), wanted), f"seed {seed}: results differ\n{program}"
    counts += Counter(equal=1) + kinds(program)
    if seed % 4 == 1:
        again = md.compile(step.function, step.mesh, step.layout, steps="always", machine=on)
        cost_law(again.program(*args), again.lower(*args).as_text())
        counts["stablehlo"] += 1
        if seed % 8 == 1:
            results = [np.asarray(x.array) for x in jax.tree.leaves(again(*args), is_leaf=lambda t: hasattr(t, "dims"))]
            assert same_bits(results, md.simulate(again.program(*args), *leaves)), f"seed {seed}: devices differ"
            counts["on devices"] += 1
    return counts


def main() -> int:
    """Check many cases; prints what differs, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, began, different = Counter[str](), time.time(), 0
    for seed in range(options.seed, options.seed + options.cases):
        try:
            counts += case(seed)
        except Exception as error:  # report it and go on with the next case
            different += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    print(json.dumps({**counts, "different": different, "seconds": round(time.time() - began, 1)}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
