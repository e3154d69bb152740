"""Modes of a machine: other figures for the same hardware, as another software reaches them.

A machine file has one table for each, such as `[mode.compiled]`, with the top-level keys that it replaces. A machine
is named with its modes after a colon: `a100-p4de:compiled`, `h100:compiled,flash`. Later modes replace earlier ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import nearest
from .machine_file import MODE, MachineError

__all__ = ["in_modes", "split_modes"]


def split_modes(name: str) -> tuple[str, tuple[str, ...]]:
    """The machine's name or file, and its modes.

    >>> split_modes("h100:compiled,flash"), split_modes("h100"), split_modes("/a:b/mine.toml")
    (('h100', ('compiled', 'flash')), ('h100', ()), ('/a:b/mine.toml', ()))
    """
    base, colon, words = name.rpartition(":")
    if not colon or os.sep in words or words.endswith(".toml"):
        return name, ()
    return base, tuple(words.split(","))


def in_modes(document: Mapping[str, Any], modes: Sequence[str], file: str) -> dict[str, Any]:
    """A machine file with the figures of these modes; raises `MachineError` for an unknown one."""
    tables = document.get("mode", {})
    known = tables if isinstance(tables, dict) else {}
    replaced = dict(document)
    for mode in modes:
        if mode not in known:
            suggestion = nearest(mode, list(known)) if known else "there are none"
            raise MachineError(
                f"the machine file {file} has no mode {mode!r}; {suggestion}\n"
                f"  add a table [mode.{mode}] with the figures that it replaces, of: {', '.join(MODE)}"
            )
        values = known[mode]
        replaced |= {key: values[key] for key in MODE if key in values} if isinstance(values, dict) else {}
    return replaced
