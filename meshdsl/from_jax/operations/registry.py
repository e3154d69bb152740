"""The table of handlers: which function imports which primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..steps import Step

if TYPE_CHECKING:
    from ..replay import Replay

Handler = Callable[["Replay", Step, list[Any]], Any]
HANDLERS: dict[str, Handler] = {}


class RefusedError(Exception):
    """A step that cannot be imported: the reason, and a way out."""


def operation(*names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of these primitives."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register
