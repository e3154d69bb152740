"""Options without effect: an error, unless the caller is not strict; then a warning, and the option is dropped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from . import LayoutError, MeshdslError, caller

_REPORT: ContextVar[Callable[[str], object] | None] = ContextVar("report", default=None)


class NoEffectError(LayoutError):
    """An option has no effect on this program, mesh or machine. With `strict=False`, it is a `md.NoEffectWarning`.

    >>> import meshdsl as md
    >>> md.compile(md.exp, "rows:4", "batch:rows", unroll=True).program(md.spec("batch:8"))
    Traceback (most recent call last):
        ...
    meshdsl.errors.no_effect.NoEffectError: unroll=True has no effect: the program has no loop ...
      ...
    """


class NoEffectWarning(UserWarning):
    """An option without effect was dropped, because of `strict=False`; the warning has the caller's line.

    >>> import warnings
    >>> import meshdsl as md
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     program = md.compile(md.exp, "rows:4", unroll=True, strict=False).program(md.spec("batch:8"))
    >>> [warning.category.__name__ for warning in caught]
    ['NoEffectWarning']
    """


def no_effect(error: MeshdslError, strict: bool = True) -> None:
    """Raise this error about an option without effect; if not strict, warn at the user's line, or report it.

    The caller then continues without the option.
    """
    report, text = _REPORT.get(), str(error.args[0]).partition("\n")[0]
    if report is not None:
        report(text)
    elif strict:
        raise error
    else:
        warn_dropped(text)


def warn_dropped(text: str) -> None:
    """Warn, at the user's line, that what this text describes is dropped."""
    where = caller()
    warnings.warn_explicit(f"{text}; it is dropped", NoEffectWarning, where.file, where.line)


@contextmanager
def reported(report: Callable[[str], object]) -> Iterator[None]:
    """Within the block, options without effect are dropped, and `report` gets the first line of each error."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)
