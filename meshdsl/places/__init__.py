"""The places that a JAX function reads: a static check that it may run on blocks of its operands.

`dependence` reads the function's jaxpr. `factors` describes the axes of a value, `rules` says how each primitive acts
on them, `sums` which values are partial sums,`kernels` reads Pallas kernels, and `resemblance`
compares blocks of one element.
"""

from .counting import flops
from .dependence import Problem, check
from .resemblance import resembles

__all__ = ["Problem", "check", "flops", "resembles"]
