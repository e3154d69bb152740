"""Checks of installed libraries: JAX, before an import of it fails obscurely, and the optional ones."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from typing import Any

from . import MeshdslError

OLDEST_JAX = (0, 10, 2)  # that of pyproject.toml
NEWEST_JAX = (0, 12)  # the newest minor version that passes the tests
TESTED_JAX = " to ".join(".".join(map(str, each)) for each in (OLDEST_JAX, NEWEST_JAX))


@functools.cache
def check_jax() -> None:
    """Raises `MeshdslError` if JAX is missing or too old, warns if it is newer than the tests. Does not import it."""
    import importlib.metadata  # imported here because it is slow, and the command line imports this file

    try:
        installed = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    version = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    oldest, _, newest = TESTED_JAX.split()
    if version < OLDEST_JAX:
        raise MeshdslError(
            f"meshdsl needs JAX {oldest} or newer; installed: {installed}\n  pip install 'jax>={oldest}'"
        )
    if version[:2] > NEWEST_JAX:
        warnings.warn(
            f"meshdsl is tested with JAX {TESTED_JAX}; installed: {installed}\n"
            f"  if something fails, compare with pip install 'jax=={newest}.*'",
            stacklevel=3,  # the user's line, which looked a public name up
        )


def optional(module: str, extra: str, otherwise: str, error: type[MeshdslError] = MeshdslError) -> Any:
    """An optional library; raises `error` if it is missing, with the way to install it, and what works without it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise error(f"{module} cannot be imported: {problem}\n  {installs(extra)}, or {otherwise}") from None


def installs(extra: str) -> str:
    """The command that installs what an extra needs; it names the libraries, because no index has meshdsl.

    >>> installs("safetensors")
    "pip install 'safetensors>=0.8'"
    """
    import importlib.metadata

    try:
        lines = importlib.metadata.requires("meshdsl") or []
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in a clone of meshdsl"
    needed = [line.partition(";")[0].strip() for line in lines if re.search(f"extra == .{extra}.$", line)]
    return f"pip install {' '.join(map(repr, needed))}"
