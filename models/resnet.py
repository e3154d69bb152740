"""A residual network of bottlenecks for images (He et al., 2016; stride in the 3 x 3 convolution, "v1.5").

    x = pool(relu(norm(conv(image))))
    for each block:  x = relu(norm(conv1(relu(norm(conv3(relu(norm(conv1(x)))))))) + x)
    logits = mean over height and width of x, times w;  loss = mean over batch of the cross entropy

Each stage after the first halves height and width, doubles the channels, and projects x in its first block; its other
blocks are equal and run as one scan. The channel dims of stage i are `narrow{i}` (after the first convolution of a
block), `middle{i}` (after the second) and `stage{i}`, so that a layout can shard them separately: with `narrow` and
`middle` sharded, a block reduces twice, by reduce-scatter into `middle` and by all-reduce into `stage`.

Batch normalisation takes its means over the dims batch, height and width, so they are means of the whole batch under
every layout. There are no running means: evaluation normalises with the evaluated batch. Group normalisation (Wu and
He, 2018) does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

import meshdsl as md
from meshdsl.models import classification

__all__ = [
    "Config", "LAYOUTS", "digits", "digits_batch", "held_out_digits", "inputs", "loss", "model", "optimizer",
    "resnet50",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Sizes and options; the defaults are ResNet-50 for 224 x 224 images and 1000 classes."""

    batch: int = 32
    height: int = 224
    width: int = 224
    color: int = 3
    classes: int = 1000
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    stem: int = 64  # channels of the first convolution, and of `narrow` in the first stage
    expansion: int = 4  # ratio of `stage` to `narrow`
    stem_size: int = 7  # size of the first kernel
    stem_stride: int = 2
    stem_pool: int = 3  # size of the first pool, which has stride 2; 0: no pool
    norm: str = "batch"  # or "group"
    groups: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.9
    dtype: str = "float32"


_MODEL = "; ".join(f"narrow{i}:cols; middle{i}:cols" for i in range(1, 5))
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "channels": ("rows:2 cols:4", f"batch:rows; {_MODEL}"),
    "spatial": ("rows:2 cols:4", "batch:rows; height:cols"),
}


def inputs(config: Config) -> dict[str, object]:
    """The specs of a batch: images [batch, height, width, color], and their classes [batch]."""
    batch = md.Dim("batch", config.batch)
    sizes = [md.Dim("height", config.height), md.Dim("width", config.width), md.Dim("color", config.color)]
    return {"image": md.spec([batch, *sizes], config.dtype), "target": md.spec(batch, "int32")}


def model(config: Config) -> md.Model:
    """A model that computes the logits [batch, classes]."""
    precision = md.nn.Precision(config.dtype, config.dtype, config.dtype)

    def conv(x: md.Tensor, name: str, over: md.Dim, into: md.Dim, size: int = 1, stride: int = 1) -> md.Tensor:
        """Convolution with a kernel [kh, kw, over, into]."""
        kernel = md.dims(f"kh:{size} kw:{size}")
        w = md.param(name, [*kernel, over, into], init=md.init.he(fan_in=[*kernel, over]), dtype=config.dtype)
        window, pads = {"height": "kh", "width": "kw"}, (size // 2, size // 2)
        padding = {"height": pads, "width": pads}
        return md.conv(x, w, window, ["batch", "height", "width", into], stride=stride, padding=padding)

    def norm(x: md.Tensor, name: str, channels: md.Dim, scale: float = 1.0) -> md.Tensor:
        if config.norm == "group":
            groups = md.dims(f"group:{config.groups} member:{channels.size // config.groups}")
            apart, over = md.unflatten(x, channels, groups), ("height", "width", "member")
        else:
            apart, over = x, ("batch", "height", "width")
        y = md.nn.layer_norm(apart, over, scale=False, bias=False, precision=precision)
        y = md.reshape(y, x.dims)
        with md.scope(name):
            scales = md.param("scale", channels, init=md.init.constant(scale), dtype=config.dtype)
            return y * scales + md.param("bias", channels, init=md.init.zeros(), dtype=config.dtype)

    def bottleneck(x: md.Tensor, stage: int, stride: int = 1) -> md.Tensor:
        """A bottleneck block: [batch, height, width, channels] -> [batch, height, width, stage]."""
        channels, size = x.dims[-1], config.stem * 2 ** (stage - 1)
        narrow, mixed, middle = md.dims(f"narrow{stage}:{size} mixed{stage}:{size} middle{stage}:{size}")
        wide = md.Dim(f"stage{stage}", size * config.expansion)
        y = md.relu(norm(conv(x, "conv_1", channels, narrow), "norm_1", narrow))
        y = md.rename(conv(y, "conv_2", narrow, mixed, 3, stride), **{mixed.name: middle})
        y = md.relu(norm(y, "norm_2", middle))
        y = norm(conv(y, "conv_3", middle, wide), "norm_3", wide, scale=0.0)  # each block starts as the identity
        if channels != wide:
            x = norm(conv(x, "project", channels, wide, 1, stride), "norm_project", wide)
        return md.relu(y + x)

    def resnet(batch: dict[str, md.Tensor]) -> md.Tensor:
        image, wide = batch["image"], md.Dim("stage0", config.stem)
        with md.scope("stem"):
            x = conv(image, "conv", image.dims[-1], wide, config.stem_size, config.stem_stride)
            x = md.relu(norm(x, "norm", wide))
        if config.stem_pool:
            low, size = (config.stem_pool - 1) // 2, config.stem_pool
            padding = {"height": (low, size - 1 - low), "width": (low, size - 1 - low)}
            x = md.max_pool(x, {"height": size, "width": size}, stride=2, padding=padding)
        for stage, depth in enumerate(config.blocks, 1):
            with md.scope(f"stage{stage}"):
                with md.scope("first"):
                    x = bottleneck(x, stage, stride=1 if stage == 1 else 2)
                if depth > 1:
                    with md.scope("rest"):
                        x = md.layers(partial(bottleneck, stage=stage), x, over=md.Dim(f"layer{stage}", depth - 1))
        features = md.mean(x, "height width")
        return md.nn.dense(features, features.dims[-1], md.Dim("classes", config.classes), precision=precision)

    return md.model(resnet)


def loss(config: Config) -> Callable[..., md.train.Metric]:
    """The loss function: mean cross entropy, in nats."""
    return classification.loss(model(config), "target")


def optimizer(config: Config) -> md.optim.Optimizer:
    """SGD with momentum."""
    return md.optim.momentum(config.learning_rate, config.momentum)


def _parts(config: Config) -> str | None:
    """Images depend on each other through batch normalisation alone."""
    return None if config.norm == "batch" else "batch"


resnet50 = md.Workload(
    "resnet50", Config(), model=model, inputs=inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS, mean_over=_parts
)
digits = md.Workload(  # a small network for scikit-learn's 8 x 8 digits, which trains in a minute on a laptop
    "digits",
    Config(
        batch=64, height=8, width=8, color=1, classes=10, blocks=(1, 2, 1, 1), stem=8, expansion=2, stem_size=3,
        stem_stride=1, stem_pool=0, groups=4, learning_rate=0.05,
    ),
    model=model, inputs=inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS, mean_over=_parts,
)  # fmt: skip

_HELD_OUT = 297


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of handwritten digits (Alpaydin and Kaynak, 1998) with values from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits  # scikit-learn is part of the `dev` extra

    images, targets = map(np.asarray, load_digits(return_X_y=True))
    return images.reshape(-1, 8, 8, 1) / 16, targets.astype(np.int32)


def digits_batch(config: Config, seed: int, step: int) -> dict[str, md.Tensor]:
    """A training batch of `digits`: a pure function of seed and step. Excludes the last 297 images."""
    images, targets = _digits()
    words = np.random.Philox(key=seed % 2**128, counter=[0, 0, 0, step]).random_raw(config.batch)
    rows = (words % (len(images) - _HELD_OUT)).astype(int)
    return _batch(config, images[rows], targets[rows])


def held_out_digits(config: Config) -> dict[str, md.Tensor]:
    """The 297 images that `digits_batch` excludes, as one batch."""
    images, targets = _digits()
    return _batch(config, images[-_HELD_OUT:], targets[-_HELD_OUT:])


def _batch(config: Config, images: np.ndarray, targets: np.ndarray) -> dict[str, md.Tensor]:
    return {
        "image": md.tensor(images.astype(config.dtype), "batch height width color"),
        "target": md.tensor(targets, "batch"),
    }
