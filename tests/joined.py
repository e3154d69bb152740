"""Functions that JAX compiles as one program.

The smallest program takes 30 ms to lower and compile, and as part of a larger one less than 10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import meshdsl as md
from meshdsl.targets import target_of
from meshdsl.trace import tree
from meshdsl.trace.tensors import concrete


def in_groups(functions: Mapping[Any, Callable[..., Any]], *args: Any, size: int = 16) -> Callable[[Any], Any]:
    """The result of one of the functions of these arguments, by its key; `size` neighbours are one program.

    If one of them raises, each is a program of its own, so that only its own case fails.
    """

    def together(keys: Sequence[Any]) -> Sequence[Any]:
        return jax.jit(lambda *args: [functions[key](*args) for key in keys])(*args)

    return _by_group(list(functions), size, together)


def calls_in_groups(
    cases: Mapping[Any, Callable[[], tuple[md.Compiled, Sequence[Any]]]], size: int = 8
) -> Callable[[Any], Any]:
    """As `in_groups`, of compiled functions with their arguments, which each case makes when it is first needed."""
    return _by_group(list(cases), size, lambda keys: calls(*(cases[key]() for key in keys)))


def _by_group(
    keys: Sequence[Any], size: int, together: Callable[[Sequence[Any]], Sequence[Any]]
) -> Callable[[Any], Any]:
    """The result for a key, from those of its group, which are computed together, or alone if one of them raises."""

    @functools.cache
    def group(start: int) -> dict[Any, Any]:
        some = keys[start : start + size]
        try:
            return dict(zip(some, together(some), strict=True))
        except Exception:  # each case raises its own
            return {}

    def result(key: Any) -> Any:
        at = keys.index(key)
        results = group(at - at % size)
        return results[key] if results else together([key])[0]

    return result


def calls(*each: tuple[md.Compiled, Sequence[Any]]) -> list[Any]:
    """The results of compiled functions, each with its arguments. Functions on the same devices run as one program."""
    found: list[Any] = [None] * len(each)
    groups: dict[Any, list[int]] = {}
    signatures = [function._for(args) for function, args in each]
    for i, (stages, _) in enumerate(signatures):
        groups.setdefault(tuple(stages.bound.devices.flat), []).append(i)
    for devices, group in groups.items():
        several = [signatures[i][0] for i in group]
        functions = [stages.emitted(stages.bound, target_of(devices)) for stages in several]
        arrays = [stages.arrays(leaves) for stages, leaves in (signatures[i] for i in group)]
        joined = jax.jit(
            lambda arrays, functions=functions: [f(*xs) for f, xs in zip(functions, arrays, strict=True)],
            out_shardings=[stages.results for stages in several],
        )
        for i, stages, results in zip(group, several, joined(arrays), strict=True):
            tensors = concrete(stages.out_dims, stages.out_dtypes, results)
            found[i] = tree.tree_unflatten(stages.result, tensors)
    return found
