"""Random numbers that depend only on the key and on an element's global index, so they are equal under every layout.

The bits of element i, in row-major order of the given dims, are Threefry-2x32 of the key and i (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011). Each device generates its own block from its offsets. All
numbers equal those of `jax.random` with `jax.random.key(seed)`, bit for bit, for the same sizes and dtype. A key is
an ordinary uint32 tensor with the single dim key_word=2: it can be passed, stacked and scanned over. `dims` are those
of the result, with sizes, by default none; `dtype` is that of its elements.
"""

from .distributions import (
    bernoulli,
    categorical,
    choice,
    exponential,
    gumbel,
    laplace,
    normal,
    permutation,
    rademacher,
    randint,
    truncated_normal,
    uniform,
)  # fmt: skip
from .keys import bits, fold_in, key, split
from .whole import beta, dirichlet, gamma, poisson, t

__all__ = [
    "bernoulli", "beta", "bits", "categorical", "choice", "dirichlet", "exponential", "fold_in", "gamma", "gumbel",
    "key", "laplace", "normal", "permutation", "poisson", "rademacher", "randint", "split", "t", "truncated_normal",
    "uniform",
]  # fmt: skip
