"""The workloads and layouts that a model file declares, read from its text: nothing of it runs, and JAX is not loaded.

An assignment of a call at the top level, `lm = md.Workload(...)`, declares a workload if the call has `layouts=` or is
of something called a workload; so does `.replace(...)` of another one. Its layouts are the keys of a dict: a literal,
or a name that is assigned one, here or in a file beside it (`layouts=llama.LAYOUTS`).
"""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["layouts_of", "workloads_of"]


def workloads_of(file: Path) -> list[str]:
    """The names of a file's workloads, in its order; none if it cannot be read.

    >>> workloads_of(Path("models/resnet.py"))
    ['resnet50', 'digits']
    """
    return list(_workloads(_assignments(file)))


def layouts_of(file: Path, name: str) -> list[str]:
    """The names of a workload's layouts, in their order; none if it cannot be told.

    >>> layouts_of(Path("models/mlp.py"), "mlp")
    ['empty', 'data', 'model', 'data_model', 'three_d']
    """
    assignments = _assignments(file)
    call = _workloads(assignments).get(name)
    layouts = next((k.value for k in call.keywords if k.arg == "layouts"), None) if call else None
    return _keys(layouts or ast.Name("LAYOUTS"), assignments, file) if call else []


def _assignments(file: Path) -> dict[str, ast.expr]:
    """The values that are assigned to names at the top level."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return {}
    assignments: dict[str, ast.expr] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            assignments |= {target.id: statement.value for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            assignments[statement.target.id] = statement.value
    return assignments


def _workloads(assignments: dict[str, ast.expr]) -> dict[str, ast.Call]:
    workloads: dict[str, ast.Call] = {}
    for name, call in assignments.items():
        if not isinstance(call, ast.Call):
            continue
        is_workload = _last_name(call.func).lower() == "workload" or any(k.arg == "layouts" for k in call.keywords)
        if is_workload:
            workloads[name] = call
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "replace":
            before = workloads.get(_last_name(call.func.value))
            workloads |= {name: before} if before else {}
    return workloads


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _keys(node: ast.expr, assignments: dict[str, ast.expr], file: Path, depth: int = 4) -> list[str]:
    """The keys of the dict that is the value of an expression of this file."""
    if isinstance(node, ast.Dict):
        return [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    if isinstance(node, ast.Name) and node.id in assignments and depth:
        return _keys(assignments[node.id], assignments, file, depth - 1)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and depth:
        beside = file.with_name(f"{node.value.id}.py")
        others = _assignments(beside)
        return _keys(others[node.attr], others, beside, depth - 1) if node.attr in others else []
    return []
