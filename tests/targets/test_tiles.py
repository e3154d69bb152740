"""Arrays of convolutions in tiles: the sizes in the TPU compiler's buffer assignment of a ResNet, and arrays beside."""

from __future__ import annotations

import pytest

import meshdsl as md
from meshdsl.lowering import Program
from meshdsl.targets.tpu.tiles import padding


def convolve(image: md.Tensor, w: md.Tensor, head: md.Tensor) -> md.Tensor:
    y = md.conv(image, w, {"height": "kh", "width": "kw"}, out="batch height width channels")
    return md.dot(md.mean(md.relu(y), "height width"), head, "channels")


def program(batch: int, channels: int, mesh: str = "rows:1", layout: str = "") -> tuple[Program, md.Compiled, tuple]:
    specs = (
        md.spec(f"batch:{batch} height:16 width:16 color:3"),
        md.spec(f"kh:3 kw:3 color:3 channels:{channels}"),
        md.spec(f"channels:{channels} classes:10"),
    )
    step = md.compile(convolve, mesh, layout)
    return step.program(*specs), step, specs


@pytest.mark.parametrize(
    ("batch", "channels", "image", "result"),
    [
        (32, 64, 128 * 4 / (32 * 3), 2.0),  # f32[32,224,224,3]{0,3,2,1:T(4,128)}, f32[32,112,112,64]{3,0,2,1:T(8,128)}
        (32, 256, 128 * 4 / (32 * 3), 1.0),  # f32[32,56,56,256]{3,0,2,1:T(8,128)}
        (4, 192, 128 * 4 / (4 * 3), 256 / 192),
    ],
)
def test_padding_fills_the_tiles_of_batch_and_channels(batch: int, channels: int, image: float, result: float) -> None:
    lowered, *_ = program(batch, channels)
    of, (x, w, head) = padding(lowered), lowered.ins
    values = {eqn.op.name: eqn.outs[0] for eqn in lowered.eqns}
    assert of(x) == image
    assert of(values["conv"]) == of(values["relu"]) == result
    assert of(head) == of(lowered.outs[0]) == 1, "no convolution reads or writes them"
    assert of(w) == 1, "a kernel slides: its layout has no padding here"


def test_padding_is_that_of_local_sizes() -> None:
    lowered, *_ = program(64, 128, "rows:2 cols:2", "batch:rows; channels:cols")
    (conv,) = [eqn for eqn in lowered.eqns if eqn.op.name == "conv"]
    assert padding(lowered)(conv.outs[0]) == 2.0


def test_a_split_convolution_counts_as_one_in_tiles_and_in_the_ledger() -> None:
    lowered, step, specs = program(32, 64, "rows:4", "height:rows")
    (conv,) = [eqn for eqn in lowered.eqns if eqn.op.name == "conv"]
    assert padding(lowered)(conv.outs[0]) == padding(lowered)(conv.ins[0]) * 2 / (128 * 4 / (32 * 3)) == 2.0
    kinds = {line.kind for line in step.cost(*specs, machine="tpu-v5e").ledger.lines if line.eqn is conv}
    assert kinds == {"conv"}


def test_memory_counts_a_copy_of_an_argument_that_a_convolution_reads() -> None:
    lowered, *_ = program(32, 64)
    usage = md.memory(lowered)
    (copy,) = [tensor for tensor in usage.by_tensor if tensor.name.startswith("copy of")]
    assert copy.bytes == 128 * 4 * 16 * 16 * 4
    assert usage.peak == sum(tensor.bytes for tensor in usage.by_tensor)
