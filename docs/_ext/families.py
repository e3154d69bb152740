"""The public names of `meshdsl` by family, for the reference. Does not need Sphinx, because a test uses it."""

from __future__ import annotations

import types
from typing import Any

import meshdsl as md

TITLES = {
    "trace.tensors": "Values",
    "trace.arguments": "Values",
    "dims": "Dims",
    "trace.tracing": "Parameters",
    "trace.platform": "Programs",
    "ops.creation": "Making tensors",
    "ops.elementwise": "Elementwise operations",
    "ops.activations": "Elementwise operations",
    "ops.dtypes": "Elementwise operations",
    "jax_functions.map": "Elementwise operations",
    "ops.contraction": "Contractions, reductions and broadcasting",
    "ops.grouped": "Contractions, reductions and broadcasting",
    "ops.reductions": "Contractions, reductions and broadcasting",
    "ops.scattering": "Indices",
    "ops.resizing": "Slices and moves along a dim",
    "ops.statistics": "Statistics and counts",
    "ops.softmax": "Contractions, reductions and broadcasting",
    "ops.attention": "Attention",
    "ops.extremes": "Contractions, reductions and broadcasting",
    "ops.composed": "Norms, limits and triangles",
    "ops.reshape": "Shape",
    "ops.slicing": "Slices and moves along a dim",
    "ops.dynamic": "Slices and moves along a dim",
    "ops.joining": "Joining",
    "ops.indexing": "Indices",
    "ops.inverse": "Indices",
    "ops.ordering": "Running sums and order",
    "ops.conv": "Windows",
    "ops.pooling": "Windows",
    "ops.placement": "Placement",
    "ops.ragged": "Placement",
    "ops.printing": "Debugging",
    "jax_functions.local": "Placement",
    "control.autodiff": "Gradients",
    "control.custom_vjp": "Gradients",
    "control.derivatives": "Gradients",
    "control.vmap": "Vectorisation",
    "control": "Loops, branches and rematerialisation",
    "control.params": "Parameters",
    "control.layers": "Parameters",
    "layouts": "Meshes and layouts",
    "compile": "Programs",
    "compile.plan": "Programs",
    "compile.check_gradients": "Gradients",
    "compile.jaxify": "Programs",
    "from_jax": "Importing JAX functions",
    "jax_functions.foreign": "Sharded JAX programs",
    "lowering": "Programs",
    "updates.weight_update": "Programs",
    "overlap.values": "Programs",
    "tools.pictures.show": "Pictures",
    "cost.report.report": "Cost",
    "search": "Cost",
    "cost.memory": "Memory",
    "tools.compilers.verify": "Verification",
    "tools.compilers.compilation": "The TPU compiler",
    "tools.compilers.aot": "The TPU compiler",
    "cost.machine": "Machines",
    "cost.network": "Placement of meshes on hardware",
    "train.checkpoint": "Checkpoints",
    "train.checkpoint.convert": "Checkpoints",
    "train.weights": "Weights of other programs",
    "workload": "Workloads",
    "errors": "Errors",
    "errors.no_effect": "Errors",
}  # names of other modules are listed under the module's name, so that no public name is missing


def families() -> dict[str, list[str]]:
    """The public names by title; the names of a public module are listed under `md.<module>`, as `<module>.<name>`."""
    names_by_title: dict[str, list[str]] = {title: [] for title in dict.fromkeys(TITLES.values())}
    for home, names in md._HOMES.items():
        also = [other for other, name in md._ALSO.items() if name in names]
        names_by_title.setdefault(TITLES.get(home, home), []).extend([*names, *also])
    for module in md._MODULES:
        names_by_title |= _of_module(module)
    return names_by_title


def _of_module(path: str) -> dict[str, list[str]]:
    """The names of a module by title; its submodules follow, each under its own title."""
    names = [f"{path}.{name}" for name in documented(path).__all__]
    modules = [name for name in names if isinstance(documented(name), types.ModuleType)]
    names_by_title = {f"md.{path}": [name for name in names if name not in modules]}
    for module in modules:
        names_by_title |= _of_module(module)
    return names_by_title


def documented(name: str) -> Any:
    """The object with a public name, such as `einsum` or `random.normal`."""
    value: Any = md
    for part in name.split("."):
        value = getattr(value, part)
    return value
