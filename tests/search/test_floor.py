"""The floor of plans: no plan is faster, and on one device it explains most of a step."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md
from meshdsl.models import llama, mlp, transformer
from meshdsl.search.api import _compiled
from meshdsl.search.floor import floor, kernels
from tests.search.bounds_law import other_knobs

LM = transformer.lm.replace(batch=16, length=64, layers=2, d_model=64, heads=4, d_head=16, d_ff=128)
MODELS = {
    "mlp": mlp.mlp.replace(batch=64, io=32, hidden=64),
    "lm": LM,
    "attention": LM.replace(attention="auto"),
    "llama": llama.llama.replace(layers=2),
}


CASES = [("mlp", "x:2", "h100", 1), ("lm", "x:2", "tpu-v5e", 2), ("attention", "x:2", "h100", 2)]


@pytest.mark.parametrize(("name", "mesh", "machine", "seed"), CASES)
def test_floor_is_below_the_cost_of_plans(name: str, mesh: str, machine: str, seed: int):
    compiled, args = _compiled(MODELS[name], ())
    assert other_knobs(MODELS[name], compiled, args, mesh, md.machine(machine), seed)


@pytest.mark.parametrize("name", MODELS)
def test_floor_is_most_of_a_step_on_one_device(name: str):
    workload = MODELS[name]
    cost = md.compile(workload.train_step(), "x:1", donate=(0, 1)).cost(*workload.specs(), machine="tpu-v5e").seconds
    graph = md.compile(workload.train_step(), "").graph(*workload.specs())
    seconds = floor(kernels(graph), md.machine("tpu-v5e"), 1)
    assert 0.4 * cost < seconds <= cost


def test_floor_counts_products_reductions_and_updates():
    def step(params: dict[str, Any], x: Any) -> dict[str, Any]:
        loss = lambda p: md.mean(md.square(md.tanh(md.dot(x, p["w"], "io"))))  # noqa: E731
        return {"w": params["w"] - 0.1 * md.grad(loss)(params)["w"], "m": 0.9 * params["m"] + params["w"]}

    weight = md.spec("io:64 hidden:32")
    graph = md.compile(step, "").graph({"w": weight, "m": weight}, md.spec("batch:16 io:64"))
    found = [(work.kind, work.flops, work.reads, work.writes) for work in kernels(graph)]
    size = 64 * 32 * 4
    # the new weight is made in the kernel of its gradient; the average reads two values and writes one
    assert found == [
        ("matmul", 2 * 16 * 64 * 32, 16 * 64 * 4 + size, 0.0),
        *found[1:-1],
        ("result", 0.0, 2 * size, size),
    ]
    assert [kind for kind, *_ in found[1:-1]] == ["matmul"]
    on = md.machine("tpu-v5e")
    works = kernels(graph)
    assert floor(works, on, 4) < floor(works, on, 1) and floor((), on, 1) == 0
