"""A workload is named by file and attribute, its config by `key=value`, its layout by name or by text.

Whatever is asked for and is not there is a `UsageError` with the nearest name and the names that are there. A user's
file that fails to run says so with its own line.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import sys
import traceback
import types
import typing
from collections.abc import Iterable
from pathlib import Path

import meshdsl as md

from .values import UsageError, read

__all__ = ["UsageError", "configure", "load", "nearest", "place"]


def load(text: str) -> md.Workload:
    """The workload called `models/transformer.py:lm`. Runs the file; raises `UsageError` when it is not there."""
    file, colon, name = text.rpartition(":")
    path = Path(file if colon else text)
    if path.suffix != ".py" or (colon and not name.isidentifier()):
        raise UsageError(f"a workload is written file.py:name, for example models/transformer.py:lm; got {text!r}")
    if not path.is_file():
        there = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise UsageError(f"there is no file {str(path)!r}{nearest(str(path), there)}")
    module = _run(path)
    found = {key: value for key, value in vars(module).items() if isinstance(value, md.Workload)}
    if not colon:
        raise UsageError(f"name a workload of {path}, for example {path}:{next(iter(found), 'name')}{_there(found)}")
    if name not in vars(module):
        raise UsageError(f"{path} has no {name!r}{nearest(name, found)}")
    if name not in found:
        kind = type(vars(module)[name]).__name__
        raise UsageError(f"{name!r} in {path} is of type {kind}, not a md.Workload{_there(found)}")
    return found[name]


def _run(path: Path) -> types.ModuleType:
    for folder in (str(path.parent.resolve()), str(Path.cwd())):  # last, so that they hide no installed module
        if folder not in sys.path:
            sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"workload_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses with annotations as text look their module up
    try:
        spec.loader.exec_module(module)
    except md.MeshdslError:
        raise
    except Exception as error:
        line, source = _users_line(error, path)
        problem = error.msg if isinstance(error, SyntaxError) else str(error)
        raise md.MeshdslError(
            f"{path} cannot be imported: {type(error).__name__}: {problem}\n  at {path}:{line}  {source}".rstrip()
        ) from error
    return module


def _users_line(error: Exception, path: Path) -> tuple[int, str]:
    """The last line of the file itself that ran."""
    if isinstance(error, SyntaxError) and error.filename == str(path.resolve()):
        return error.lineno or 0, (error.text or "").strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())]
    return (frames[-1].lineno or 0, frames[-1].line or "") if frames else (0, "")


def configure(workload: md.Workload, settings: Iterable[str] = ()) -> md.Workload:
    """The workload with `key=value` settings in its config, each read as the type of its field.

    Raises `UsageError` for a key that is no field, and for a value that its field cannot hold.
    """
    settings = list(settings)
    hints = typing.get_type_hints(type(workload.config))
    fields = [field.name for field in dataclasses.fields(workload.config)]
    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"a setting is written key=value, for example d_model=512; got {setting!r}")
        if key not in fields:
            raise UsageError(f"the config of {workload.name} has no {key!r}{nearest(key, fields)}")
        changes[key] = read(key, value, hints[key])
    try:
        return workload.replace(**changes)
    except (TypeError, ValueError) as error:
        if isinstance(error, md.MeshdslError):
            raise
        raise UsageError(f"the config of {workload.name} does not take {' '.join(settings)}: {error}") from error


def place(workload: md.Workload, layout: str | None, mesh: str | None) -> tuple[md.Mesh, md.Layout]:
    """The mesh, and the layout: one from the workload's table by name, or text.

    A mesh that is given replaces the table's. With neither, everything is whole on one device.
    """
    if layout is None:
        return md.Mesh(mesh if mesh is not None else "all:1"), md.Layout("")
    if ":" in layout or not layout.strip():
        if mesh is None and layout.strip():
            raise UsageError(
                f"the layout {layout!r} needs a mesh, for example --mesh 'rows:2;cols:4'\n"
                f"  layouts of {workload.name} that bring their own: {', '.join(workload.layouts) or 'none'}"
            )
        return md.Mesh(mesh if mesh is not None else "all:1"), md.Layout(layout)
    if layout not in workload.layouts:
        raise UsageError(f"{workload.name} has no layout {layout!r}{nearest(layout, workload.layouts)}")
    own_mesh, rules = workload.layouts[layout]
    return md.Mesh(own_mesh if mesh is None else mesh), md.Layout(rules)


def _there(names: Iterable[str]) -> str:
    names = list(names)
    return f"\n  there are: {', '.join(names)}" if names else "\n  it has none"


def nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?{_there(known)}" if close else _there(known)
