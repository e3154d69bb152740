"""`meshdsl/__init__.pyi`, the types of the public names, generated from the table of names in `meshdsl/__init__.py`.

The package imports a module when one of its names is first used, which type checkers cannot follow. `python -m
tests.stub` writes the file; a test generates it again and compares.
"""

from __future__ import annotations

import re
from pathlib import Path

import meshdsl as md

STUB = Path(md.__file__).with_suffix(".pyi")
HEAD = '''"""The public names, for type checkers; generated from `meshdsl/__init__.py` by `python -m tests.stub`."""
'''
VARIABLES = (
    "__version__: str", "__all__: list[str]", "_HOMES: dict[str, tuple[str, ...]]", "_MODULES: dict[str, str]",
    "_UNLISTED: dict[str, str]", "_ALSO: dict[str, str]", "_PUBLIC: dict[str, str]",
)  # fmt: skip


def _natural(place: tuple[str, ...]) -> list[list[str | int]]:
    """The order of the linter: log2 before log10."""
    return [[int(x) if x.isdigit() else x for x in re.split(r"(\d+)", word)] for word in place]


def text() -> str:
    """The content of the stub."""
    places = [(home, name, name) for home, names in md._HOMES.items() for name in names]
    for name, home in {**md._MODULES, **md._UNLISTED}.items():
        package, _, module = home.rpartition(".")
        places.append((package, module, name))
    lines = [f"from .{home} import {name} as {public}" for home, name, public in sorted(places, key=_natural)]
    also = [f"{other} = {name}" for other, name in md._ALSO.items()]
    return "\n".join([HEAD, *lines, "", *also, "", *VARIABLES, ""])


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
