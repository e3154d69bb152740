"""`md.compile`: from a function to the program of every device, and to what JAX runs.

`plan` and `knobs` are the choices of a step, `arguments` and `signature` a call and its stages, `pipeline` the passes,
`compiled` the result; `inside_jax` and `jaxify` are a compiled function as a function of JAX.
"""

from .api import compile, host_devices
from .compiled import Compiled

__all__ = ["Compiled", "compile", "host_devices"]
