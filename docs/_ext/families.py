"""What the reference shows: every public name of `meshdsl` once, by family. Needs no Sphinx: a test reads it."""

from __future__ import annotations

import types
from typing import Any

import meshdsl as md

TITLES = {
    "values": "Values",
    "dims": "Dims",
    "ops.elementwise": "Elementwise operations",
    "ops.contraction": "Contractions, reductions and broadcasting",
    "ops.reshape": "Shape",
    "ops.slicing": "Slices and moves along a dim",
    "ops.joining": "Joining",
    "ops.indexing": "Indices",
    "ops.conv": "Windows",
    "ops.pooling": "Windows",
    "ops.placement": "Placement",
    "ops.ragged": "Placement",
    "control.region": "Placement",
    "autodiff": "Gradients",
    "control": "Loops, branches and rematerialisation",
    "params": "Parameters",
    "layouts": "Meshes and layouts",
    "compile": "Programs",
    "lowering": "Programs",
    "report.report": "Cost",
    "search": "Cost",
    "cost.memory": "Memory",
    "compilers.verify": "What is emitted",
    "compilers.aot": "The compiler for TPUs",
    "cost.machine": "Machines",
    "cost.network": "Where a mesh lies",
    "checkpoint": "Checkpoints",
    "checkpoint.convert": "Checkpoints",
    "workload": "Workloads",
    "errors": "Errors",
}  # a home that is not here goes under its own name, so nothing public is left out


def families() -> dict[str, list[str]]:
    """The public names by title; what a public module offers stands under `md.<module>`, as `<module>.<name>`."""
    found: dict[str, list[str]] = {title: [] for title in dict.fromkeys(TITLES.values())}
    for home, names in md._HOMES.items():
        found.setdefault(TITLES.get(home, home), []).extend(names)
    for module in md._MODULES:
        found |= _of_module(module)
    return found


def _of_module(path: str) -> dict[str, list[str]]:
    """What a module offers, by title; a module in it comes after it, under a title of its own."""
    names = [f"{path}.{name}" for name in documented(path).__all__]
    modules = [name for name in names if isinstance(documented(name), types.ModuleType)]
    found = {f"md.{path}": [name for name in names if name not in modules]}
    for module in modules:
        found |= _of_module(module)
    return found


def documented(name: str) -> Any:
    """The object behind a public name, such as `einsum` or `random.normal`."""
    value: Any = md
    for part in name.split("."):
        value = getattr(value, part)
    return value
