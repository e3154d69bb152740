"""Two array libraries with the same interface, and the device information that a kernel receives.

Kernels are written once against `local.xp`. `emit` and eager evaluation pass `Jax`; `simulate` passes `NumPy`, so
the simulator shares the kernels' mathematics but not JAX's tracing, sharding or collectives.
"""

from .block import Block, Local, whole
from .formulas import letters
from .jax import Jax
from .numpy import NumPy
from .varying import varying

__all__ = ["Block", "Jax", "Local", "NumPy", "letters", "varying", "whole"]
