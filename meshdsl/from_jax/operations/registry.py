"""The table of handlers: which function imports which primitives."""

from __future__ import annotations

from collections.abc import Callable

from ..replay import Handler

HANDLERS: dict[str, Handler] = {}


def operation(*names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of these primitives."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register
