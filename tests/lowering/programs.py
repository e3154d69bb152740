"""Random cases for the lowering laws: a program of `maker`, a mesh and a layout, drawn from a seed; and their verdict.

A failure shrinks by dropping operations, layout rules and mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl import backend
from meshdsl.dims import names
from meshdsl.ir import Eqn, Graph
from meshdsl.passes.constants import constant_values
from tests.laws import run
from tests.lowering.maker import LIMIT, Draw, program

MESHES = [
    "x:2", "x:3", "x:4", "x:5", "x:7", "x:8", "x:1", "x:2 y:2", "x:2 y:3", "x:2 y:4", "x:4 y:2", "x:1 y:4", "x:3 y:1",
    "x:3 y:2", "x:2 y:2 z:2", "x:2 y:1 z:3", "x:1 y:2 z:4", "x:2 y:3 z:1",
]  # fmt: skip
Rules = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Case:
    """One program under one layout. Its `repr` reproduces it."""

    seed: int
    ops: int
    mesh: str
    rules: Rules

    @property
    def layout(self) -> md.Layout:
        return md.Layout(dict(self.rules))

    def program(self) -> tuple[Callable[..., Any], list[md.Tensor]]:
        """The function and its arguments."""
        return program(self.seed, self.ops, self.mesh)

    def compiled(self) -> tuple[Any, list[md.Tensor]]:
        """The function under the layout, and its arguments; all layouts of one program share its trace."""
        compiled, args = _undivided(self.seed, self.ops, self.mesh)
        return compiled.under(self.mesh, self.layout), args


@lru_cache(maxsize=2)
def _undivided(seed: int, ops: int, mesh: str) -> tuple[Any, list[md.Tensor]]:
    f, args = program(seed, ops, mesh)
    return md.compile(f, "", ""), args


def draw_layout(rng: Draw, mesh: str, tensors: Sequence[Sequence[str]]) -> Rules:
    """Random rules; most assign an axis to at most one dim of each tensor, so most layouts are legal."""
    careless = rng.random() < 0.1
    axes = list(md.Mesh(mesh).axes)
    rng.shuffle(axes)
    known = sorted({name for t in tensors for name in t})
    rules: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        takers: list[str] = []
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            free = [d for d in known if careless or not any(d in t and set(takers) & set(t) for t in tensors)]
            if free:
                takers.append(rng.choice(free))
        for d in dict.fromkeys(takers):
            rules[d] = (*rules.get(d, ()), axis)
    return tuple(rules.items())


def same_bits(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    """True if all values are equal (-0 equals 0, NaN equals NaN)."""
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.array_equal(a, b, equal_nan=a.dtype.kind in "fV")  # V: bfloat16
        for a, b in zip(got, wanted, strict=True)
    )


def tensors(graph: Graph) -> list[tuple[str, ...]]:
    """The dims of every tensor in the user's own (forward) equations."""
    made = [v for eqn in graph.eqns if not eqn.backward for v in eqn.outs]
    return list(dict.fromkeys(names(v.dims) for v in (*graph.ins, *made)))


def draw(seed: int) -> Case:
    """A case: a mesh, a program of three to eight operations, and a layout over the program's dims."""
    rng = Draw(seed)
    case = Case(seed, rng.randint(3, 8), rng.choice(MESHES), ())
    compiled, args = _undivided(case.seed, case.ops, case.mesh)
    return replace(case, rules=draw_layout(rng, case.mesh, tensors(compiled.graph(*args))))


def sent_though_constant(program: Graph) -> list[Eqn]:
    """Collectives, including those in loops, that send a value every device can compute without operands."""
    constants = constant_values(program)
    found = [eqn for eqn in program.eqns if eqn.sends and eqn.ins[0] in constants]
    return found + [sent for eqn in program.eqns for sub in eqn.graphs().values() for sent in sent_though_constant(sub)]


def judge(case: Case) -> str:
    """The verdict: "ok"; "illegal" for the layout; "large" if sums may be inexact; otherwise the failure."""
    compiled, args = case.compiled()
    arrays = [x.numpy() for x in args]
    wanted = run(compiled.graph(*args), arrays, backend.NumPy)
    if any(x.dtype.kind == "f" and not (np.abs(x) < LIMIT).all() for x in wanted):
        return "large"
    try:
        program = compiled.program(*args)
        got = md.simulate(program, *arrays)
    except md.LayoutError:
        return "illegal"
    except Exception as error:  # any other exception is a finding
        return f"{type(error).__name__}: {error}"
    if sent := sent_though_constant(program):
        return f"sends {sent[0].ins[0]!r}, which every device can make"
    different = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if not same_bits([a], [b])]
    return f"results {different} differ" if different else "ok"


FINE = ("ok", "illegal", "large")


def shrink(case: Case) -> Case:
    """A smaller case that also fails: fewer operations, fewer rules."""
    while True:
        smaller = [replace(case, ops=case.ops - 1)] if case.ops > 1 else []
        smaller += [replace(case, rules=case.rules[:k] + case.rules[k + 1 :]) for k in range(len(case.rules))]
        wrong = next((c for c in smaller if judge(c) not in (*FINE, "illegal")), None)
        if wrong is None:
            return case
        case = wrong
