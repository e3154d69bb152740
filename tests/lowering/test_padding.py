"""No dim is longer than it is: blocks, FLOPs, bytes and memory. The long form is `make laws LAW=padding`."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ir import walk
from meshdsl.layouts import Extents, Mesh, Sharding
from meshdsl.lowering.partition.planner import Reshard
from meshdsl.models.llama import llama
from meshdsl.models.mixtral import mixtral
from tests.lowering.padding_law import explained, ratio

SMALL = {"batch": 64, "length": 8, "vocab": 40, "layers": 2, "d_model": 64, "d_ff": 96, "query_heads": 4, "heads": 2}


def test_blocks_nest_and_are_no_longer_than_their_dim() -> None:
    for size, multiple, least in product(range(20), (1, 2, 6, 8, 12), (1, 2, 3, 4)):
        if multiple % least:
            continue
        extents, dim = Extents({"d": multiple}, {"d": least}), Dim("d", size)
        counts = [n for n in range(1, 13) if not extents.padded(dim) % n]
        assert extents.local(dim, 1) == size
        for n, m in product(counts, counts):
            coarse, fine = extents.local(dim, n), extents.local(dim, m)
            assert fine <= size <= m * fine
            if m % n == 0:  # block i of n is the first elements of blocks i m / n to (i + 1) m / n - 1
                assert coarse <= fine * (m // n)
                starts = [min(i * (m // n) * fine, size) for i in range(n)]
                assert starts == [min(i * coarse, size) for i in range(n)]


@pytest.mark.parametrize("name", ["zero", "zero_context"])
def test_a_layout_that_shards_parameters_needs_no_more_flops(name: str) -> None:
    """On 64 devices, with 2 heads: every value that is not split along a dim has its size there."""
    workload = mixtral.replace(**SMALL)
    mesh = "rows:16 ring:4" if name == "zero_context" else "rows:64"
    step, specs = workload.train_step(), workload.specs()
    program = md.compile(step, mesh, workload.layouts[name][1]).program(*specs)
    for v in {v for eqn, _ in walk(program) for v in (*eqn.ins, *eqn.outs)}:
        for d, n in zip(v.dims, program.local_shape(v), strict=True):
            assert n <= d.size and (v.sharding.axes(d) or n == d.size)
    one = md.compile(step, "", "").program(*specs)
    assert ratio(program, one) <= 1.05 * explained(program).repeated


def test_flops_are_those_that_padding_and_repeated_work_explain() -> None:
    workload = llama.replace(**SMALL)
    one = md.compile(workload.train_step(), "", "").program(*workload.specs())
    for mesh, name in (("cols:8", "model"), ("rows:4 cols:2", "data_model"), ("rows:4 cols:2", "sequence")):
        program = md.compile(workload.train_step(), mesh, workload.layouts[name][1]).program(*workload.specs())
        why = explained(program)
        assert ratio(program, one) == pytest.approx(why.padded * why.repeated, rel=0.05), (name, why)
    report = md.compile(workload.train_step(), "cols:8", workload.layouts["model"][1]).cost(
        *workload.specs(), machine="tpu-v4"
    )
    (heads, *_) = report.padding
    assert (str(heads.dim), heads.stored, heads.idle) == ("heads=2", 8, 6) and heads.flops > 0.1 * report.flops
    assert "heads=2 is stored as 8 over cols" in str(report).replace("\n            ", " ")


@pytest.mark.parametrize("devices", [8, 64])
def test_a_gather_sends_little_more_than_it_joins(devices: int) -> None:
    """A short dim is moved to a longer one first: at most three times its bytes, however many the devices."""
    mesh = Mesh(f"x:{devices}")
    for size in range(1, 2 * devices):
        shape, extents = (Dim("a", size), Dim("b", 8 * devices)), Extents({"a": devices})
        source, joined = Sharding.of({"a": ["x"]}), 4 * size * 8 * devices
        sent = Reshard(source, Sharding(), shape, mesh, extents, 4).cost
        assert sent <= min(3 * joined, joined + 4 * devices * 8 * devices)
        scattered = Reshard(Sharding.of({}, ["x"]), source, shape, mesh, extents, 4).cost
        assert scattered <= min(3 * joined, joined + 4 * devices * 8 * devices)


def test_memory_counts_the_padding_of_a_gather() -> None:
    """Never less than XLA needs, where a gather is trimmed."""

    def step(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.einsum(md.tanh(md.shard(w, {})), x, out="io batch")

    specs = md.spec("heads:9 batch:8"), md.spec("heads:9 io:8191")
    compiled = md.compile(step, "rows:8", md.Layout("", overrides={"w": "heads:rows"}))
    program = compiled.program(*specs)
    gather = next(eqn for eqn in program.eqns if eqn.sends)
    assert program.received_shape(gather) == (16, 8191) and program.local_shape(gather.outs[0]) == (9, 8191)
    own = compiled.lower(*specs).compile().memory_analysis()
    xla = own.temp_size_in_bytes + own.argument_size_in_bytes + own.output_size_in_bytes
    assert compiled.cost(*specs, machine="tpu-v4").peak_bytes >= xla
    x, w = (np.arange(math.prod(d.size for d in spec.dims)).reshape(spec.shape) % 3.0 for spec in specs)
    (result,) = md.simulate(program, x, w)
    assert np.allclose(result, np.tanh(w).T @ x)
