"""Checks the arguments of `Checkpoints` that are not trees; each raises `ShapeError` or `LayoutError`."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from ...errors import LayoutError, ShapeError
from ...layouts import Layout, Mesh
from ...lowering import Program
from .manifest import STEP_LIMIT


def check_options(directory: Any, keep: Any, chunk_bytes: Any, report: Any, seconds: Any) -> None:
    """Raises `ShapeError` unless these are valid options of `Checkpoints`."""
    if keep is not None and not _is_count(keep):
        raise ShapeError(f"keep must be an integer from 1, or None to keep all steps; got {keep!r}")
    if not _is_count(chunk_bytes):
        raise ShapeError(f"chunk_bytes must be an integer from 1, got {chunk_bytes!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ShapeError(f"seconds must be a number above 0, got {seconds!r}")
    if report is not None and not callable(report):
        raise ShapeError(f"report must be a function of one text, got {report!r}")
    if not isinstance(directory, str | Path) or "\0" in str(directory):
        raise ShapeError(f"directory must be a path, got {directory!r}")


def is_url(directory: Any) -> bool:
    """True for an address such as `gs://bucket/run`."""
    return isinstance(directory, str | Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(directory)) is not None


def check_no_url(directory: str | Path) -> None:
    """Raises `ShapeError` for the URL of an object store, which a file system would take for a folder `gs:`."""
    if is_url(directory):
        raise ShapeError(
            f"directory is the URL {str(directory)!r}; this reads and writes files of a directory\n"
            "  mount the bucket as a directory (gcsfuse, mountpoint-s3), or write to a disk and copy what is complete"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_step(step: Any) -> None:
    """Raises `ShapeError` unless the value is a valid step number."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_LIMIT:
        raise ShapeError(f"a step must be an integer from 0 to {STEP_LIMIT}, got {step!r}")


def parse_target(mesh: Any, layout: Any, program: Any) -> tuple[Mesh | None, Layout | None, Program | None]:
    """Mesh, layout and program of a restore; text is converted to `Mesh` and `Layout` as in `md.compile`."""
    if program is None:
        mesh = None if mesh is None else Mesh(mesh)
        layout = layout if layout is None or isinstance(layout, Layout) else Layout(layout)
        return mesh, layout, None
    if not isinstance(program, Program):
        raise ShapeError(f"program= must be the result of compiled.program(*args), got {type(program).__name__}")
    if mesh is not None or layout is not None:
        raise LayoutError("a program already has a mesh and a layout\n  pass program=, or mesh= and layout=, not both")
    return None, None, program


def warn(message: str) -> None:
    """Warn with this text, at the line that called `Checkpoints`."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)
