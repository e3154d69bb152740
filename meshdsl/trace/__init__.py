"""Tensors and tracing: an operation adds an equation to the running trace, or runs at once on one device."""

from .arguments import KEY_WORD, array_of, check_dtypes, dtype_of, key_words, spec, spec_of, tensor
from .eager import run_kernel
from .literals import CONSTANT, FULL, number
from .tensors import Tensor, known_values
from .tracing import (
    OpenTrace,
    as_tensor,
    bind,
    bind1,
    checked_number,
    current,
    eval_shape,
    evaluate,
    flatten,
    location,
    trace,
    tree,
)

__all__ = [
    "CONSTANT", "FULL", "KEY_WORD", "Tensor", "OpenTrace", "array_of", "as_tensor", "bind", "bind1", "check_dtypes",
    "checked_number", "current", "dtype_of", "eval_shape", "evaluate", "flatten", "key_words", "known_values",
    "location", "number", "run_kernel", "spec", "spec_of", "tensor", "trace", "tree",
]  # fmt: skip
