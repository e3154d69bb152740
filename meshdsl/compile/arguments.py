"""The arguments of a call of a compiled function: keywords, and static ones that are Python values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ShapeError, nearest
from ..ir import exact


class Bound(NamedTuple):
    """A call with its static arguments filled in: a function of the others, by position."""

    key: Any  # equal for calls that share a trace: the static values, and how the others are passed
    function: Callable[..., Any]
    args: tuple[Any, ...]
    numbers: tuple[int | None, ...]  # of each argument in `args`: its position in the call, None if by keyword


def static_names(function: Callable[..., Any], static: Sequence[int | str] | int | str) -> frozenset[str]:
    """The names of the static parameters, which are given by name or number.

    >>> sorted(static_names(lambda x, steps, train: x, ("train", 1)))
    ['steps', 'train']
    """
    entries = (static,) if isinstance(static, int | str) else tuple(static)
    if not entries:
        return frozenset()
    known = list(inspect.signature(function).parameters)
    for entry in entries:
        if isinstance(entry, str) and entry not in known:
            raise ShapeError(f"static={entry!r} is no argument; {nearest(entry, known)}")
        if isinstance(entry, int) and not 0 <= entry < len(known):
            raise ShapeError(f"static={entry} of a function with {len(known)} arguments ({', '.join(known)})")
    return frozenset(entry if isinstance(entry, str) else known[entry] for entry in entries)


def _check_hash(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ShapeError(
            f"static argument {name!r} has no hash: {value!r}\n"
            "  a call with an equal value shares the program; pass a tuple"
        ) from None


def bind(function: Callable[..., Any], static: frozenset[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
    """Bind a call; raises `ShapeError` if the arguments do not fit, or a static one has no hash."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ShapeError(f"{name} takes ({', '.join(signature.parameters)}): {error}") from None
    parameters = list(signature.parameters.values())
    spread = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), len(parameters))
    names = [parameters[min(i, spread)].name for i in range(len(bound.args))]
    fixed = {
        name: value for name, value in (*zip(names, bound.args, strict=True), *bound.kwargs.items()) if name in static
    }
    for name, value in fixed.items():
        _check_hash(name, value)
    moving = [i for i, name in enumerate(names) if name not in static]
    keywords = [name for name in bound.kwargs if name not in static]
    labels = [names[i] if i < spread else f"{names[i]}_{i - spread}" for i in moving] + keywords
    call = _of_others(function, bound, moving, keywords, labels)
    key = (tuple((name, exact(value)) for name, value in fixed.items()), tuple(labels))
    values = (*(bound.args[i] for i in moving), *(bound.kwargs[name] for name in keywords))
    return Bound(key, call, values, (*moving, *(None for _ in keywords)))


def _of_others(
    function: Callable[..., Any],
    bound: inspect.BoundArguments,
    moving: Sequence[int],
    keywords: Sequence[str],
    labels: Sequence[str],
) -> Callable[..., Any]:
    """The function of these positional arguments and keywords of a call, all by position; the others are fixed.

    It takes the keywords that the call leaves out too: a plan may fill them in.
    """

    def call(*values: Any, **more: Any) -> Any:
        positional, named = list(bound.args), {**bound.kwargs, **more}
        for i, value in zip(moving, values, strict=False):
            positional[i] = value
        named.update(zip(keywords, values[len(moving) :], strict=True))
        return function(*positional, **named)

    call.__name__ = getattr(function, "__name__", "call")
    parameter, given = inspect.Parameter, {*bound.arguments, *labels}
    moved = [parameter(label, parameter.POSITIONAL_OR_KEYWORD) for label in labels]
    left = [p for p in bound.signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in given]
    call.__signature__ = inspect.Signature([*moved, *left])  # pyright: ignore[reportFunctionMemberAccess]
    return call
