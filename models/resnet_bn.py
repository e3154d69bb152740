"""ResNet with running statistics of batch norm (He et al., 2016; stride in the 3 x 3 convolution, "v1.5").

    x = pool(relu(norm(conv(image))))
    for each block:  x = relu(norm(conv3(relu(norm(conv3(x))))) + x)                              ("basic")
                     x = relu(norm(conv1(relu(norm(conv3(relu(norm(conv1(x)))))))) + x)           ("bottleneck")
    logits = mean over height and width of x, times w, plus b;  loss = mean over batch of the cross entropy

The running statistics are parameters without a gradient: the loss returns their new values, and a step stores them.
Training normalises with the statistics of the whole batch on all devices, the model and the loss of evaluation with the
running ones. The layouts, and the dims of channels, are those of models/resnet.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import classification, resnet, resnet_names

__all__ = ["LAYOUTS", "Config", "resnet18", "resnet34", "resnet50", "resnet101", "resnet_bn"]

LAYOUTS = resnet.LAYOUTS


@dataclass(frozen=True)
class Config:
    """Sizes and options; the defaults fit a laptop."""

    batch: int = 8
    size: int = 32  # height and width of an image
    color: int = 3
    classes: int = 10
    stem: int = 8  # channels of the first convolution
    widths: tuple[int, ...] = (8, 16, 32, 64)  # channels of the result of each stage
    depths: tuple[int, ...] = (2, 2, 2, 2)  # blocks of each stage
    block: str = "basic"  # or "bottleneck"
    learning_rate: float = 0.1
    momentum: float = 0.9
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"


def network(config: Config, training: bool) -> classification.StatefulNetwork:
    """The function that computes the logits [batch, classes], and the running statistics after the batch."""
    precision = md.nn.Precision(config.param_dtype, config.compute_dtype, config.reduce_dtype)

    def conv(
        x: md.Tensor, name: str, size: int, output: md.Dim, stride: int = 1, into: str = ""
    ) -> tuple[md.Tensor, Any]:
        """Convolution to the channels `made`, renamed to `into`, and norm: [batch, height, width, channels]."""
        window, pads, over = {"height": size, "width": size}, (size // 2, size // 2), x.dims[-1].name
        init = md.init.he(fan_in=f"height_window width_window {over}")
        with md.scope(name):
            x = md.nn.conv(
                x, window, over, output, stride=stride, padding={"height": pads, "width": pads}, bias=False, init=init,
                precision=precision,
            )  # fmt: skip
            x = md.rename(x, **{output.name: into or output.name})
            x, statistics = classification.batch_norm(x, ("batch", "height", "width"), training, precision)
        return x, {name: statistics}

    def block(x: md.Tensor, stage: int, stride: int = 1) -> tuple[md.Tensor, Any]:
        channels, size, middle = x.dims[-1], config.widths[stage - 1], f"middle{stage}"
        wide = md.Dim(f"stage{stage}", size)
        if config.block == "basic":
            y, first = conv(x, "conv_1", 3, md.Dim(f"narrow{stage}", size), stride, into=middle)
            y, last = conv(md.relu(y), "conv_2", 3, wide)
        else:
            narrow, mixed = md.dims(f"narrow{stage}:{size // 4} mixed{stage}:{size // 4}")
            y, first = conv(x, "reduce", 1, narrow)
            y, second = conv(md.relu(y), "conv", 3, mixed, stride, into=middle)
            y, last = conv(md.relu(y), "expand", 1, wide)
            first = first | second
        if channels.size == size and stride == 1:
            return md.relu(y + md.rename(x, **{channels.name: wide.name})), first | last
        x, shortcut = conv(x, "shortcut", 1, wide, stride)
        return md.relu(y + x), first | last | shortcut

    def run(batch: dict[str, md.Tensor]) -> tuple[md.Tensor, Any]:
        image = md.transpose(batch["image"], ["batch", "height", "width", "color"])
        x, statistics = conv(image, "stem", 7, md.Dim("stage0", config.stem), stride=2)
        pads = {"height": (1, 1), "width": (1, 1)}
        x = md.max_pool(md.relu(x), {"height": 3, "width": 3}, stride=2, padding=pads)
        for stage, depth in enumerate(config.depths, 1):
            first, rest = f"stage{stage}/first", f"stage{stage}/rest"
            with md.scope(first):
                x, statistics[first] = block(x, stage, stride=1 if stage == 1 else 2)
            if depth > 1:
                with md.scope(rest):
                    layer = md.Dim(f"layer{stage}", depth - 1)
                    x, statistics[rest] = md.layers(partial(block, stage=stage), x, over=layer, collect=True)
        x = md.rename(md.mean(x, "height width"), **{x.dims[-1].name: "features"})
        return md.nn.dense(x, "features", md.Dim("classes", config.classes), precision=precision), statistics

    return run


resnet_bn = classification.stateful_workload(
    "resnet_bn", Config(), network, layouts=LAYOUTS, hugging_face=resnet_names.HUGGING_FACE,
    optimizer=lambda config: md.optim.momentum(config.learning_rate, config.momentum),
)  # fmt: skip
_IMAGENET = resnet_bn.replace(batch=32, size=224, classes=1000, stem=64)
resnet18 = _IMAGENET.replace(widths=(64, 128, 256, 512))
resnet34 = resnet18.replace(depths=(3, 4, 6, 3))
resnet50 = _IMAGENET.replace(block="bottleneck", widths=(256, 512, 1024, 2048), depths=(3, 4, 6, 3))
resnet101 = resnet50.replace(depths=(3, 4, 23, 3))
