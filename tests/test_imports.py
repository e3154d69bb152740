"""Imports go one way.

A module of the package imports only its own unit and units of a lower rank. What is written in the language
(layers, models, benchmarks) imports only the public package. The check reads the import statements, including
those inside functions and under TYPE_CHECKING: a cycle that is hidden is still a cycle.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
RUNS_CELLS = ROOT / "docs" / "_ext" / "notebooks.py"  # executes the code of this repository's own notebooks
PICKLES = ROOT / "tests" / "compile" / "test_copies.py"  # of values that it made itself, as users do

# Lowest first. A unit is a module or a subpackage of meshdsl, or a part of one that has a rank of its own
ORDER = [
    ["errors"],
    ["dims"],
    ["layouts"],
    ["backend"],
    ["ir"],
    ["trace"],
    ["ops"],
    ["control.params"],
    ["control"],
    ["jax_functions"],
    ["passes"],
    ["passes.pipelines"],
    ["lowering"],
    ["cost.scores"],  # the fusion model: what a compiler computes in one kernel
    ["cost.fusion"],
    ["targets"],
    ["cost"],
    ["cost.report"],
    ["updates"],
    ["overlap"],
    ["compile"],
    ["tools.pictures"],
    ["tools.compilers"],
    ["train.checkpoint"],
    ["train.weights"],
    ["search"],
    ["__init__"],  # the public package; it re-exports the units below and those written in the language
    ["jax_functions.foreign"],  # whole programs: it prices what they send
    ["tools", "__main__"],
]
IN_THE_LANGUAGE = [
    "nn",
    "optim",
    "metric",
    "workload",
    "train",
    "models",
    "from_jax",
]  # units of meshdsl that see only what a user sees

RANK = {unit: rank for rank, units in enumerate(ORDER) for unit in units}
# `dims`, `compile` and others are public names of the package too: importing those is fine.
# `errors.values` reads settings, which `train` and the command line share, as they share errors of usage.
# `jax_functions` has the table of JAX's primitives, which md.optim.from_optax and md.from_jax read.
INTERNAL = {unit.partition(".")[0] for unit in RANK} - {
    "dims",
    "compile",
    "train",
    "random",
    "jax_functions",
    "__init__",
}
# For benchmarks: the readers of compilers' texts, and the plans that a paper compares its plans with
INSIDE = ("meshdsl.tools.compilers.", "meshdsl.overlap.", "meshdsl.cost.network")
DEPENDENCIES = {"jax", "numpy", "jaxlib", "ml_dtypes", "scipy"}  # jax itself requires and installs the last three
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


class Import(NamedTuple):
    """One imported thing: `module` is absolute, `name` is what was taken from it, if anything."""

    module: str
    name: str | None
    line: int


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside a node, at any depth; expressions have none."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr | ast.expr_context | ast.arguments | ast.keyword):
            yield child
            yield from _statements(child)


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of the module called `module`, with relative ones made absolute."""
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            target = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                yield Import(target, alias.name, node.lineno)


def unit_of(module: str, name: str | None) -> str:
    """The unit that `import module`, or `from module import name`, opens; `module` is inside meshdsl."""
    parts = [*module.split(".")[1:], *([name] if name else [])]
    for unit in (".".join(parts[:2]), *parts[:1]):
        if unit in RANK or unit in IN_THE_LANGUAGE:
            return unit
    return "__init__" if module == "meshdsl" else parts[0]


def package_problems(root: Path) -> list[str]:
    """The imports in root/meshdsl that break the law."""
    found: list[str] = []
    for path in sorted((root / "meshdsl").rglob("*.py")):
        relative = path.relative_to(root)
        is_package = path.name == "__init__.py"
        module = ".".join((relative.parent if is_package else relative.with_suffix("")).parts)
        here = unit_of(module, None) if module != "meshdsl" else "__init__"
        if here not in RANK and here not in IN_THE_LANGUAGE:
            found.append(f"{relative}: '{here}' has no place in the order; give it one in tests/test_imports.py")
            continue
        for item in imports(path.read_text(encoding="utf-8"), module, is_package=is_package):
            problem = package_problem(here, item)
            if problem:
                found.append(f"{relative}:{item.line}: {problem}")
    return found


def package_problem(here: str, item: Import) -> str | None:
    """The reason why unit `here` may not import `item`, or None when it may."""
    top = item.module.split(".")[0]
    if top != "meshdsl":
        if top in sys.stdlib_module_names or top in DEPENDENCIES:
            return None
        return f"{top} is not a dependency; the package needs jax and numpy and nothing else"

    there = unit_of(item.module, item.name)
    if here in IN_THE_LANGUAGE:
        may = f"{there}.".startswith(f"{here}.") or item.module in ("meshdsl.errors.values", "meshdsl.errors.installed")
        return None if may or (here == "train" and item.module == "meshdsl.errors") else public_problem(item)
    if there in IN_THE_LANGUAGE:
        may = here in ("__init__", "tools", "__main__")
        return None if may else f"{here} may not import {there}, which is built on it"
    if there not in RANK:
        return f"{there} has no place in the order"
    if RANK[there] <= RANK[here]:
        return None
    return f"{here} may not import {there}: the order is {' <- '.join('/'.join(units) for units in ORDER)}"


def public_problem(item: Import) -> str | None:
    """The reason why code written in the language may not import `item` of meshdsl, or None when it may."""
    parts = item.module.split(".")
    if len(parts) == 1 and item.name not in INTERNAL:
        return None
    if len(parts) > 1 and unit_of(item.module, None) in IN_THE_LANGUAGE:
        return None
    return f"{'.'.join(parts + ([item.name] if item.name else []))} is internal; say `import meshdsl as md`"


def public_problems(root: Path) -> list[str]:
    """The imports of models/ and benchmarks/ beyond meshdsl's public names; models/ knows no benchmark.

    Benchmarks may also import what is in `INSIDE`.
    """
    found: list[str] = []
    for path in sorted([*(root / "models").rglob("*.py"), *(root / "benchmarks").rglob("*.py")]):
        relative = path.relative_to(root)
        is_package = path.name == "__init__.py"
        module = ".".join((relative.parent if is_package else relative.with_suffix("")).parts)
        for item in imports(path.read_text(encoding="utf-8"), module, is_package=is_package):
            top = item.module.split(".")[0]
            problem = public_problem(item) if top == "meshdsl" else None
            if relative.parts[0] == "benchmarks" and item.module.startswith(INSIDE):
                problem = None
            if top == "tests" or (top == "benchmarks" and relative.parts[0] == "models"):
                problem = f"{relative.parts[0]}/ may not import {top}/"
            if problem:
                found.append(f"{relative}:{item.line}: {problem}")
    return found


def _runs_text(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in ("eval", "exec") and ast.unparse(function.value) == "builtins"
    return isinstance(function, ast.Name) and function.id in ("eval", "exec")


def unsafe_problems(source: str) -> list[str]:
    """Uses of JAX's private modules, of pickle and its kin, and of eval and exec, by line."""
    found: list[tuple[int, str]] = []
    if not re.search("_src|eval|exec|pickle|" + "|".join(UNSAFE_MODULES), source):
        return []  # quicker than to parse it
    for item in imports(source, "file"):
        name = f"{item.module}.{item.name}" if item.name else item.module
        if re.match(r"jax(lib)?\._src\b", name):
            found.append((item.line, f"{name} is private to JAX"))
        if item.module.split(".")[0] in UNSAFE_MODULES:
            found.append((item.line, f"{item.module} runs code from the data it reads"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node) in ("jax._src", "jaxlib._src"):
            found.append((node.lineno, f"{ast.unparse(node)} is private to JAX"))
        if isinstance(node, ast.Call) and _runs_text(node.func):
            found.append((node.lineno, f"{ast.unparse(node.func)} runs text as code"))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append((node.value.lineno, "allow_pickle runs code from the data it reads"))
    return [f"{line}: {problem}" for line, problem in sorted(set(found))]


def test_the_package_imports_one_way():
    assert not (found := package_problems(ROOT)), "\n".join(found)


def test_models_and_benchmarks_import_the_public_package():
    assert not (found := public_problems(ROOT)), "\n".join(found)


def test_nothing_private_and_nothing_that_runs_data():
    folders = ["meshdsl", "models", "tests", "benchmarks", "docs"]
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for problem in unsafe_problems(path.read_text(encoding="utf-8"))
        if not (path == RUNS_CELLS and "runs text as code" in problem)
        and not (path == PICKLES and "pickle runs code" in problem)
    ]
    assert not found, "\n".join(found)


def test_the_command_line_starts_without_jax():
    script = (
        "import importlib.util, sys\n"
        "if importlib.util.find_spec('meshdsl.tools.cli'): import meshdsl.tools.cli\n"
        "print(*sorted({'jax', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [], f"importing meshdsl.tools.cli imports {run.stdout}"


# The checks themselves: each line in each file, and the complaint it must draw ("" for none).
PACKAGE_CASES = [
    ("meshdsl/dims.py", "from .errors import ShapeError", ""),
    ("meshdsl/dims.py", "from . import errors", ""),
    ("meshdsl/errors.py", "from .dims import Dim", "errors may not import dims"),
    ("meshdsl/errors.py", "from . import dims", "errors may not import dims"),
    ("meshdsl/errors.py", "import meshdsl.dims", "errors may not import dims"),
    ("meshdsl/errors.py", "def f():\n    from meshdsl import dims", "errors may not import dims"),
    ("meshdsl/trace.py", "import meshdsl as md", "trace may not import __init__"),
    ("meshdsl/trace.py", "from . import __version__", "trace may not import __init__"),
    ("meshdsl/ops/control.py", "from .elementwise import exp", ""),
    ("meshdsl/ops/control.py", "from .. import trace", ""),
    ("meshdsl/ops/control.py", "from ..control.autodiff import grad", "ops may not import control"),
    ("meshdsl/lowering/emit.py", "from ..cost.ledger import bytes_sent", "lowering may not import cost"),
    ("meshdsl/lowering/emit.py", "from ..layouts import Sharding", ""),
    ("meshdsl/lowering/emit.py", "from ..nn import dense", "lowering may not import nn"),
    ("meshdsl/lowering/emit.py", "import optax", "optax is not a dependency"),
    ("meshdsl/lowering/emit.py", "from jax import lax", ""),
    ("meshdsl/helpers.py", "", "'helpers' has no place in the order"),
    ("meshdsl/errors.py", "from .helpers import f", "helpers has no place in the order"),
    ("meshdsl/__init__.py", "from .compile import compile", ""),
    ("meshdsl/__init__.py", "from . import nn, optim", ""),
    ("meshdsl/__init__.py", "from . import tools", "__init__ may not import tools"),
    ("meshdsl/tools/cli.py", "from ..cost import report", ""),
    ("meshdsl/tools/cli.py", "import meshdsl as md\nfrom .. import train", ""),
    ("meshdsl/__main__.py", "from .tools.cli import main", ""),
    ("meshdsl/nn/attention.py", "import meshdsl as md\nfrom .dense import dense", ""),
    ("meshdsl/nn/attention.py", "from meshdsl import dims, einsum", ""),
    (
        "meshdsl/nn/attention.py",
        "from ..ops.contraction import einsum",
        "meshdsl.ops.contraction.einsum is internal",
    ),
    ("meshdsl/nn/attention.py", "from meshdsl import lowering", "meshdsl.lowering is internal"),
    ("meshdsl/tools/demo.py", "from meshdsl.train import fit", ""),
]
PUBLIC_CASES = [
    ("models/transformer.py", "import meshdsl as md\nfrom models.mlp import mlp", ""),
    ("models/transformer.py", "from .mlp import mlp", ""),
    ("models/transformer.py", "from meshdsl.lowering import emit", "meshdsl.lowering.emit is internal"),
    ("models/transformer.py", "import meshdsl.ir", "meshdsl.ir is internal"),
    ("models/transformer.py", "import benchmarks.step", "models/ may not import benchmarks/"),
    ("benchmarks/step.py", "import meshdsl.models.mlp\nfrom meshdsl import nn", ""),
    ("benchmarks/step.py", "from tests import laws", "benchmarks/ may not import tests/"),
]
UNSAFE_CASES = [
    ("import jax", ""),
    ("from jax import lax", ""),
    ("from jax._src import core", "jax._src.core is private"),
    ("from jax import _src", "jax._src is private"),
    ("import jax\njax._src.core", "jax._src is private"),
    ("import pickle", "pickle runs code"),
    ("eval('1')", "eval runs text"),
    ("model.eval()", ""),
    ("numpy.load(path, allow_pickle=True)", "allow_pickle runs code"),
]


@pytest.mark.parametrize(("file", "source", "complaint"), PACKAGE_CASES + PUBLIC_CASES)
def test_complaints_about_imports(tmp_path: Path, file: str, source: str, complaint: str):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = package_problems(tmp_path) + public_problems(tmp_path)
    assert [complaint in problem for problem in found] == ([True] if complaint else [])


@pytest.mark.parametrize(("source", "complaint"), UNSAFE_CASES)
def test_complaints_about_what_is_unsafe(source: str, complaint: str):
    found = unsafe_problems(source)
    assert [complaint in problem for problem in found] == ([True] if complaint else [])
