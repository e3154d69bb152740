"""Checks of JAX functions from their jaxprs: which are elementwise, and which may run on blocks of their operands.

`table` says what each primitive does with the axes of its operands: it passes, sums or mixes them. `elementwise` reads
it for functions at all sizes, `walk` for functions on blocks; what `walk` cannot prove, `trial` tries on random data.
`counting` counts FLOPs, and `call` makes a jaxpr one equation of a program.
"""

from .counting import flops
from .elementwise import has_own_gradient, mixing
from .table import CALLS, ELEMENTWISE, inner, opened
from .trial import differs, outline
from .walk import Problem, check

__all__ = [
    "CALLS", "ELEMENTWISE", "Problem", "check", "differs", "flops", "has_own_gradient", "inner", "mixing", "opened",
    "outline",
]  # fmt: skip
