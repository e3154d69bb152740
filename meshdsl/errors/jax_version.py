"""Says first, and once, that JAX is missing, too old or untested, before an import of it fails obscurely."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import warnings

from . import MeshdslError

OLDEST_JAX = (0, 10, 2)  # that of pyproject.toml
NEWEST_JAX = (0, 12)  # the newest minor version that passes the tests


@functools.cache
def check_jax() -> None:
    """Raises `MeshdslError` if JAX is missing or too old, warns if it is newer than the tests. Does not import it."""
    try:
        installed = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    version = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_JAX, NEWEST_JAX))
    if version < OLDEST_JAX:
        raise MeshdslError(
            f"meshdsl needs JAX {oldest} or newer; installed: {installed}\n  pip install 'jax>={oldest}'"
        )
    if version[:2] > NEWEST_JAX:
        warnings.warn(
            f"meshdsl is tested with JAX {oldest} to {newest}; installed: {installed}\n"
            f"  if something fails, compare with pip install 'jax=={newest}.*'",
            stacklevel=3,  # the user's line, which looked a public name up
        )
