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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import meshdsl as md
from models import classification, resnet, resnet_names

__all__ = ["LAYOUTS", "Config", "resnet18", "resnet34", "resnet50", "resnet101", "resnet_bn"]

Values = dict[str, md.Tensor]
_IMAGE = ("batch", "height", "width", "color")
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


def network(config: Config, training: bool) -> Callable[[Values], tuple[md.Tensor, Values]]:
    """The function that computes the logits [batch, classes], and the running statistics after the batch, by path."""
    precision = md.nn.Precision(config.param_dtype, config.compute_dtype, config.reduce_dtype)

    def conv(x: md.Tensor, name: str, made: str, into: md.Dim, size: int, stride: int) -> tuple[md.Tensor, Values]:
        """Convolution and norm: [batch, height, width, channels] -> [batch, height, width, into]."""
        pads, over = {"height": (size // 2, size // 2), "width": (size // 2, size // 2)}, x.dims[-1]
        with md.scope(name):
            x = md.nn.conv(
                x, {"height": size, "width": size}, over, md.Dim(made, into.size), stride=stride, padding=pads,
                bias=False, init=md.init.he(fan_in=f"height_window width_window {over.name}"), precision=precision,
            )  # fmt: skip
            x = md.rename(x, **{made: into.name})
            mean = md.param("norm/mean", [into], init=md.init.zeros(), dtype=precision.param)
            var = md.param("norm/var", [into], init=md.init.ones(), dtype=precision.param)
            state, dims = {"mean": mean, "var": var}, ("batch", "height", "width")
            x, state = md.nn.batch_norm(x, dims, state, training=training, unbiased=True, precision=precision)
        return x, {f"{name}/norm/{kind}": value for kind, value in state.items()}

    def block(x: md.Tensor, stage: int, stride: int = 1) -> tuple[md.Tensor, Values]:
        size = config.widths[stage - 1]
        narrow, middle, wide = (f"{kind}{stage}" for kind in ("narrow", "middle", "stage"))
        if config.block == "basic":
            convs = [("conv_1", narrow, middle, size, 3, stride), ("conv_2", wide, wide, size, 3, 1)]
        else:
            inner = ("conv", f"mixed{stage}", middle, size // 4, 3, stride)
            convs = [("reduce", narrow, narrow, size // 4, 1, 1), inner, ("expand", wide, wide, size, 1, 1)]
        y, found = x, dict[str, md.Tensor]()
        for i, (name, made, into, channels, window, step) in enumerate(convs):
            y, state = conv(md.relu(y) if i else y, name, made, md.Dim(into, channels), window, step)
            found |= state
        if x.dims[-1].size == size and stride == 1:
            return md.relu(y + md.rename(x, **{x.dims[-1].name: wide})), found
        x, state = conv(x, "shortcut", wide, md.Dim(wide, size), 1, stride)
        return md.relu(y + x), found | state

    def run(batch: Values) -> tuple[md.Tensor, Values]:
        x, found = conv(md.transpose(batch["image"], _IMAGE), "stem", "stage0", md.Dim("stage0", config.stem), 7, 2)
        pads = {"height": (1, 1), "width": (1, 1)}
        x = md.max_pool(md.relu(x), {"height": 3, "width": 3}, stride=2, padding=pads)
        for stage, depth in enumerate(config.depths, 1):
            first, rest = f"stage{stage}/first", f"stage{stage}/rest"
            with md.scope(first):
                x, state = block(x, stage, stride=1 if stage == 1 else 2)
            found |= {f"{first}/{path}": value for path, value in state.items()}
            if depth > 1:
                with md.scope(rest):
                    layer = md.Dim(f"layer{stage}", depth - 1)
                    x, state = md.layers(partial(block, stage=stage), x, over=layer, collect=True)
                found |= {f"{rest}/{path}": value for path, value in state.items()}
        x = md.rename(md.mean(x, "height width"), **{x.dims[-1].name: "features"})
        return md.nn.dense(x, "features", md.Dim("classes", config.classes), precision=precision), found

    return run


def loss(config: Config, training: bool = True) -> Callable[..., tuple[md.Tensor, Values, Values]]:
    """The loss function: mean cross entropy in nats, no metrics, and the new running statistics."""
    run = md.model(network(config, training))

    def cross_entropy(params: Values, batch: Values) -> tuple[md.Tensor, Values, Values]:
        logits, statistics = run(params, batch)
        return md.mean(md.nn.softmax_cross_entropy(logits, batch["targets"], "classes")), {}, statistics

    return cross_entropy


def model(config: Config) -> md.Model:
    """A model that computes the logits [batch, classes] with the running statistics."""
    return md.model(lambda batch: network(config, training=False)(batch)[0])


def optimizer(config: Config) -> md.optim.Optimizer:
    """SGD with momentum, which leaves the running statistics alone."""
    sgd = md.optim.momentum(config.learning_rate, config.momentum)
    return md.optim.with_frozen(sgd, lambda path: path.endswith(("/norm/mean", "/norm/var")))


resnet_bn = md.Workload(
    "resnet_bn", Config(), model=model, inputs=classification.inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS,
    eval_loss=partial(loss, training=False), hugging_face=resnet_names.HUGGING_FACE,
)  # fmt: skip
_IMAGENET = resnet_bn.replace(batch=32, size=224, classes=1000, stem=64)
resnet18 = _IMAGENET.replace(widths=(64, 128, 256, 512))
resnet34 = resnet18.replace(depths=(3, 4, 6, 3))
resnet50 = _IMAGENET.replace(block="bottleneck", widths=(256, 512, 1024, 2048), depths=(3, 4, 6, 3))
resnet101 = resnet50.replace(depths=(3, 4, 23, 3))
