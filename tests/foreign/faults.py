"""Faults in sharded JAX programs: each is one collective of a program, written wrongly, at a known line."""

from __future__ import annotations

import ast
import importlib.abc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# What a collective becomes: {E} is its operand, {A} its axes, {C} the call as it is; a leaf of the operand is {L}.
SUMS = {
    "missing": "{L}",
    "doubled": "lax.psum(lax.psum({L}, {A}), {A})",
    "pmean": "lax.pmean({L}, {A})",
    "pmax": "lax.pmax({L}, {A})",
    "scale": "lax.psum({L}, {A}) * lax.axis_size({A})",
    "stale": "lax.ppermute(lax.psum({L}, {A}), {A}, [(0, 0)])",
    "first": "lax.all_gather({L}, {A})[0]",
}
MAXIMA = {"missing": "{L}", "psum": "lax.psum({L}, {A})", "pmean": "lax.pmean({L}, {A})"}
GATHERS = {
    "order": "jnp.flip(lax.all_gather({E}, {A}), 0).reshape({C}.shape)",
    "own": "jnp.concatenate([{E}] * lax.axis_size({A}), {D})",
    "psum": "jnp.concatenate([lax.psum({E}, {A})] * lax.axis_size({A}), {D})",
}
SCATTERS = {
    "missing": "lax.dynamic_slice_in_dim({E}, lax.axis_index({A}) * {C}.shape[{D}], {C}.shape[{D}], {D})",
    "stale": "lax.dynamic_slice_in_dim(lax.psum({E}, {A}), 0, {C}.shape[{D}], {D})",
    "scale": "{C} / lax.axis_size({A})",
    "doubled": "lax.psum_scatter(lax.psum({E}, {A}), {A}, scatter_dimension={D}, tiled=True)",
}
EXCHANGES = {
    "order": "jnp.flip({C}, {concat_axis})",
    "missing": "{E}.reshape({C}.shape)",
    "swapped": "lax.all_to_all({E}, {A}, split_axis={split_axis}, concat_axis={concat_axis}, tiled=True)[..., ::-1]",
    "scale": "{C} / lax.axis_size({A})",
}
PERMUTES = {
    "reversed": "lax.ppermute({L}, {A}, [(b, a) for a, b in {P}])",
    "missing": "{L}",
    "short": "lax.ppermute({L}, {A}, list({P})[:-1])",
    "wrong": "lax.ppermute({L}, {A}, [(a, ((b + 1) % lax.axis_size({A}))) for a, b in {P}])",
    "psum": "lax.psum({L}, {A})",
}
INDICES = {"zero": "{C} * 0", "reversed": "lax.axis_size({A}) - 1 - {C}", "shifted": "{C} + 1"}
KINDS = {
    "psum": SUMS, "pmean": SUMS, "pmax": MAXIMA, "all_gather": GATHERS, "psum_scatter": SCATTERS,
    "all_to_all": EXCHANGES, "ppermute": PERMUTES, "axis_index": INDICES,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A program with one fault: its lines in the source, and the module with it, ready to build."""

    program: str
    kind: str
    lines: tuple[int, int]
    leaf: int | None
    path: Path
    change: Callable[[ast.Module], ast.Module]

    @property
    def module(self) -> types.ModuleType:
        return module_of(self.change(ast.parse(self.path.read_text())), self.path)

    def __str__(self) -> str:
        return f"{self.program}:{self.lines[0]} {self.kind}" + ("" if self.leaf is None else f" of leaf {self.leaf}")


def faults(name: str, path: Path, axes: list[str], functions: list[str] | None, leaves: int) -> Iterator[Fault]:
    """Every fault of the collectives of a file, in these functions; of a tree, of each of its first `leaves` leaves."""
    tree = ast.parse(path.read_text())
    for number, call, inside in _calls(tree):
        if functions is not None and not any(f in functions for f in inside):
            continue
        for kind, template in _faults_of(call, axes):
            per_leaf = "{L}" in template and not _is_one_array(call)
            for leaf in range(leaves) if per_leaf else (None,):

                def change(
                    tree: ast.Module, number: int = number, template: str = template, leaf: Any = leaf
                ) -> ast.Module:
                    target = next(c for n, c, _ in _calls(tree) if n == number)
                    return _Replace(target, _written(target, template, leaf)).visit(tree)

                yield Fault(name, kind, (call.lineno, call.end_lineno or call.lineno), leaf, path, change)
    for node, kind, new in _misplaced(tree):
        if functions is None or any(f in functions for f in _functions_at(tree, node.lineno)):

            def swapped(tree: ast.Module, node: ast.BinOp = node, new: ast.expr = new) -> ast.Module:
                same = ast.dump(node, include_attributes=True)
                target = next(n for n in ast.walk(tree) if ast.dump(n, include_attributes=True) == same)
                return _Replace(target, new).visit(tree)

            yield Fault(name, kind, (node.lineno, node.end_lineno or node.lineno), None, path, swapped)


def _faults_of(call: ast.Call, axes: list[str]) -> Iterator[tuple[str, str]]:
    callee = call.func.attr  # type: ignore[attr-defined]
    yield from KINDS[callee].items()
    own = call.args[-1 if callee == "axis_index" else 1]
    if callee in ("psum", "pmean", "pmax", "axis_index") and isinstance(own, ast.Constant):
        for axis in axes:
            if axis != own.value:
                operand = "" if callee == "axis_index" else "{L}, "
                yield f"axis {axis}", f"lax.{callee}({operand}{axis!r})"


def _calls(tree: ast.AST, inside: tuple[str, ...] = ()) -> list[tuple[int, ast.Call, tuple[str, ...]]]:
    """Every call of a collective with its number, in order, and the functions around it."""
    found = list[tuple[ast.Call, tuple[str, ...]]]()

    def walk(node: ast.AST, inside: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef):
            inside = (*inside, node.name)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"lax.{name}" for name in KINDS}:
            found.append((node, inside))
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(tree, ())
    return [(i, call, own) for i, (call, own) in enumerate(found)]


def _functions_at(tree: ast.AST, line: int) -> list[str]:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return [n.name for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)]


def _is_one_array(call: ast.Call) -> bool:
    return not isinstance(call.args[0], ast.Tuple | ast.Dict | ast.Name)


def _written(call: ast.Call, template: str, leaf: int | None) -> ast.expr:
    text = {"C": ast.unparse(call)}
    callee = call.func.attr  # type: ignore[attr-defined]
    if callee == "axis_index":
        text["A"] = ast.unparse(call.args[0])
    else:
        text["E"], text["A"] = ast.unparse(call.args[0]), ast.unparse(call.args[1])
        keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
        text |= {k: v for k, v in keywords.items() if k in ("split_axis", "concat_axis")}
        text["D"] = keywords.get("axis", keywords.get("scatter_dimension", "0"))
        if callee == "ppermute":
            text["P"] = ast.unparse(call.args[2])
    if "{L}" in template:
        as_it_is = ast.unparse(ast.Call(call.func, [ast.Name("_x"), *call.args[1:]], call.keywords))
        wrong = template.format(**text, L="_x")
        new = f"_at_leaf({text['E']}, {leaf}, lambda _x: {as_it_is}, lambda _x: {wrong})"
    else:
        new = template.format(**text)
    return ast.parse(new, mode="eval").body


def _misplaced(tree: ast.AST) -> Iterator[tuple[ast.BinOp, str, ast.expr]]:
    """A value added after a sum, added inside it: a bias, a residual."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "psum":
                    e, a, y = ast.unparse(one.args[0]), ast.unparse(one.args[1]), ast.unparse(other)
                    yield node, "misplaced", ast.parse(f"lax.psum(({e}) + ({y}), {a})", mode="eval").body


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, new: ast.expr) -> None:
        self.target, self.new = target, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.target:
            for part in ast.walk(self.new):
                if hasattr(part, "lineno") or isinstance(part, ast.expr):
                    part.lineno = part.end_lineno = self.target.lineno  # type: ignore[attr-defined]
                    part.col_offset = part.end_col_offset = 0  # type: ignore[attr-defined]
            return self.new
        return super().visit(node)


def module_of(tree: ast.Module, path: Path) -> types.ModuleType:
    module = types.ModuleType("faulty")
    module.__dict__.update(_at_leaf=_at_leaf, __file__=str(path))
    import sys

    sys.modules["faulty"] = module
    _Loader(compile(ast.fix_missing_locations(tree), str(path), "exec")).exec_module(module)
    return module


class _Loader(importlib.abc.InspectLoader):
    """Runs code that was changed after it was read."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def get_code(self, fullname: str) -> types.CodeType:
        return self.code

    def get_source(self, fullname: str) -> None:
        return None


def _at_leaf(tree: Any, leaf: int | None, right: Callable[[Any], Any], wrong: Callable[[Any], Any]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    changed = [wrong(x) if leaf in (None, i) else right(x) for i, x in enumerate(leaves)]
    if leaf is not None and leaf >= len(leaves):
        raise IndexError("no such leaf")
    return jax.tree.unflatten(structure, changed)
