"""Predicted memory of GPUs beside what a compiler without tiles allocates: python -m benchmarks.gpu_memory [NAME ...]

Ten programs on eight CPU devices, in float32, because XLA for CPUs computes in no narrower one. Prints a JSON line for
each: bytes of one device as predicted for `h100` and for `tpu-v5e`, and those that XLA for CPUs allocates, argument +
output + temp - alias of `jax.jit(...).lower(...).compile().memory_analysis()`. XLA for GPUs cannot run here; like the
one for CPUs it has no tiles and calls a library for products. In train steps the one for CPUs allocates more: it joins
all_reduces and writes them beside their operands, and copies a layer's weights, and the operands of the gradients of
convolutions, before it multiplies them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import meshdsl as md
from meshdsl.models import gpt_moe, mlp, resnet, transformer

MLP = mlp.mlp.replace(batch=4096, io=1024, hidden=4096)
LM = transformer.lm.replace(
    layers=4, d_model=512, heads=8, d_head=64, d_ff=2048, vocab=4096, batch=16, length=256, attention="plain"
)
RESNET = resnet.resnet50.replace(blocks=(1, 1, 1, 1), batch=64)
MOE = gpt_moe.gpt_moe.replace(
    experts=8, layers=2, d_model=256, heads=4, d_head=64, d_ff=1024, expert_hidden=1024, vocab=2048, length=256,
    batch=16,
)  # fmt: skip


def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.dot(x, w, "io")


def two_products(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> md.Tensor:
    return md.dot(md.relu(md.dot(x, w, "io")), v, "hidden")


def softmax(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> md.Tensor:
    return md.dot(md.softmax(md.dot(x, w, "io"), "hidden"), v, "hidden")


def convolutions(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> md.Tensor:
    """Two convolutions; TPUs store few channels or images in tiles of 8 x 128."""
    h = md.relu(md.conv(x, w, WINDOW, "batch height width channel", padding="same"))
    return md.conv(h, v, WINDOW, "batch height width last", padding="same")


ROWS = md.spec("batch:4096 io:1024"), md.spec("io:1024 hidden:4096"), md.spec("hidden:4096 out:1024")
IMAGES = md.spec("batch:8 height:224 width:224 color:3"), md.spec("row:3 column:3 color:3 channel:64")
WINDOW = {"height": "row", "width": "column"}
KERNEL = md.spec("row:3 column:3 channel:64 last:64")
FUNCTIONS: dict[str, tuple[Callable[..., md.Tensor], tuple[Any, ...]]] = {
    "product": (product, ROWS[:2]),
    "two products": (two_products, ROWS),
    "softmax": (softmax, ROWS),
    "convolutions, one image": (convolutions, (*IMAGES, KERNEL)),
    "convolutions, eight images": (convolutions, (md.spec("batch:64 height:56 width:56 color:3"), IMAGES[1], KERNEL)),
}
STEPS: dict[str, tuple[md.Workload, md.Plan]] = {
    "mlp sharded update": (MLP, md.Plan(*mlp.LAYOUTS["data"], weight_update="sharded")),
    "lm data": (LM, md.Plan(*transformer.LAYOUTS["data"])),
    "lm data_model, remat": (LM.replace(remat=True), md.Plan(*transformer.LAYOUTS["data_model"])),
    "resnet data": (RESNET, md.Plan(*resnet.LAYOUTS["data"])),
    "moe experts": (MOE, md.Plan(*gpt_moe.LAYOUTS["experts"])),
}


def line(name: str) -> dict[str, Any]:
    """The figures of one program."""
    if name in FUNCTIONS:
        function, specs = FUNCTIONS[name]
        step = md.compile(function, "rows:8", "batch:rows")
    else:
        workload, plan = STEPS[name]
        step, specs = md.compile(workload.train_step(), plan=plan, donate=(0, 1)), workload.specs()
    program, donated = step.program(*specs), step.donated(*specs)
    gpu, tpu = (md.memory(program, donated=donated, machine=machine).peak for machine in ("h100", "tpu-v5e"))
    own = step.lower(*specs).compile().memory_analysis()
    untiled = own.argument_size_in_bytes + own.output_size_in_bytes + own.temp_size_in_bytes - own.alias_size_in_bytes
    ratios = {"h100_over": round(gpu / untiled, 3), "tpu_over": round(tpu / untiled, 3)}
    return {"figure": "gpu_memory", "point": name, "h100": gpu, "tpu-v5e": tpu, "xla_cpu": untiled, **ratios}


def main(names: list[str]) -> None:
    md.host_devices(8)
    for name in names or (*FUNCTIONS, *STEPS):
        print(json.dumps(line(name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
