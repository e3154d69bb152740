"""A machine's memory, overlap and passes are those of its target, and a made-up accelerator is one more entry."""

from __future__ import annotations

import dataclasses

import pytest

import meshdsl as md
from meshdsl import targets
from meshdsl.lowering.program import Program
from meshdsl.targets import Target
from meshdsl.targets.tpu.emission import left_out

IMAGES = md.spec("batch:8 height:112 width:112 color:4"), md.spec("row:3 column:3 color:4 channel:64")


def convolution(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    window = {"height": "row", "width": "column"}
    return md.conv(x, w, window, "batch height width channel", padding="same")


@pytest.mark.parametrize("machine", ["h100", "a100-p4de", "mi300x"])
def test_memory_of_a_gpu_has_no_tiles(machine: str) -> None:
    """Its bytes are those that XLA for CPUs allocates, which has no tiles either."""
    step = md.compile(convolution, "rows:8", "batch:rows")
    program = step.program(*IMAGES)
    peak = md.memory(program, machine=machine).peak
    own = step.lower(*IMAGES).compile().memory_analysis()
    allocated = own.argument_size_in_bytes + own.output_size_in_bytes + own.temp_size_in_bytes
    assert peak == step.cost(*IMAGES, machine=machine).peak_bytes == pytest.approx(allocated, rel=0.01)
    assert md.memory(program, machine="tpu-v5e").peak > 1.4 * peak


def exchange(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    """An all_to_all, and a product that does not wait for it."""
    return md.shard(md.exp(x), {"columns": "rows"}), md.dot(w, v, "io")


EXCHANGED = md.spec("batch:2048 columns:2048"), md.spec("token:2048 io:2048"), md.spec("io:2048 out:2048")


def wafer(asynchronous: tuple[str, ...]) -> md.Machine:
    return dataclasses.replace(md.machine("tpu-v5e"), name="wafer", device="wafer", asynchronous=asynchronous)


def test_a_made_up_accelerator_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has asynchronous all_to_alls, no tiles, and a pass of its own; nothing else of the package knows it."""
    prepared: list[str] = []

    def prepare(program: Program) -> Program:
        prepared.append(str(program.mesh))
        return program

    target = Target("wafer", devices=("wafer",), passes=(("prepare wafers", prepare),))
    monkeypatch.setattr(targets, "TARGETS", (*targets.TARGETS, target))
    machine = wafer(("all_to_all",))
    assert machine.target is target

    program = md.compile(convolution, "rows:8", "batch:rows").program(*IMAGES)
    assert md.memory(program, machine=machine).peak == md.memory(program, machine="h100").peak
    assert prepared == ["rows:8"]

    step = md.compile(exchange, "rows:4", "batch:rows token:rows", overlap="list", machine=machine)
    history = step.history(*EXCHANGED)
    assert [stage.name for stage in history.stages][-2:] == ["prepare wafers", "order prints"]
    windows = step.overlap.windows
    assert {window.collective.split()[0] for window in windows} == {"all_to_all"}
    assert any(window.inside for window in windows)
    with pytest.raises(md.LayoutError, match="sends nothing that wafer can overlap"):
        md.compile(exchange, "rows:4", "batch:rows token:rows", overlap="list", machine=wafer(())).program(*EXCHANGED)


def test_passes_are_those_of_the_machine() -> None:
    """A program that is compiled here costs what the machine's compiler gets; preparing it again changes nothing."""

    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        layer = md.checkpoint(lambda h, row: md.tanh(h * row))
        return md.sum(md.scan(lambda h, row: (layer(h, row), None), x, w, over="layer")[0])

    program = md.compile(md.grad(loss), "rows:2", "batch:rows").program(md.spec("layer:3 batch:4"), md.spec("batch:4"))
    tpu, gpu = (md.machine(name).target.prepare(program) for name in ("tpu-v5e", "h100"))
    assert [str(one).count(" = barrier ") for one in (program, tpu, gpu)] == [2, 0, 2]
    assert targets.TPU.prepare(tpu) is tpu and gpu is program


def test_products_with_weights_are_emitted_without_the_stages_of_a_pipeline() -> None:
    """A dim of local size 1 of all three arrays; but a softmax over a wide dim, with a batch, keeps its own."""

    def left(mesh: str, x: str, w: str, out: str) -> set[str]:
        specs = md.spec(x), md.spec(w)
        program = md.compile(lambda x, w: md.einsum(x, w, out=out), mesh, "stage:stages").program(*specs)
        eqn = next(eqn for eqn in program.eqns if eqn.operation.product)
        return {dim.name for dim in left_out(eqn, [program.block(v) for v in (*eqn.ins, *eqn.outs)])}

    tokens = "stage:4 batch:8 length:512 model:1024"
    assert left("stages:4", tokens, "stage:4 model:1024 d_ff:4096", "stage batch length d_ff") == {"stage"}
    assert left("stages:4", tokens, "model:1024 d_ff:4096", "stage batch length d_ff") == set()
    assert left("stages:2", tokens, "stage:4 model:1024 d_ff:4096", "stage batch length d_ff") == set()
    keys = "stage:4 batch:8 key:4096 model:1024"
    assert left("stages:4", tokens, keys, "stage batch length key") == set()
