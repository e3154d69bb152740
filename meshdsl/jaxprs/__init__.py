"""Static checks of JAX functions from their jaxprs: which are elementwise, and which may run on blocks of operands.

`primitives` says how each primitive acts on the axes of elementwise functions. For blocks, `dependence` reads the
function's jaxpr: `factors` describes the axes of a value, `rules` how each primitive acts on them, `control` loops and
branches, `sums` which values are partial sums, and `kernels` Pallas kernels; `resemblance` compares blocks of one
element. `counting` counts FLOPs, and `call` makes a jaxpr one equation of a program.
"""

from .counting import flops
from .dependence import Problem, check
from .primitives import CALLS, elementwise, has_own_gradient, inner
from .resemblance import Sized, resembles

__all__ = ["CALLS", "Problem", "Sized", "check", "elementwise", "flops", "has_own_gradient", "inner", "resembles"]
