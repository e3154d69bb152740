"""Laws of the sources: no import cycles between modules, and no operation known by its name.

What others must know of an operation is a field of its record, so a renamed operation, or a new one beside it, changes
nothing elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.test_imports import IN_THE_LANGUAGE, ROOT, imports

COMPARING = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def modules(root: Path) -> dict[str, Path]:
    """The modules of the package by their full names; a package is its `__init__`."""
    found: dict[str, Path] = {}
    for path in sorted((root / "meshdsl").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def edges(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports, by statements anywhere in it.

    The public package re-exports the others, so what is written against it makes no edge to it. Likewise a module
    makes no edge to the package that it is in.
    """
    known = modules(root)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        source = path.read_text(encoding="utf-8")
        for item in imports(source, module, is_package=path.name == "__init__.py"):
            within = f"{item.module}.{item.name}"
            target = within if within in known else item.module
            if target in known and target != "meshdsl" and not module.startswith(f"{target}."):
                found.setdefault(module, set()).add(target)
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules each of which reaches all others of its group, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph.get(v, ())):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            group = stack[stack.index(v) :]
            del stack[stack.index(v) :]
            if len(group) > 1 or v in graph.get(v, ()):
                found.append(tuple(sorted(group)))

    for v in sorted(graph):
        if v not in index:
            visit(v)
    return found


def test_no_module_imports_itself_through_others():
    assert not (found := cycles(edges(ROOT))), "\n".join(" <-> ".join(group) for group in found)


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [("b", "c"), ("d",)]


def known_by_name(source: str) -> Iterator[int]:
    """The lines on which an operation is compared, looked up or matched by the text of its name."""
    if not re.search(r"(op|operation|collective|step)(\.name|\))", source):
        return  # quicker than to parse it
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(isinstance(op, COMPARING) for op in node.ops):
            yield from [node.lineno] * any(map(_is_name_of_operation, (node.left, *node.comparators)))
        if isinstance(node, ast.Subscript) and _is_name_of_operation(node.slice):
            yield node.lineno
        if isinstance(node, ast.Match) and _is_name_of_operation(node.subject):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            lookup = node.func.attr in ("get", "startswith", "endswith") and node.args
            if lookup and any(map(_is_name_of_operation, (node.func.value, node.args[0]))):
                yield node.lineno


def _is_name_of_operation(node: ast.expr) -> bool:
    """True if an expression is `op.name`, `x.op.name`, `str(op)` and the like."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr") and node.args:
        return _is_operation(node.args[0])
    return isinstance(node, ast.Attribute) and node.attr == "name" and _is_operation(node.value)


def _is_operation(node: ast.expr) -> bool:
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return last in ("op", "operation", "collective", "step")


def test_no_operation_is_known_by_its_name():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules(ROOT).values()
        for line in known_by_name(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('eqn.op.name == "scan"', 1),
        ('"all_to_all" in task.eqn.op.name', 1),
        ('str(eqn.op) not in ("einsum", "turn")', 1),
        ("EXPANSIONS.get(eqn.op.name)", 1),
        ("table[op.name](eqn)", 1),
        ('match op.name:\n    case "scan": pass', 1),
        ('op.name.startswith("all_")', 1),
        ("eqn.op is SCAN", 0),
        ('dim.name == "batch"', 0),
        ("f'{op.name} has no gradient'", 0),
    ],
)
def test_uses_of_names_are_found(source: str, count: int):
    assert len(list(known_by_name(source))) == count


PLATFORM = re.compile(r"(?<![a-z])(tpus?|gpus?|cuda|cudnn|rocm|v[2-7][a-z]*|[abhv][1-9]00)(?![a-z])", re.IGNORECASE)
# Beside targets/, the readers of compilers, and what is written in public names (it asks md.platform)
KNOW_PLATFORMS = {
    "tools/commands/devices.py": "the variables of TPU pods",
    "tools/commands/verify.py": "the TPU compiler's command",
}


def platforms_named(source: str) -> Iterator[tuple[int, str]]:
    """The names of platforms in the code of a module: names and texts, but no documentation and no machine's name."""
    if not PLATFORM.search(source.replace("_", " ")):
        return  # quicker than to parse it
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = ""
        if not isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            text = "" if node.value in MACHINES else node.value
        elif isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.Attribute):
            text = node.attr
        if len(text.split()) < 2 and PLATFORM.search(text.replace("_", " ")):
            yield node.lineno, text


MACHINES = {path.stem for path in (ROOT / "meshdsl" / "cost" / "machines").glob("*.toml")}


def test_platforms_are_known_to_targets_alone():
    found = [
        f"{at}:{line}: {text}"
        for path in modules(ROOT).values()
        if (at := path.relative_to(ROOT / "meshdsl").as_posix()) not in KNOW_PLATFORMS
        and not at.startswith(("targets/", "tools/compilers/"))
        and at.partition("/")[0].removesuffix(".py") not in IN_THE_LANGUAGE
        for line, text in platforms_named(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('if machine.device == "tpu": pass', 1),
        ("TPU.emission", 1),
        ("lax.platform(tpu_form)", 1),
        ('machine("tpu-v5e")', 0),
        ('"""On TPUs, rows are read."""', 0),
        ('name == "inputs"', 0),
    ],
)
def test_names_of_platforms_are_found(source: str, count: int):
    assert len(list(platforms_named(source))) == count


def test_names_are_listed_by_packages_and_public_modules_alone():
    public = {"meshdsl/control/params/init.py", "meshdsl/train/weights/hub.py"}  # md.init, md.hub
    public |= {"meshdsl/jax_functions/fft.py", "meshdsl/jax_functions/linalg.py"}  # md.fft, md.linalg
    public |= {"meshdsl/jax_functions/foreign/testing.py"}  # md.testing
    found = [
        at
        for path in modules(ROOT).values()
        if path.name != "__init__.py"
        and (at := path.relative_to(ROOT).as_posix()) not in public
        and "\n__all__" in path.read_text(encoding="utf-8")
    ]
    assert not found, f"an underscore says what is private: {found}"
