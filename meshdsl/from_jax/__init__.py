"""`md.from_jax`: a JAX function that knows nothing of meshdsl, as a function of tensors with named dims.

The function is traced to a jaxpr, and the jaxpr goes through these modules:

    marker      `md.named`, which names the axes of an array inside plain JAX code
    steps       the jaxpr as blocks of steps, with calls opened
    axes        which axes are one dim: classes of axes that are united, split into atoms, and linked in families
    unions      what each primitive unites
    naming      the names of the user, and names for what nobody named
    operations  each primitive as operations of meshdsl
    replay      a block of steps, run on tensors
    imported    `md.from_jax` and what it returns
"""

from . import operations
from .imported import Imported, from_jax
from .marker import named

__all__ = ["Imported", "from_jax", "named", "operations"]
