"""The operations, one family per file. Importing any of them gives tensors their operators."""

from . import operators as operators
