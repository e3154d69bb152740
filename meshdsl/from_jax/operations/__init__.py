"""Each primitive of JAX as operations of meshdsl. A handler takes the replay, the step and its operands: tensors, or
numbers for constants of one element. It returns the result, or a list of results."""

from __future__ import annotations

import importlib

from .registry import HANDLERS, RefusedError

for _name in ("elementwise", "shapes", "products", "windows", "indices", "keys", "loops"):
    importlib.import_module(f"{__name__}.{_name}")

__all__ = ["HANDLERS", "RefusedError"]
