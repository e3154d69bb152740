"""The parameters of public functions as tables, read from signatures and docstrings. Does not need Sphinx.

The meaning of a parameter is the first sentence that mentions it in backticks: of the function's own docstring, else of
its module's, else of the packages around the module, where families say once what their functions share. Failing these,
it is the first sentence or formula of the function's own with the name as a word.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["Parameter", "parameters"]


class Parameter(NamedTuple):
    """One row of the table; `default` is None for a required parameter."""

    name: str
    type: str
    default: str | None
    meaning: str


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function or of a class, without `self` and without private ones.

    >>> def scaled(x: float, *, factor: float = 2.0) -> float:
    ...     '''A product. It is `x` times `factor`, which has to be positive. Nothing more.'''
    ...     return x * factor
    >>> parameters(scaled)[1]
    Parameter(name='factor', type='float', default='2.0', meaning='It is `x` times `factor`, which has to be positive.')
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # exceptions have none
        return []
    texts = list(_texts(function))
    return [
        Parameter(_stars(p) + p.name, _type(p.annotation), _default(p.default), _meaning(p.name, texts))
        for p in signature.parameters.values()
        if p.name not in ("self", "cls") and not p.name.startswith("_")
    ]


def _texts(function: Callable[..., Any]) -> Iterator[str]:
    """The docstrings that may say what a parameter is, the nearest first."""
    yield inspect.getdoc(function) or ""
    module = function.__module__
    while "." in module:
        yield importlib.import_module(module).__doc__ or ""
        module = module.rpartition(".")[0]


def _meaning(name: str, texts: list[str]) -> str:
    def alone(sentence: str) -> bool:
        return any(re.fullmatch(rf"\**{name}([=(].*)?", code) for code in re.findall(r"`([^`]*)`", sentence))

    def word(sentence: str) -> bool:
        return re.search(rf"(?<![\w.-]){name}(?![\w-])", sentence) is not None

    for text, mentions in [*((text, alone) for text in texts), (texts[0], word)]:
        if found := [sentence for sentence in _sentences(text) if mentions(sentence)]:
            return min(found, key=lambda sentence: sentence.startswith("Raises"))
    return ""


def _sentences(text: str) -> Iterator[str]:
    """The sentences of all paragraphs but sessions, and the formulas of listings as code."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("    "):
            yield from (f"`{formula.replace('`', '')}`" for formula in re.split(r";\s+|\n\s+", paragraph.strip()))
        elif not paragraph.startswith(">>>"):
            plain = re.sub(r"::$", ":", " ".join(paragraph.split()))
            yield from re.split(r"(?<=[.:])\s+(?=[A-Z`])(?=(?:[^`]*`[^`]*`)*[^`]*$)", plain)


def _stars(parameter: inspect.Parameter) -> str:
    return {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__name__
    text = repr(value)
    return "" if text.startswith("<") or " at 0x" in text or len(text) > 60 else text
