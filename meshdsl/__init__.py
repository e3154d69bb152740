"""meshdsl: write a model once with named dims; choose how it is split over a mesh of devices; see every collective.

The package loads JAX when the first public name is used, so that `meshdsl --help` answers at once.

A step goes through these folders, in this order:

    trace, ops, control     a function of tensors becomes a graph: tensors, operations, and functions of functions:
                            loops and branches, gradients, md.vmap, and models, which declare parameters
    jax_functions           md.map and md.local: functions of JAX in a model, and the check of them
    passes                  graph to graph; also loops over micro-batches to stages of layers (passes.pipelines)
    lowering                graph, mesh and layout to the program of one device, its collectives; emit and simulate
    updates, overlap        sharded weight updates and overlap of communication, from analysis to rewriting
    compile                 the pipeline of these passes, md.compile and what it returns

    targets                 what each compiler does with kernels, loops and collectives, and its kernels of attention
    cost                    the time and memory of a program on a machine; cost.report shows them to people
    search                  the plans of a model and the fastest of them

Below them are errors (messages, units, colours), dims, layouts (meshes, layouts, shardings), ir (graphs and their
equations) and backend (the arrays that kernels compute with). nn, optim, train, models, workload and from_jax (which
imports JAX functions) are written in the public names alone; train.checkpoint and train.weights read and write
parameters. jax_functions.foreign checks and prices programs of jax.shard_map that others wrote. tools has the command
line, the pictures, and the readers of compilers' texts.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

__version__ = "0.2.0"

# The module of each public name. This table is the list of public names; `docs/reference.md` and the stub
# `__init__.pyi` for type checkers are generated from it (`python -m tests.stub`).
_HOMES: dict[str, tuple[str, ...]] = {
    "errors": (
        "CheckpointError", "InternalError", "LayoutError", "MeshdslError", "SaveError", "ShapeError", "TraceError",
    ),
    "errors.no_effect": ("NoEffectError", "NoEffectWarning"),
    "dims": ("Dim", "dims", "fresh_dim"),
    "trace.tensors": ("Tensor",),
    "trace.arguments": ("spec", "tensor"),
    "trace.tracing": ("eval_shape",),
    "trace.platform": ("platform",),
    "ops.elementwise": (
        "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh", "erf", "exp",
        "exp2", "expm1", "floor", "hypot", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2", "logaddexp",
        "logical_not", "maximum", "minimum", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh",
        "sqrt", "square", "stop_gradient", "tan", "tanh", "where",
    ),
    "ops.activations": ("elu", "gelu", "leaky_relu", "selu", "silu", "softplus"),
    "ops.creation": ("arange", "full", "linspace", "ones", "zeros"),
    "ops.composed": ("clip", "norm", "tril", "triu"),
    "ops.dtypes": ("cast",),
    "ops.contraction": ("dot", "einsum"),
    "ops.reductions": ("all", "any", "broadcast", "max", "mean", "min", "prod", "sum", "var"),
    "ops.softmax": ("log_softmax", "logsumexp", "softmax"),
    "ops.attention": ("attention",),
    "ops.extremes": ("argmax", "argmin"),
    "ops.reshape": ("flatten", "rename", "reshape", "squeeze", "transpose", "unflatten"),
    "ops.slicing": ("reverse", "roll", "shift", "slice"),
    "ops.resizing": ("pad", "rearrange", "repeat", "resize", "tile"),
    "ops.statistics": (
        "bincount", "histogram", "median", "nan_to_num", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum",
        "nanvar", "quantile", "searchsorted", "segment_max", "segment_min", "segment_sum", "std",
    ),
    "ops.dynamic": ("dynamic_slice", "dynamic_update_slice"),
    "ops.joining": ("concat", "stack", "unstack"),
    "ops.grouped": ("grouped_dot",),
    "ops.indexing": ("iota", "one_hot", "put_add", "take"),
    "ops.inverse": ("inverse_index",),
    "ops.scattering": ("scatter_max", "scatter_min", "scatter_mul", "scatter_set"),
    "ops.ordering": ("argsort", "cumsum", "sort", "top_k"),
    "ops.conv": ("conv",),
    "ops.pooling": ("avg_pool", "max_pool"),
    "ops.placement": ("prefer", "replicate", "shard"),
    "ops.ragged": ("ragged",),
    "ops.printing": ("callback", "print"),
    "control.autodiff": ("grad", "value_and_grad"),
    "control.custom_vjp": ("custom_vjp",),
    "control.derivatives": ("jvp", "vjp"),
    "control": (
        "accumulate", "associative_scan", "checkpoint", "cond", "cumlogsumexp", "cummax", "cummin", "cumprod", "name",
        "scan", "switch", "while_loop",
    ),
    "jax_functions.local": ("local",),
    "jax_functions.map": ("map",),
    "control.params": ("Model", "model", "param", "scope"),
    "control.layers": ("layers",),
    "control.vmap": ("vmap",),
    "layouts": ("Layout", "Mesh", "Sharding"),
    "lowering": ("Program", "simulate"),
    "cost.report.report": ("Report",),
    "tools.pictures.show": ("show",),
    "cost.memory": ("Memory", "memory"),
    "tools.compilers.verify": ("Verification", "verify"),
    "tools.compilers.compilation": ("Compilation", "CompilerError"),
    "tools.compilers.aot": ("compile_for",),
    "cost.machine": ("Machine", "MachineError", "machine"),
    "cost.network": ("place",),
    "compile.plan": ("Plan",),
    "compile": ("Compiled", "compile", "host_devices"),
    "compile.check_gradients": ("check_gradients",),
    "compile.jaxify": ("jaxify",),
    "updates.weight_update": ("WeightUpdate",),
    "overlap.values": ("Overlap",),
    "search": ("search",),
    "train.checkpoint": ("Checkpoints", "Restored"),
    "train.checkpoint.convert": ("export_orbax", "export_safetensors", "import_orbax", "import_safetensors"),
    "train.weights": ("HubConfig", "HuggingFace", "export_hugging_face", "import_hugging_face"),
    "workload": ("Workload",),
    "from_jax": ("Imported", "from_jax", "named"),
    "jax_functions.foreign": ("JaxReport", "verify_jax"),
}  # fmt: skip
_MODULES = {
    "random": "ops.random",
    "fft": "jax_functions.fft",
    "linalg": "jax_functions.linalg",
    "init": "control.params.init",
    "nn": "nn",
    "optim": "optim",
    "hub": "train.weights.hub",
    "compilers": "tools.compilers",
    "testing": "jax_functions.foreign.testing",
}  # public names that are modules
_UNLISTED = {"train": "train"}  # the training runtime, which has a page of its own
_ALSO = {"gather": "take", "remat": "checkpoint", "scatter_add": "put_add"}  # the field's names, beside ours
_PUBLIC = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted((*_PUBLIC, *_ALSO, *_MODULES))  # pyright: ignore[reportUnsupportedDunderAll] - names are looked up when used


def __getattr__(name: str) -> Any:
    name = _ALSO.get(name, name)
    modules = {**_MODULES, **_UNLISTED}
    if name in modules or name in _PUBLIC:
        importlib.import_module(f"{__name__}.errors.installed").check_jax()
    if name in modules:
        setattr(sys.modules[__name__], name, importlib.import_module(f"{__name__}.{modules[name]}"))
        return sys.modules[__name__].__dict__[name]
    if name in _PUBLIC:
        if _PUBLIC[name].startswith("trace."):
            importlib.import_module(f"{__name__}.ops")  # it gives tensors their operators
        module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
        value: Any = getattr(module, name)
    else:
        text = f"meshdsl has no name {name!r}{_way_out(name)}"
        raise AttributeError(text, name=name, obj=None)  # with this module as obj, Python would add a guess of its own
    types.ModuleType.__setattr__(sys.modules[__name__], name, value)
    return value


def _way_out(name: str) -> str:
    if name.startswith("_"):
        return ""
    detours = importlib.import_module(f"{__name__}.errors.detours")
    return f"\n  {detours.detour(name, __all__, _MODULES)}"


def __dir__() -> list[str]:
    return list(__all__)


class _Package(types.ModuleType):
    """`md.dims` and `md.compile` are functions, also after Python has imported the modules of those names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
