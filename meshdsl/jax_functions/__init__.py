"""Functions of JAX arrays, and what they do on the blocks of devices: `md.map`, `md.local`, `md.verify_jax`.

`table` says what each primitive does with the axes of its operands: it passes, sums or mixes them. `walk` reads
it for functions on blocks, those of `md.map` too; what `walk` cannot prove, `trial` tries on random data.
`function` has a function with its dims and both checks; `blocks` is its operation, `counting` its FLOPs.
`foreign` asks the same of whole programs of `jax.shard_map`, which send values themselves: it reads the same table.
"""

from ..backend.jaxprs import CALLS, inner, opened
from ..control.formulas import with_operations
from ..trace import location
from .counting import flops
from .map import has_own_gradient, mixing
from .table import ELEMENTWISE, MIX, SUM, TABLE, Equation
from .trial import differs, outline
from .walk import Problem, check, line_of

__all__ = [
    "CALLS", "ELEMENTWISE", "MIX", "SUM", "TABLE", "Equation", "Problem", "check", "differs", "flops",
    "has_own_gradient", "inner", "line_of", "location", "mixing", "opened", "outline", "with_operations",
]  # fmt: skip
