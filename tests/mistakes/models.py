"""Mistakes with models, layers, optimizers and workloads."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.models.mlp import mlp

X = md.ones("batch:2 length:4 model:8")
IMAGE = md.ones("batch:2 height:8 width:8 channels:6")
IDS = md.zeros("batch:2 length:4", "int32")
LOGITS = md.ones("batch:2 length:4 vocab:16")
KEY = md.random.key(0)
LINEAR = md.model(lambda x: md.einsum(x, md.param("w", "model:8 out:3"), out="batch length out"))
PARAMS = LINEAR.init(KEY, X)
ADAM = md.optim.adam(1e-3)
STATE = ADAM.init(PARAMS)
MHA = md.nn.multi_head_attention
SQUARE = {"height": 3, "width": 3}
HEADS, HEAD = md.Dim("heads", 2), md.Dim("head", 4)


def inside(layer: Callable[[], Any]) -> Any:
    """The parameters of a model that is this layer alone."""
    return md.model(layer).specs()


def mine(**fields: Any) -> md.Workload:
    """The workload mlp with other fields."""
    known = {f.name: getattr(mlp, f.name) for f in dataclasses.fields(mlp)}
    return md.Workload(**{**known, **fields})


ROWS = [
    # Models and parameters
    (lambda: md.model("mlp"), "function is 'mlp' (str); expected a function"),
    (lambda: LINEAR(X), "the first argument of a model must be a dict of parameters, got"),
    (lambda: LINEAR(X, PARAMS), "the first argument of a model must be a dict of parameters, got"),
    (lambda: LINEAR({}, X), "the parameters do not match the model <lambda>"),
    (lambda: LINEAR({"v": X}, X), "the parameters do not match the model <lambda>"),
    (lambda: LINEAR({"w": np.ones((8, 3))}, X), "the parameters do not match the model <lambda>"),
    (lambda: LINEAR({"w": md.ones("model:8 out:4")}, X), "the parameters do not match the model <lambda>"),
    (
        lambda: md.model(lambda x: md.param("w", x.dims, init=md.init.zeros)).init(KEY, X),
        "init=md.init.zeros makes an initialiser and is none itself",
    ),
    (lambda: LINEAR.init(0, X), "a random key is a uint32[key_word=2] tensor, got 0"),
    (lambda: LINEAR.init(KEY, np.ones((2, 4, 8))), "expected a tensor or a number, got an array of shape (2, 4, 8)"),
    (lambda: md.param("w", "io:3"), "md.param('w') is used outside a model"),
    (lambda: inside(lambda: md.param("w", "io")), "a new dim is written name:size, for example 'batch:512'; got"),
    (lambda: inside(lambda: md.param(3, "io:3")), "a parameter name must be a Python identifier, got 3"),
    (lambda: inside(lambda: md.param("w", "io:3", init="normal")), "init is 'normal' (str); expected a function"),
    (lambda: inside(lambda: md.param("w", "io:3", init=0.02)), "init is 0.02 (float); expected a function"),
    (lambda: md.model(lambda: md.param("w", "io:3", init=np.zeros)).init(KEY), "only a tensor without dims is one"),
    (lambda: inside(lambda: md.param("w", "io:3", dtype="float33")), "'float33' is no dtype; did you mean 'float32'?"),
    (lambda: md.model(lambda: md.param("w", "io:3", md.init.lecun("hidden"))).init(KEY), "no fan dim 'hidden' here;"),
    (lambda: md.model(lambda: md.param("w", "io:3") + md.param("w", "io:3")).specs(), "the parameter 'w' is created"),
    (lambda: md.model(lambda x: x + md.param("b", "io:3")).init(KEY, X), "broadcasting [batch=2 length=4 model=8]"),
    (lambda: md.scope("a b").__enter__(), "md.scope('a b') is used outside a model"),
    (lambda: md.init.normal(-1.0), "a standard deviation is at least 0, got -1.0"),
    (lambda: md.init.uniform(1.0, -1.0), "md.init.uniform draws from low to high; got low=1.0 and"),
    (lambda: md.init.variance_scaling(1.0, distribution="gauss"), "unknown distribution 'gauss'; known: normal,"),
    # Layers
    (lambda: md.nn.layer_norm(X, "model"), "md.scope('norm') is used outside a model"),
    (
        lambda: inside(lambda: md.nn.linear(X, "modle", "hidden:4")),
        "no dim 'modle' here; did you mean 'model'? there are: batch,",
    ),
    (lambda: inside(lambda: md.nn.linear(X, "model", "hidden")), "a new dim is written name:size, for example"),
    (
        lambda: inside(lambda: md.nn.linear(X, "model", 16)),
        "dims are text such as 'batch:8 io:4', a md.Dim, or several of",
    ),
    (lambda: inside(lambda: md.nn.linear(X, 8, 16)), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: inside(lambda: md.nn.linear(np.ones((2, 8)), "model", "hidden:4")), "a layer takes a tensor, got ndarray"),
    (lambda: inside(lambda: md.nn.linear(X, "model", "length:4")), "output dims cannot have the dim 'length' twice"),
    (lambda: inside(lambda: md.nn.embedding(X, md.Dim("vocab", 16), md.Dim("model", 8))), "md.take needs integer"),
    (lambda: inside(lambda: md.nn.embedding(IDS, 16, 8)), "the rows of md.nn.embedding must have a size, as in"),
    (lambda: inside(lambda: md.nn.embedding(IDS, "vocab", "model:8")), "the rows of md.nn.embedding must have a size"),
    (lambda: inside(lambda: md.nn.layer_norm(X, "width")), "no dim 'width' here; there are: batch, length, model"),
    (lambda: inside(lambda: md.nn.layer_norm(X, -1)), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (
        lambda: inside(lambda: md.nn.batch_norm(IMAGE, ["batch", "height", "widht"])),
        "no dim 'widht' here; did you mean 'width'? there are: batch,",
    ),
    (lambda: inside(lambda: md.nn.batch_norm(IMAGE, "batch height width", momentum=1.5)), "the momentum of"),
    (lambda: inside(lambda: md.nn.group_norm(IMAGE, 4)), "md.nn.group_norm cannot divide channels=6 into 4 equal"),
    (lambda: inside(lambda: md.nn.group_norm(IMAGE, 0)), "md.nn.group_norm cannot divide channels=6 into 0 equal"),
    (lambda: inside(lambda: md.nn.group_norm(X, 2)), "no dim 'channels' here; there are: batch, length, model"),
    (
        lambda: inside(lambda: md.nn.conv(IMAGE, {"height": 3, "wdith": 3}, "channels", "out:4")),
        "no dim 'wdith' here; did you mean 'width'?",
    ),
    (lambda: inside(lambda: md.nn.conv(IMAGE, SQUARE, "channels", "out")), "the output channels of"),
    (
        lambda: inside(lambda: md.nn.conv(IMAGE, {"height": 0, "width": 3}, "channels", "out:4")),
        "the window of md.nn.conv has",
    ),
    (
        lambda: inside(lambda: md.nn.conv(IMAGE, SQUARE, "channels", "out:4", padding="smae")),
        "md.conv pads with 'same',",
    ),
    (lambda: inside(lambda: md.nn.lstm(X, "hidden")), "the hidden dim of md.nn.lstm must have a size, as in"),
    (
        lambda: inside(lambda: md.nn.lstm(X, "hidden:4", along="time")),
        "no dim 'time' here; there are: batch, length, model",
    ),
    (
        lambda: inside(lambda: md.nn.lstm(X, "hidden:4", state=X)),
        "the truth of a tensor float32[batch=2 length=4 model=8] is",
    ),
    (lambda: inside(lambda: md.nn.lstm(X, "hidden:4", state=(X, X))), "no dim 'hidden' here; there are: batch,"),
    (
        lambda: inside(lambda: md.nn.gru(X, "hidden:4", over="embed")),
        "no dim 'embed' here; there are: batch, length, model",
    ),
    (lambda: inside(lambda: md.nn.gru(X, "hidden:4", state=X)), "no dim 'hidden' here; there are: batch, length,"),
    (lambda: inside(lambda: md.nn.gru(X, "model:8")), "dims cannot have the dim 'model' twice"),
    (lambda: inside(lambda: md.nn.state_space(X, "states")), "the states of md.nn.state_space must have a size, as"),
    (
        lambda: inside(lambda: md.nn.state_space(X, "states:4", along="time")),
        "no dim 'time' here; there are: batch, length, model",
    ),
    (lambda: inside(lambda: md.nn.state_space(X, 16)), "the states of md.nn.state_space must have a size, as in"),
    (lambda: inside(lambda: MHA(X, 2, 4)), "the heads must have a size, as in md.Dim('name', 8) or"),
    (lambda: inside(lambda: MHA(X, "heads", "head:4")), "the heads must have a size, as in"),
    (lambda: inside(lambda: MHA(X, HEADS, HEAD, length="time")), "no dim 'time' here; there are: batch, length, model"),
    (lambda: inside(lambda: MHA(X, HEADS, HEAD, mask=X)), "md.where needs a boolean"),
    (
        lambda: inside(lambda: MHA(X, HEADS, HEAD, positions="sinusoidal")),
        "positions must be 'none' or",
    ),
    (
        lambda: inside(lambda: MHA(X, HEADS, md.Dim("head", 3), positions="rotary")),
        "rotary positions rotate pairs",
    ),
    (lambda: inside(lambda: md.nn.feed_forward(X, "hidden")), "the hidden dim of md.nn.feed_forward must have a size"),
    (
        lambda: inside(lambda: md.nn.feed_forward(X, md.Dim("hidden", 16), activation="swish")),
        "unknown activation 'swish';",
    ),
    (
        lambda: inside(lambda: md.nn.feed_forward(X, md.Dim("hidden", 16), over="embed")),
        "no dim 'embed' here; there are: batch, length, model",
    ),
    (lambda: inside(lambda: md.nn.moe_layer(X, "experts", "hidden:4")), "experts must have a size, as in"),
    (lambda: inside(lambda: md.nn.moe_layer(X, "experts:4", "hidden:4", router="top3")), "unknown router 'top3'; did"),
    (
        lambda: inside(lambda: md.nn.moe_layer(X, "experts:4", "hidden:4", capacity_factor=0)),
        "capacity_of needs a positive",
    ),
    (
        lambda: inside(lambda: md.nn.moe_layer(X, "experts:4", "hidden:4", tokens="time")),
        "no dim 'time' here; there are: batch, length, model",
    ),
    (lambda: inside(lambda: md.nn.learned_positions(X, "time")), "no dim 'time' here; there are: batch, length, model"),
    (lambda: md.nn.dropout(X, 1.5, KEY), "the dropout rate must be at least 0 and less than 1, got 1.5"),
    (lambda: md.nn.dropout(X, 0.1, 0), "a random key is a uint32[key_word=2] tensor, got 0"),
    (lambda: md.nn.rotary(X, "length", "model:3"), "dim 'model' has size 8 here, and size 3 was asked for"),
    (lambda: md.nn.rotary(X, "length", "width"), "no dim 'width' here; there are: batch, length, model"),
    (lambda: md.nn.rotary(md.ones("length:4 head:3"), "length", "head"), "rotary positions rotate pairs of elements,"),
    (lambda: md.nn.softmax_cross_entropy(LOGITS, md.ones("batch:2 length:4")), "the targets of softmax_cross_entropy"),
    (
        lambda: md.nn.softmax_cross_entropy(LOGITS, IDS, over="vocabulary"),
        "no dim 'vocabulary' here; did you mean 'vocab'? there are:",
    ),
    (lambda: md.nn.softmax_cross_entropy(IDS, LOGITS), "no dim 'vocab' here; there are: batch, length"),
    (
        lambda: md.nn.softmax_cross_entropy(LOGITS, md.zeros("batch:3", "int32")),
        "dim 'batch' has size 3 here, and size 2 was asked for",
    ),
    (lambda: md.nn.softmax_cross_entropy(LOGITS, IDS, label_smoothing=2.0), "label_smoothing is from 0 to 1, got 2.0"),
    (lambda: md.nn.Precision("float33"), "'float33' is no dtype; did you mean 'float32'?"),
    (lambda: md.nn.Precision(compute="int8"), "md.nn.Precision takes floating dtypes, got 'int8'"),
    (lambda: md.nn.moe.capacity_of(16, 0), "capacity_of needs a positive factor, k >= 1 and experts >= 1;"),
    # Optimizers
    (lambda: md.optim.adamw("0.1"), "the learning rate is a number or a function, got str"),
    (lambda: md.optim.adam(PARAMS, 1e-3), "the learning rate is a number or a function, got dict"),
    (lambda: md.optim.sgd(-0.1), "the learning rate must be at least 0, got -0.1"),
    (lambda: md.optim.sgd(float("nan")), "the learning rate must be at least 0, got nan"),
    (lambda: md.optim.adam(1e-3, b1=1.5), "b1 is from 0 to below 1, got 1.5"),
    (lambda: md.optim.lars(-0.1), "the learning rate must be at least 0, got -0.1"),
    (lambda: md.optim.lars(0.1, momentum=1.0), "momentum is from 0 to below 1, got 1.0"),
    (lambda: md.optim.lamb(1e-3, b2=-0.1), "b2 is from 0 to below 1, got -0.1"),
    (lambda: md.optim.muon(0.1, beta=1.5), "beta is from 0 to below 1, got 1.5"),
    (lambda: md.optim.adafactor(0.1, momentum=2.0), "momentum is from 0 to below 1, got 2.0"),
    (lambda: ADAM.init(LINEAR), "an optimizer's state is created for a tree of tensors; params"),
    (lambda: ADAM.init({"w": np.ones(3)}), "an optimizer's state is created for a tree of tensors; w is a"),
    (lambda: ADAM.update({"v": X}, STATE, PARAMS), "an update needs one gradient for each parameter"),
    (lambda: ADAM.update(PARAMS, {}, PARAMS), "the optimizer's state has no 'm', 'step', 'v'; it has: "),
    (lambda: md.optim.sgd(0.1).update(PARAMS, STATE, PARAMS), "state has 'm', 'v', which this optimizer does not use"),
    (lambda: ADAM.update(PARAMS, PARAMS, STATE), "an update needs one gradient for each parameter"),
    (lambda: ADAM.update({"w": md.ones("model:8 out:4")}, STATE, PARAMS), "a gradient must have the dims of its"),
    (lambda: ADAM.update({"w": None}, STATE, PARAMS), "an update needs one gradient for each parameter"),
    (lambda: md.optim.from_optax(1e-3), "md.optim.from_optax takes an optax transformation, such as"),
    (lambda: md.optim.with_clipping(ADAM, -1.0), "md.optim.with_clipping needs a max_norm above 0, got -1.0"),
    (lambda: md.optim.with_accumulation(ADAM, 0), "md.optim.with_accumulation needs steps of at least 1, got 0"),
    (lambda: md.optim.with_average(ADAM, 1.5), "the decay of md.optim.with_average is from 0 to 1, got 1.5"),
    (lambda: md.optim.global_norm({"w": IDS}), "a norm needs floats; got int32"),
    (lambda: md.optim.global_norm([]), "a norm needs a pytree of tensors, at least one; got list"),
    (lambda: md.optim.warmup_cosine(1e-3, 100, 50), "md.optim.warmup_cosine needs steps > warmup_steps >= 0; got"),
    (lambda: md.optim.linear(0.0, 1.0, 0), "md.optim.linear takes at least 1 step, got 0"),
    (lambda: md.optim.linear(0.0, 1.0, 10)("step"), "expected a tensor, or numbers or booleans; got 'step' (str)"),
    # Workloads
    (lambda: mlp.replace(btach=8), "the config of mlp has no 'btach'; did you mean 'batch'? known:"),
    (lambda: mlp.replace(batch="8").specs(), "dim 'batch' needs a whole size, got '8'"),
    (lambda: mlp.replace(batch=-8).specs(), "dim 'batch' cannot have the negative size -8"),
    (
        lambda: mine(model=lambda c: None).specs(),
        "model(config) of the workload",
    ),
    (
        lambda: mine(optimizer=lambda c: 1e-3).specs(),
        "optimizer(config) of the",
    ),
]
SPEC = md.spec("batch:8 io:4")
