"""No collective is idle: a program gives other results with one dropped, doubled, misdirected or wrong in scale.

A mutant claims the sharding that the right collective makes, so the type checker is silent and results have to tell;
the honest mutants, which say what they do, are caught by the checker alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.dims import Shape
from meshdsl.ir import Eqn, Type, walk
from meshdsl.layouts import Mesh, Sharding
from meshdsl.lowering import Program
from meshdsl.lowering.check import check
from meshdsl.lowering.collectives import AllReduce, ReduceScatter
from meshdsl.lowering.ragged import RaggedAllToAll
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm

MLP = mlp.replace(batch=6, io=6, hidden=10)
BASE = lm.replace(batch=4, length=4, vocab=10, layers=2, d_model=6, heads=2, d_head=2, d_ff=4, clip_norm=1.0)


def weighted(config: Any) -> Any:
    """The language model's loss with a weight for each place: under a plain mean all places have equal gradients."""
    logits_of = BASE.model(config)

    def loss(params: Any, batch: dict[str, md.Tensor]) -> md.Tensor:
        each = md.nn.softmax_cross_entropy(logits_of(params, batch), batch["targets"])
        return md.sum(each * batch["weights"])

    return loss


def inputs(config: Any) -> dict[str, Any]:
    tokens = BASE.inputs(config)
    return {**tokens, "weights": md.spec(tokens["targets"].dims)}


LM = dataclasses.replace(BASE, loss=weighted, inputs=inputs)
# Axes of equal size, so that sizes do not give a wrong axis away; a batch and a vocabulary that need padding.
PROGRAMS = [
    (MLP, "r:4", "batch:r"),
    (MLP, "r:4", "hidden:r"),
    (MLP, "r:2 c:2", "batch:r; hidden:c"),
    (MLP, "r:2 c:2 p:2", "batch:r; hidden:c; io:p"),
    pytest.param(LM, "r:2 c:2", "batch:r; vocab:c; d_ff:c; heads:c", marks=pytest.mark.slow),
    (LM, "r:2 c:2", "batch:r; length:c; vocab:c; d_ff:c; heads:c"),
]
Blocks = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A collective that does something else and says that it does not."""

    right: Any
    how: str
    wrong_axes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.right.name

    @property
    def sends(self) -> bool:
        return True

    @property
    def axes(self) -> tuple[str, ...]:
        return self.right.axes

    @property
    def effect(self):
        return self.right.effect

    def __str__(self) -> str:
        return f"{self.how} {self.right}"

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        return self.right.step(before, mesh)

    def wire_dtype(self, dtype: Any) -> Any:
        return self.right.wire_dtype(dtype)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return self.right.bytes_sent(local_bytes, mesh)

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh, *counts: Blocks) -> Blocks:
        right = self.right.simulate(blocks, shape, before, mesh, *counts)
        n = mesh.count(self.axes)
        match self.how:
            case "dropped":
                return [_resized(x, y.shape) for x, y in zip(blocks, right, strict=True)]
            case "doubled":
                return [y * n for y in right]  # the sum of n equal sums
            case "mean of":
                return [(y / n).astype(y.dtype) for y in right]
            case "wrong axis in":
                return dataclasses.replace(self.right, axes=self.wrong_axes).simulate(
                    blocks, shape, before, mesh, *counts
                )
            case "max instead of" | "sum instead of" | "min instead of":
                return dataclasses.replace(self.right, kind=self.how[:3]).simulate(blocks, shape, before, mesh)
            case "one slot less of":
                told = [[np.clip(n - 1, 0, None) for n in side] for side in counts]
                return self.right.simulate(blocks, shape, before, mesh, *told)
        raise AssertionError(self.how)


def _resized(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A device's own block where nothing came: repeated where it should have grown, cut where it should have shrunk."""
    for axis, size in enumerate(shape):
        if x.shape[axis] < size:
            x = np.concatenate([x] * (size // x.shape[axis]), axis)
        x = x.take(range(size), axis)
    return x


def mutants(right: Any, mesh: Mesh) -> Iterator[Mutant]:
    """Everything that can be wrong with one collective and is not right by mathematics (a maximum twice is one)."""
    yield Mutant(right, "dropped")
    if isinstance(right, AllReduce | ReduceScatter) and right.kind == "sum":
        yield Mutant(right, "doubled")
        yield Mutant(right, "mean of")
    if isinstance(right, AllReduce):
        for kind in {"sum", "max", "min"} - {right.kind}:
            yield Mutant(right, f"{kind} instead of")
    if isinstance(right, RaggedAllToAll):
        yield Mutant(right, "one slot less of")
    if right.name != "permute":
        free = [a for a in mesh.axes if a not in right.axes and mesh.axes[a] == mesh.axes[right.axes[0]]]
        for axis in free:
            yield Mutant(right, "wrong axis in", (axis, *right.axes[1:]))


def with_op(program: Any, old: Eqn, op: Any) -> Program:
    """The program with another operation in one equation, wherever it is."""

    def swapped(eqn: Eqn) -> Eqn:
        if eqn is old:
            return dataclasses.replace(eqn, op=op)
        return eqn.map_graphs(lambda body: with_op(body, old, op))

    return program.replace(eqns=tuple(swapped(eqn) for eqn in program.eqns))


def arguments(workload: md.Workload, scale: float) -> list[np.ndarray]:
    """Random values for a train step; at a large scale logits overflow unless they are shifted by their maximum."""
    random = np.random.default_rng(0)

    def values(path: Any, kind: Type) -> np.ndarray:
        sizes = [d.size for d in kind.dims]
        if kind.dtype.kind in "iu":
            return np.asarray(random.integers(0, 4, sizes), kind.dtype)
        x = random.normal(size=sizes) * (scale if "embed" in jax.tree_util.keystr(path) else 1)
        return np.asarray(0 * x if path[0].idx == 1 else x, kind.dtype)  # an optimizer's first step shows its gradients

    return jax.tree_util.tree_leaves(jax.tree_util.tree_map_with_path(values, workload.specs()))


def differ(got: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return any(
        not np.allclose(a, b, rtol=1e-4, atol=1e-5 * np.max(np.abs(b), initial=0, where=np.isfinite(b)), equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )


def noticed(program: Program, runs: list[tuple[list[np.ndarray], list[np.ndarray]]]) -> str:
    for inputs, wanted in runs:
        try:
            if differ(md.simulate(program, *inputs), wanted):
                return "by its results"
        except (md.InternalError, ValueError):
            return "by devices that disagree, or by sizes"
    return ""


@pytest.mark.parametrize(("workload", "mesh", "layout"), PROGRAMS, ids=lambda x: getattr(x, "name", str(x)))
def test_every_mutant_is_noticed(
    workload: md.Workload, mesh: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = md.compile(workload.train_step(), mesh, layout).program(*workload.specs())
    runs = [(inputs, md.simulate(program, *inputs)) for inputs in (arguments(workload, s) for s in (1, 1000))]
    counts: Counter[str] = Counter()
    for eqn, _ in walk(program):
        if not eqn.sends:
            continue
        for mutant in mutants(eqn.op, program.mesh):
            how = noticed(with_op(program, eqn, mutant), runs)
            assert how, f"nobody notices: {mutant} at {eqn.where} ({eqn.cause})"
            counts[how] += 1
            counts["all"] += 1
    with capsys.disabled():
        print(f"mutants: {workload.name} under {layout!r}: {dict(counts)}")
    assert counts["all"] >= 3


def test_the_checker_alone_notices_a_collective_that_is_left_out_or_says_other_axes() -> None:
    program = md.compile(MLP.train_step(), "r:2 c:2", "batch:r; hidden:c").program(*MLP.specs())
    for eqn, _ in walk(program):
        if isinstance(eqn.op, AllReduce):
            for axes in (("c",), ("r",)):
                if axes != eqn.op.axes:
                    with pytest.raises(md.InternalError):
                        check(with_op(program, eqn, AllReduce(axes)), "mutant")
            left_out = {eqn.outs[0]: eqn.ins[0]}
            rest = [e for e in program.eqns if e is not eqn]
            eqns = tuple(dataclasses.replace(e, ins=tuple(left_out.get(v, v) for v in e.ins)) for e in rest)
            if eqn.outs[0] not in program.outs:
                with pytest.raises(md.InternalError):
                    check(program.replace(eqns=eqns), "mutant")
