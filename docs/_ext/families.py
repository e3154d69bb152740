"""What the reference shows: every public name of `meshdsl` once, by family. Needs no Sphinx: a test reads it."""

from __future__ import annotations

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
    "region": "Placement",
    "autodiff": "Gradients",
    "control": "Loops, branches and rematerialisation",
    "params": "Parameters",
    "layouts": "Meshes and layouts",
    "compile": "Programs",
    "lowering": "Programs",
    "cost.report": "Cost",
    "search": "Cost",
    "cost.memory": "Memory",
    "cost.verify": "What is emitted",
    "cost.aot": "The compiler for TPUs",
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
        found[f"md.{module}"] = [f"{module}.{name}" for name in getattr(md, module).__all__]
    return found


def documented(name: str) -> object:
    """The object behind a public name, such as `einsum` or `random.normal`."""
    value: object = md
    for part in name.split("."):
        value = getattr(value, part)
    return value
