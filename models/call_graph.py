"""Who calls what in Python's standard library: implicit feedback, read in place from sources that every Python has.

A user is a function, an item is what functions call: `len`, or `.append` for a method of whatever object. A function
has called an item or not; that is all that is known, as of people and films. Its last new callee in source order is
held out (leave one out); the others are for training.

The same release of Python has the same graph. A batch is a pure function of (split, seed, step).
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
_LEAST = 3  # callees of a function that counts: one is held out, and one alone says little


def callees(source: str | bytes) -> dict[str, tuple[str, ...]]:
    r"""What each function of a module calls, each callee once, in the order of its first call.

    >>> callees("class A:\n def f(self, x):\n  g(len(x))\n  x.append(len(x))\n  def inner(): print()\n")
    {'A.f': ('g', 'len', '.append', 'print')}

    Functions are those of the module and of its classes; what a function defines inside is part of it.
    """
    found: dict[str, tuple[str, ...]] = {}

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[".".join((*path, child.name))] = _called(child)
            elif isinstance(child, ast.ClassDef):
                visit(child, (*path, child.name))
            elif isinstance(child, ast.If | ast.Try):
                visit(child, path)

    visit(ast.parse(source), ())
    return found


def _called(function: ast.AST) -> tuple[str, ...]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    places = []
    for call in calls:
        if isinstance(call.func, ast.Name):
            places.append((call.lineno, call.col_offset, call.func.id))
        elif isinstance(call.func, ast.Attribute):
            places.append((call.lineno, call.col_offset, f".{call.func.attr}"))
    return tuple(dict.fromkeys(name for _, _, name in sorted(places)))


class CallGraph:
    """Functions and what they call, as indices; at most `users` functions and `items` callees.

    The items are what most functions call. The users are the functions that call at least three of these, and where
    there are more than `users`, those that call most. Both are in order of name; ties go to the name that comes first.

    >>> graph = CallGraph({"f": ("a", "b", "c"), "g": ("b", "a", "d"), "h": ("a", "b", "d", "c")}, users=2, items=3)
    >>> graph.users, graph.items  # of c and d, c comes first
    (('f', 'h'), ('a', 'b', 'c'))
    >>> graph.held_out.tolist()
    [2, 2]

    Raises `MeshdslError` when no function is left.
    """

    def __init__(self, calls: Mapping[str, Iterable[str]], users: int, items: int):
        counts = Counter(name for called in calls.values() for name in called)
        self.items = tuple(sorted(sorted(counts, key=lambda name: (-counts[name], name))[:items]))
        index = {name: i for i, name in enumerate(self.items)}
        kept = {user: [index[name] for name in called if name in index] for user, called in calls.items()}
        enough = sorted((u for u, called in kept.items() if len(called) >= _LEAST), key=lambda u: (-len(kept[u]), u))
        self.users = tuple(sorted(enough[:users]))
        if not self.users:
            raise md.MeshdslError(
                f"no function calls {_LEAST} of the {len(self.items)} callees: there is nothing to learn"
            )
        self.held_out = np.array([kept[user][-1] for user in self.users], np.int32)
        rows = [(i, item) for i, user in enumerate(self.users) for item in kept[user][:-1]]
        self.pairs = np.array(rows, np.int32)  # [calls for training, 2]: function and callee
        self.known = np.zeros((len(self.users), len(self.items)), bool)
        self.known[self.pairs[:, 0], self.pairs[:, 1]] = True

    def describe(self) -> dict[str, object]:
        """Sizes."""
        return {
            "kind": "the call graph of the standard library",
            "users": len(self.users),
            "items": len(self.items),
            "calls": len(self.pairs),
            "held_out": len(self.held_out),
        }

    def batch(self, split: str, seed: int, step: int, batch: int, negatives: int) -> dict[str, np.ndarray]:
        """`user` [batch] and `item` [batch, 1 + negatives], int32: a callee, then callees that the function never has.

        The training split draws calls; negatives are any that are not among the calls for training. The held-out
        split goes through the functions in order, and its negatives are neither. Raises `MeshdslError` for another
        split, and for a function that calls every item.
        """
        if split not in _SPLITS:
            raise md.MeshdslError(f"a split is one of {', '.join(_SPLITS)}, got {split!r}")
        bits = np.random.Philox(key=seed % 2**128, counter=[0, 0, _SPLITS.index(split), step])
        words = bits.random_raw(batch * (1 + negatives)).reshape(batch, 1 + negatives)
        if split == "train":
            user, called = self.pairs[words[:, 0] % len(self.pairs)].T
            never = self.known
        else:
            user = (step * batch + np.arange(batch)) % len(self.users)
            called = self.held_out[user]
            never = self.known.copy()
            never[np.arange(len(self.users)), self.held_out] = True
        if never[user].all(1).any():
            name = self.users[user[never[user].all(1)][0]]
            raise md.MeshdslError(
                f"{name} calls all {len(self.items)} callees: there is no negative to draw; keep more items"
            )
        other = (words[:, 1:] % len(self.items)).astype(np.int32)
        while (taken := never[user[:, None], other]).any():  # on to the next callee that is free
            other = np.where(taken, (other + 1) % len(self.items), other)
        return {"user": user.astype(np.int32), "item": np.concatenate([called[:, None], other], 1).astype(np.int32)}


@lru_cache(maxsize=4)
def call_graph(users: int, items: int) -> CallGraph:
    """The graph of this Python's standard library; reading it takes some seconds."""
    return CallGraph(_standard_library(), users, items)


@lru_cache(maxsize=1)
def _standard_library() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for document in corpus().documents:
        if document.kind == "source":
            found.update({f"{document.name}:{name}": called for name, called in callees(document.text).items()})
    return found
