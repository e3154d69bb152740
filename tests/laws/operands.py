"""Operands and dtypes that many rows share."""

from __future__ import annotations

from meshdsl.trace import Tensor

from .row import In

X, V, W = In("a b"), In("b"), In("b c")
INTS = ("int32", "uint8")
REAL = ("float32", "bfloat16", "float16")
KEY = In("key_word=2", "key", "uint32")


def size_of(x: Tensor, name: str) -> int:
    """The size of a dim of x."""
    return next(d.size for d in x.dims if d.name == name)
