"""Each primitive of JAX as operations of meshdsl: each module adds its handlers to the table of `replay`."""

from . import elementwise, fallback, indices, keys, loops, products, shapes, windows

__all__ = ["elementwise", "fallback", "indices", "keys", "loops", "products", "shapes", "windows"]
