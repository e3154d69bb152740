"""Which places a JAX function reads: a static check that it may run on blocks of its operands.

`dependence` reads the function's jaxpr. `factors` describes the axes of a value, `rules` says how each primitive acts on
them, and `kernels` reads Pallas kernels.
"""

from .dependence import Problem, check, flops

__all__ = ["Problem", "check", "flops"]
