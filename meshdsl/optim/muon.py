"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized by Newton-Schulz iterations.

    momentum -> Newton-Schulz: all singular values near 1 -> scale by the matrix's shape -> learning rate

The products of an iteration contract the dims of a weight by name, so a sharded weight is orthogonalized as a whole,
under every layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax

import meshdsl as md

from .checks import LearningRate, check_state_dtype, check_update, checked_decays, checked_rate
from .optimizers import Optimizer, adamw, cast_as, of_trained, rate_of, recorded, zero, zeros_like
from .per_tensor import Chosen, every, norm, own_dims, path_of, wide


class Matrix(NamedTuple):
    """A weight seen as matrices: input dims by output dims, one matrix for each index of the other dims."""

    inputs: tuple[md.Dim, ...]
    outputs: tuple[md.Dim, ...]


@recorded
def muon(
    learning_rate: LearningRate,
    beta: float = 0.95,
    *,
    matrices: Mapping[str, str | None] | None = None,
    others: Optimizer | None = None,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    rms: float | None = None,
    weight_decay: float = 0.0,
    decays: Chosen = every,
    eps: float = 1e-8,
    stacked: str = "layer*",
    state_dtype: Any = None,
) -> Optimizer:
    """Muon: steps along the orthogonalized momentum of each weight matrix::

        m = beta m + (1 - beta) g;   x = m, or with `nesterov` beta m + (1 - beta) g;   x = x / (|x| + eps)
        `steps` times: a = x x^T;   x = c0 x + (c1 a + c2 a a) x
        p = p - learning_rate (scale x + weight_decay p)

    >>> import meshdsl as md
    >>> optimizer = md.optim.muon(0.1)
    >>> params = {"w": md.tensor([[1.0, 0.0], [0.0, 1.0]], "io hidden"), "bias": md.tensor([1.0, 1.0], "hidden")}
    >>> state = optimizer.init(params)
    >>> sorted(state), sorted(state["m"]), sorted(state["others"]["m"])
    (['m', 'others', 'step'], ['w'], ['bias'])
    >>> after, state = optimizer.update({"w": params["w"] * 8.0, "bias": params["bias"]}, state, params)
    >>> after["w"]
    tensor(float32[io=2 hidden=2], [[0.8892 0.    ]
     [0.     0.8892]])

    By default, each weight with two dims is a matrix, from its first dim to its second. `matrices` says otherwise, by
    path: `{"layer/q": "model -> heads head", "layer/o": "heads head -> model", "embed*": None}`. Each index of the dims
    that are not named, and of the `stacked` dims (see `meshdsl.optim.per_tensor`), has a matrix of its own. `None` and
    every weight that is not a matrix go to the optimizer `others`, by default `adamw(learning_rate, weight_decay=0)`.

    `scale` is sqrt(max(1, outputs / inputs)) (Jordan et al.), or with `rms` it is rms sqrt(max(inputs, outputs)), so
    that updates have that root mean square, 0.2 as in AdamW (Liu et al., 2025, equation 4). `coefficients` are c0, c1
    and c2. m has `state_dtype`; see `adamw`. A parameter that `others` freezes (`with_frozen`) is frozen here too.
    Raises `ShapeError` at `init` if an entry of `matrices` matches no parameter, or names dims that the weight does not
    have, and if no weight is a matrix.
    """
    checked_rate(learning_rate)
    checked_decays(beta=beta)
    rules = dict(matrices or {})
    check_state_dtype(state_dtype)
    rest = others or adamw(learning_rate, weight_decay=0.0, state_dtype=state_dtype)

    def init(params: Any) -> dict[str, Any]:
        ours, theirs = _divided(params, _matrices(params, rules, stacked))
        return {"step": zero(), "m": zeros_like(ours, state_dtype), "others": rest.init(theirs)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        known = _matrices(params, rules, stacked)
        (p, p_others), (g, g_others) = _divided(params, known), _divided(grads, known)
        rate = rate_of(learning_rate, state["step"])
        g = {path: wide(x) for path, x in g.items()}
        m = {path: beta * wide(m) + (1 - beta) * g[path] for path, m in state["m"].items()}

        def move(path: str) -> md.Tensor:
            direction = beta * m[path] + (1 - beta) * g[path] if nesterov else m[path]
            change = _scale(known[path], rms) * _orthogonalized(direction, known[path], steps, coefficients, eps)
            if weight_decay and decays(path):
                change = change + weight_decay * wide(p[path])
            return md.cast(p[path] - rate * change, p[path].dtype)

        new, others_state = rest.update(g_others, state["others"], p_others)
        new = {**new, **{path: move(path) for path in p}}
        params = jax.tree_util.tree_map_with_path(lambda keys, _: new[path_of(keys)], params)
        return params, {"step": state["step"] + 1, "m": cast_as(m, state["m"]), "others": others_state}

    return of_trained(Optimizer(init, update), rest.frozen)


def _matrices(params: Any, rules: Mapping[str, str | None], stacked: str) -> dict[str, Matrix]:
    """The weights that are matrices, by path."""
    weights = {path_of(keys): p for keys, p in jax.tree_util.tree_leaves_with_path(params)}
    for pattern in rules:
        if not any(fnmatchcase(path, pattern) for path in weights):
            raise md.ShapeError(
                f"md.optim.muon: {pattern!r} of matrices= matches no parameter\n  parameters: {', '.join(weights)}"
            )
    known: dict[str, Matrix] = {}
    for path, p in weights.items():
        own = own_dims(p, stacked)
        rule = next((rule for pattern, rule in rules.items() if fnmatchcase(path, pattern)), "")
        if rule:
            known[path] = _parsed(rule, path, p)
        elif rule is not None and len(own) == 2:
            known[path] = Matrix(own[:1], own[1:])
    if not known:
        raise md.ShapeError(
            "md.optim.muon: no parameter is a matrix\n"
            f"  parameters: {', '.join(f'{path} {p.type}' for path, p in weights.items())}\n"
            '  say which are with matrices={"path": "input dims -> output dims"}'
        )
    return known


def _divided(tree: Any, known: Mapping[str, Matrix]) -> tuple[dict[str, md.Tensor], dict[str, md.Tensor]]:
    """The leaves of a tree by path: matrices, and the others."""
    leaves = {path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree)}
    return {k: x for k, x in leaves.items() if k in known}, {k: x for k, x in leaves.items() if k not in known}


def _parsed(rule: str, path: str, p: md.Tensor) -> Matrix:
    """The matrix that a rule "inputs -> outputs" describes."""
    by_name = {d.name: d for d in p.dims}
    sides = [side.split() for side in rule.split("->")]
    names = [name for side in sides for name in side]
    if len(sides) != 2 or not all(sides) or len(set(names)) < len(names) or not set(names) <= by_name.keys():
        raise md.ShapeError(
            f"md.optim.muon: {rule!r} does not describe matrices of {path!r}, which is {p.type}\n"
            f'  write "inputs -> outputs" with different dims of {", ".join(by_name)} on each side'
        )
    inputs, outputs = (tuple(by_name[name] for name in side) for side in sides)
    return Matrix(inputs, outputs)


def _orthogonalized(
    x: md.Tensor, matrix: Matrix, steps: int, coefficients: tuple[float, float, float], eps: float
) -> md.Tensor:
    """x with singular values near 1, between 0.7 and 1.2 with the default coefficients and steps.

    x x^T contracts the larger of inputs and outputs. The dims of the smaller are renamed first, so they are gathered
    once and not in every iteration; the larger ones stay sharded.
    """
    c0, c1, c2 = coefficients
    side = min(matrix, key=_size)
    row, column, middle = (
        {d.name: md.fresh_dim(md.Dim(f"{d.name}_{index}", d.size), x.dims).name for d in side}
        for index in ("row", "column", "middle")
    )
    stacked = [d for d in x.dims if d not in (*matrix.inputs, *matrix.outputs)]
    square = [*stacked, *(md.Dim(names[d.name], d.size) for names in (row, column) for d in side)]
    x = md.rename(md.cast(x / (norm(x, (*matrix.inputs, *matrix.outputs)) + eps), x.dtype), **row)
    for _ in range(steps):
        other = _renamed(x, row, column)
        a = md.einsum(x, other, out=square)
        aa = md.einsum(_renamed(a, column, middle), _renamed(a, row, middle), out=square)
        x = c0 * x + md.einsum(c1 * a + c2 * aa, other, out=x.dims)
    return md.rename(x, **{new: old for old, new in row.items()})


def _renamed(x: md.Tensor, old: Mapping[str, str], new: Mapping[str, str]) -> md.Tensor:
    return md.rename(x, **{old[name]: new[name] for name in old})


def _scale(matrix: Matrix, rms: float | None) -> float:
    inputs, outputs = _size(matrix.inputs), _size(matrix.outputs)
    return math.sqrt(max(1.0, outputs / inputs)) if rms is None else rms * math.sqrt(max(inputs, outputs))


def _size(dims: tuple[md.Dim, ...]) -> int:
    return math.prod(d.size for d in dims)
