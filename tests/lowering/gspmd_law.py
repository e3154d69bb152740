"""We send at most what GSPMD sends: `python -m tests.lowering.gspmd_law --programs 200`.

Both compilers get the same traced graph and the same shardings of inputs and results: random programs with gradients,
every workload of models/ under its own layouts, and steps of published sizes (`figures.py`). GSPMD's program is
`jax.jit` of the unsplit program's kernels on eight CPU devices, its collectives are those of the compiled HLO, the
trips of loops counted. A collective counts the bytes that one device sends along a ring. Everything is float32, because
XLA's CPU compiler sends bfloat16 as float32.

The last line is JSON; the exit status is 1 if something that is not in `EXCEPTIONS` sends more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices, as in the tests
from benchmarks import hlo
from meshdsl.dims import Dim
from meshdsl.ir import Graph
from meshdsl.layouts import Layout
from meshdsl.lowering import Program
from meshdsl.tools.compilers.gspmd import gspmd
from tests.lowering.figures import figures
from tests.lowering.ledger_law import workloads
from tests.lowering.maker import Draw, Maker
from tests.lowering.programs import draw_layout, tensors

MESHES = ["x:8", "x:2 y:4", "x:4 y:2", "x:2 y:2 z:2"]
SIZES = [16, 32, 64]
SLACK = 64  # bytes: XLA may leave out a number, or send one with another

# Where GSPMD sends less, by workload and layout, and why. One device computes 15.9 GFLOP of `moe` under `data` and 4.1
# under `experts` (XLA's cost analysis, loop bodies once): the dispatched tokens f32[16,8,16,256] are summed onto every
# device, and each computes all experts, so that their weights' gradients need no reduction. Both layouts send the same
# 68 MB, because one all-reduce of the tokens sends as much as the two all-gathers under `experts`.
EXCEPTIONS = {
    (
        "gpt_moe",
        "data",
    ): "GSPMD sums all tokens onto every device and repeats the experts' products there",
    ("moe", "data"): "as gpt_moe",
    (
        "resnet_bn",
        "spatial",
    ): "GSPMD gathers the last feature maps, of 4 and 2 rows, and every column repeats their convolutions",
}


def ring_bytes(collective: hlo.Collective) -> float:
    """The bytes that one device sends."""
    n, size = collective.group, collective.bytes
    return {"all_reduce": 2 * (n - 1) / n * size, "permute": size}.get(collective.kind, (n - 1) / n * size)


def gspmd_bytes(graph: Graph, program: Program) -> float:
    """Bytes that one device sends in GSPMD's program for the graph, with our shardings of inputs and results."""
    return sum(ring_bytes(c) * n for c, n in hlo.collectives(gspmd(graph, program)).items())


def our_bytes(program: Program) -> int:
    """The bytes that one device sends in our program."""
    return round(sum(record.wire_bytes * record.count for record in program.collectives))


class Layers(Maker):
    """Operations that models consist of, over the dims of the inputs: GSPMD is told how inputs are split, no more.

    A dim that an operation makes would be split by our layout and not by GSPMD, so no operation makes one.
    """

    def __init__(self, rng: Any, live: list[md.Tensor], axes: Any, depth: int = 0):
        super().__init__(rng, live, axes, depth)
        kinds = [
            "add",
            "mul",
            "einsum",
            "relu",
            "sum",
            "max",
            "transpose",
            "centre",
            "norm",
            "scale",
            "loop",
            "softmax",
        ]
        self.kinds = [f"op_{kind}" for kind in kinds if not (depth and kind == "loop")]

    def op_centre(self, x: md.Tensor) -> md.Tensor:
        d = self.dim(x)
        return x if d is None else x - md.mean(x, d)

    def op_norm(self, x: md.Tensor) -> md.Tensor:
        d = self.dim(x)
        return x if d is None else (x - md.mean(x, d)) / md.sqrt(md.var(x, d) + 1.0)

    def op_softmax(self, x: md.Tensor) -> md.Tensor:
        d = self.dim(x)
        return x if d is None else md.softmax(x, d)

    def op_scale(self, x: md.Tensor) -> md.Tensor:
        return self.rng.choice([lambda: x * 2, lambda: md.square(x), lambda: md.tanh(x), lambda: x + x])()

    def op_mul(self, x: md.Tensor) -> md.Tensor:
        x, y = self.pair(x)
        return x * y

    def op_loop(self, x: md.Tensor) -> md.Tensor:
        y, n, seed = self.pick(), self.rng.randint(1, 2), self.rng.getrandbits(48)

        def body(carry: md.Tensor, _: Any) -> Any:
            maker = Layers(Draw(seed), [carry], self.axes, self.depth + 1)
            lacking = [d for d in y.dims if d not in carry.dims]  # XLA moves what uses y alone out of the loop
            maker.live.append(maker.bounded(md.broadcast(carry, [*lacking, *carry.dims]) * y))
            for _step in range(n):
                maker.step()
            made = maker.live[-1]
            made = md.sum(made, [d for d in made.dims if d not in carry.dims])
            return md.tanh(carry + made), ()

        return md.scan(body, x, (), over=Dim("trip", 3))[0]

    def bounded(self, x: md.Tensor) -> md.Tensor:
        while len(x.dims) > 3:
            x = md.sum(x, x.dims[0])
        return x

    def loss(self) -> md.Tensor:
        total = md.tensor(0.0)
        for x in self.live[-3:]:
            total = total + md.sum(md.square(x))
        return total


def random_case(seed: int) -> tuple[Graph, Program] | None:
    """A program with its gradients, partitioned under a random layout; None for an illegal one."""
    rng = Draw(seed)
    mesh, ops = rng.choice(MESHES), rng.randint(2, 6)
    pool = [Dim(name, rng.choice(SIZES)) for name in "abcd"]
    specs = [md.spec(rng.sample(pool, rng.choice([2, 2, 3]))) for _ in range(3)]

    def forward(*xs: md.Tensor) -> md.Tensor:
        maker = Layers(Draw(seed + 1), list(xs), list(md.Mesh(mesh).axes))
        for _ in range(ops):
            maker.step()
        return maker.loss()

    def step(*xs: md.Tensor) -> Any:
        value, grads = md.value_and_grad(forward, argnums=range(len(xs)))(*xs)
        return value, *(x - g for x, g in zip(xs, grads, strict=True))

    known = tensors(md.compile(step, "", "").graph(*specs))
    given = {d.name for spec in specs for d in spec.dims}
    rules = {d: axes for d, axes in draw_layout(rng, mesh, known) if d in given}
    compiled = md.compile(step, mesh, Layout(rules))
    try:
        return (compiled.graph(*specs), compiled.program(*specs)) if rules else None
    except md.LayoutError:
        return None


def cases(seeds: Iterable[int]) -> Iterator[tuple[int, int, float]]:
    """The seeds whose programs are legal and send something, with our bytes and GSPMD's."""
    for seed in seeds:
        case = random_case(seed)
        if case is not None and case[1].collectives:
            yield seed, our_bytes(case[1]), gspmd_bytes(*case)


def model_cases(only: list[str] | None) -> Iterator[tuple[str, str, int, float]]:
    """Workloads and larger steps under their layouts, with our bytes and GSPMD's."""
    steps = (
        (workload.name, name, workload.train_step(), workload.specs(), mesh, layout)
        for workload in workloads()
        for name, (mesh, layout) in workload.layouts.items()
    )
    larger = ((name, layout, step, args, mesh, layout) for name, step, args, mesh, layout in figures())
    for model, name, step, args, mesh, layout in chain(steps, larger):
        if not layout or (only and model not in only):
            continue
        compiled = md.compile(step, mesh, layout)
        program = compiled.program(*args)
        if any(program.is_padded(v, d) for v in (*program.ins, *program.outs) for d in v.dims):
            continue  # jit refuses to split a dim unevenly
        yield model, name, our_bytes(program), gspmd_bytes(compiled.graph(*args), program)


def main() -> int:
    """A line of JSON for each model and layout, and one for the programs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    parser.add_argument("--no-models", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, layout, ours, theirs in () if options.no_models else model_cases(options.workload):
        more = ours > theirs + SLACK
        counts["models_more"] += more and (name, layout) not in EXCEPTIONS
        line = {"workload": name, "layout": layout, "bytes": ours, "gspmd_bytes": round(theirs)}
        print(json.dumps(line | {"ratio": round(ours / max(theirs, 1), 3)}), flush=True)
    for seed, ours, theirs in islice(cases(count(options.seed)), options.programs):
        counts["programs"] += 1
        counts["bytes"] += ours
        counts["gspmd_bytes"] += round(theirs)
        if ours > theirs + SLACK:
            counts["programs_more"] += 1
            print(f"program {seed}: {ours} bytes, GSPMD {theirs:.0f}", file=sys.stderr)
    print(json.dumps({"random programs": dict(counts)}))
    return 1 if counts["models_more"] + counts["programs_more"] else 0


if __name__ == "__main__":
    sys.exit(main())
