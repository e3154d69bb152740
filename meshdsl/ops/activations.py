"""Activation functions, composed of elementwise operations."""

from __future__ import annotations

import math
from typing import Any

from ..trace import Tensor, as_tensor
from .elementwise import abs, erf, exp, expm1, log1p, sigmoid, square, tanh, where


def gelu(x: Any, approximate: bool = True) -> Tensor:
    """Gaussian error linear unit; the tanh form by default (`approximate`), as in `jax.nn.gelu`.

    >>> import meshdsl as md
    >>> md.gelu(md.tensor([0.0, 1.0], "a"))
    tensor(float32[a=2], [0.     0.8412])
    """
    x = as_tensor(x)
    if approximate:
        return 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * square(x)))))
    return 0.5 * x * (1 + erf(x * (1 / math.sqrt(2))))


def silu(x: Any) -> Tensor:
    """x * sigmoid(x).

    >>> import meshdsl as md
    >>> md.silu(md.tensor([0.0, 1.0], "a"))
    tensor(float32[a=2], [0.     0.7311])
    """
    x = as_tensor(x)
    return x * sigmoid(x)


def softplus(x: Any) -> Tensor:
    """log(1 + exp(x)) per element, without overflow.

    >>> import meshdsl as md
    >>> md.softplus(md.tensor([0.0], "a"))
    tensor(float32[a=1], [0.6931])
    """
    x = as_tensor(x)
    return where(x >= 0, x, 0) + log1p(exp(-abs(x)))  # at 0 both terms use the slope from the right; the sum is 1/2


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha * (exp(x) - 1).

    >>> import meshdsl as md
    >>> md.elu(md.tensor([-1.0, 1.0], "a"))
    tensor(float32[a=2], [-0.6321  1.    ])
    """
    x = as_tensor(x)
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x)))


def selu(x: Any) -> Tensor:
    """The self-normalising `elu` (Klambauer et al., 2017).

    >>> import meshdsl as md
    >>> md.selu(md.tensor([1.0], "a"))
    tensor(float32[a=1], [1.0507])
    """
    return 1.0507009873554804934193349852946 * elu(x, 1.6732632423543772848170429916717)


def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x where x >= 0, else slope * x.

    >>> import meshdsl as md
    >>> md.leaky_relu(md.tensor([-1.0, 1.0], "a"))
    tensor(float32[a=2], [-0.01  1.  ])
    """
    x = as_tensor(x)
    return where(x >= 0, x, slope * x)
