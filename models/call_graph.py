"""A data set of implicit feedback: which functions of Python's standard library call which names.

A user is a function. An item is a name that functions call: `len`, or `.append` for a method of any object. As with
people and films, the data only contains which pairs occur. The callee that a function calls last for the first time
is held out (leave one out); its other callees are for training.

Equal Python releases have equal graphs. A batch is a pure function of (split, seed, step).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

import meshdsl as md
from meshdsl.train import corpus

__all__ = ["CallGraph", "call_graph", "callees"]

_SPLITS = ("train", "held_out")
_MIN_CALLEES = 3  # functions with fewer callees are dropped; one is held out, two or more are for training


def callees(source: str | bytes) -> dict[str, tuple[str, ...]]:
    r"""The callees of each function of a module, without repetition, in the order of their first calls.

    >>> callees("class A:\n def f(self, x):\n  g(len(x))\n  x.append(len(x))\n  def inner(): print()\n")
    {'A.f': ('g', 'len', '.append', 'print')}

    Includes the functions of the module and of its classes; nested functions belong to their outer function.
    """
    calls_by_function: dict[str, tuple[str, ...]] = {}

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                calls_by_function[".".join((*path, child.name))] = _called(child)
            elif isinstance(child, ast.ClassDef):
                visit(child, (*path, child.name))
            elif isinstance(child, ast.If | ast.Try):
                visit(child, path)

    visit(ast.parse(source), ())
    return calls_by_function


def _called(function: ast.AST) -> tuple[str, ...]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    positions = []
    for call in calls:
        if isinstance(call.func, ast.Name):
            positions.append((call.lineno, call.col_offset, call.func.id))
        elif isinstance(call.func, ast.Attribute):
            positions.append((call.lineno, call.col_offset, f".{call.func.attr}"))
    return tuple(dict.fromkeys(name for _, _, name in sorted(positions)))


class CallGraph:
    """Functions and their callees, as indices; at most `users` functions and `items` callees.

    The items are the callees with the most callers. The users are functions that call at least three of these; if there
    are more than `users`, those with the most callees. Both are sorted by name; ties go to the name that sorts first.

    >>> graph = CallGraph({"f": ("a", "b", "c"), "g": ("b", "a", "d"), "h": ("a", "b", "d", "c")}, users=2, items=3)
    >>> graph.users, graph.items  # of c and d, c comes first
    (('f', 'h'), ('a', 'b', 'c'))
    >>> graph.held_out.tolist()
    [2, 2]

    Raises `MeshdslError` if no function is left.
    """

    def __init__(self, calls: Mapping[str, Iterable[str]], users: int, items: int):
        counts = Counter(name for callee in calls.values() for name in callee)
        self.items = tuple(sorted(sorted(counts, key=lambda name: (-counts[name], name))[:items]))
        index = {name: i for i, name in enumerate(self.items)}
        known = {user: [index[name] for name in callee if name in index] for user, callee in calls.items()}
        enough = (user for user, callee in known.items() if len(callee) >= _MIN_CALLEES)
        self.users = tuple(sorted(sorted(enough, key=lambda u: (-len(known[u]), u))[:users]))
        if not self.users:
            raise md.MeshdslError(
                f"no function calls {_MIN_CALLEES} of the {len(self.items)} callees; use more functions or items"
            )
        self.held_out = np.array([known[user][-1] for user in self.users], np.int32)
        rows = [(i, item) for i, user in enumerate(self.users) for item in known[user][:-1]]
        self.pairs = np.array(rows, np.int32)  # [calls for training, 2]: function and callee
        self.known = np.zeros((len(self.users), len(self.items)), bool)
        self.known[self.pairs[:, 0], self.pairs[:, 1]] = True

    def describe(self) -> dict[str, object]:
        """The sizes of the data, as a dict."""
        return {
            "kind": "the call graph of the standard library",
            "users": len(self.users),
            "items": len(self.items),
            "calls": len(self.pairs),
            "held_out": len(self.held_out),
        }

    def batch(self, split: str, seed: int, step: int, batch: int, negatives: int) -> dict[str, np.ndarray]:
        """`user` [batch] and `item` [batch, 1 + negatives], int32: a callee, then items that are not callees.

        The training split draws calls at random; its negatives may include the held-out callee. The held-out split
        takes the functions in order; its negatives do not include it. Raises `MeshdslError` for an unknown split, and
        for a function that calls every item.
        """
        if split not in _SPLITS:
            raise md.MeshdslError(f"the split must be one of {', '.join(_SPLITS)}, got {split!r}")
        bits = np.random.Philox(key=seed % 2**128, counter=[0, 0, _SPLITS.index(split), step])
        words = bits.random_raw(batch * (1 + negatives)).reshape(batch, 1 + negatives)
        if split == "train":
            user, callee = self.pairs[words[:, 0] % len(self.pairs)].T
            excluded = self.known
        else:
            user = (step * batch + np.arange(batch)) % len(self.users)
            callee = self.held_out[user]
            excluded = self.known.copy()
            excluded[np.arange(len(self.users)), self.held_out] = True
        if excluded[user].all(1).any():
            name = self.users[user[excluded[user].all(1)][0]]
            raise md.MeshdslError(
                f"{name} calls all {len(self.items)} callees, so no negative can be drawn; use more items"
            )
        other = (words[:, 1:] % len(self.items)).astype(np.int32)
        while (taken := excluded[user[:, None], other]).any():  # take the next callee that is not excluded
            other = np.where(taken, (other + 1) % len(self.items), other)
        return {"user": user.astype(np.int32), "item": np.concatenate([callee[:, None], other], 1).astype(np.int32)}


@lru_cache(maxsize=4)
def call_graph(users: int, items: int) -> CallGraph:
    """The call graph of this Python's standard library; building it takes a few seconds."""
    return CallGraph(_standard_library(), users, items)


@lru_cache(maxsize=1)
def _standard_library() -> dict[str, tuple[str, ...]]:
    calls_by_function: dict[str, tuple[str, ...]] = {}
    for document in corpus().documents:
        if document.kind == "source":
            calls_by_function.update(
                {f"{document.name}:{name}": callee for name, callee in callees(document.text).items()}
            )
    return calls_by_function
