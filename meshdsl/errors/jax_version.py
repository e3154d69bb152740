"""Says first, and once, that JAX is missing or too old, before an import of it fails obscurely."""

from __future__ import annotations

import functools
import importlib.metadata
import re

from . import MeshdslError

__all__ = ["OLDEST_JAX", "check_jax"]

OLDEST_JAX = (0, 10, 2)  # that of pyproject.toml


@functools.cache
def check_jax() -> None:
    """Raises `MeshdslError` if JAX is missing or older than supported. Does not import it."""
    try:
        installed = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed == "none" or tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST_JAX:
        needed = ".".join(map(str, OLDEST_JAX))
        raise MeshdslError(
            f"meshdsl needs JAX {needed} or newer; installed: {installed}\n  pip install 'jax>={needed}'"
        )
