"""Loads workloads by name (`llama`, `llama3-70b`, `file.py:name`, `config.json`), and a layout.

Unknown names raise `UsageError` with the closest known name and the list of names. If the workload's file fails to run,
the error shows the failing line of that file.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import pkgutil
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import meshdsl as md
import meshdsl.models as models

from ..errors import UsageError, Where, nearest, nearest_path, raised, text_of
from ..errors.values import LONGEST, load_json

FILLS = re.compile(r":\*(?=[\s,;]|$)")  # the size of a mesh axis that fills the devices


def load(text: str) -> md.Workload:
    """A workload by name; raises `UsageError`, with the names there are, if it is missing.

    `transformer:lm` is a workload of the module `meshdsl.models.transformer`, `llama` that of the same name as its
    module, `llama3-70b` the workload `llama3_70b` of any module, and `file.py:name` a workload of a file, which is run.
    `folder/config.json` is a Hugging Face model of a type that a module of `meshdsl.models` reads.
    """
    if text.endswith(".json"):
        return _configured_by(Path(text))
    file, colon, name = text.rpartition(":")
    source = file if colon else text
    if not source.endswith(".py"):
        return _bundled(text)
    path = Path(source)
    if colon and not name.isidentifier():
        raise UsageError(f"write a workload as file.py:name, for example {path}:lm; got {text!r}")
    _check_file(path)
    module = _run(path)
    found = _workloads(module)
    if not colon and len(found) == 1:
        return next(iter(found.values()))
    if not colon:
        raise UsageError(
            f"name a workload of {path}, for example {path}:{next(iter(found), 'name')}; "
            f"there are: {', '.join(found) or 'none'}"
        )
    if name not in vars(module):
        raise UsageError(f"{path} has no {name!r}; {nearest(name, found)}")
    if name not in found:
        kind = type(vars(module)[name]).__name__
        raise UsageError(
            f"{name!r} in {path} has type {kind}, not md.Workload or an imported loss; "
            f"there are: {', '.join(found) or 'none'}"
        )
    return found[name]


def module_of(text: str) -> types.ModuleType:
    """A module by its name, or a file `name.py`, which is run; raises `UsageError` if there is none."""
    if text.endswith(".py"):
        _check_file(Path(text))
        return _run(Path(text))
    try:
        return importlib.import_module(text)
    except ImportError as error:
        raise UsageError(f"there is no module {text!r}: {error}; a file is written {text}.py:NAME") from None


def _bundled(text: str) -> md.Workload:
    """A workload of `meshdsl.models`. A name without its module, such as `llama3-70b`, is looked for in all of them."""
    file, colon, name = text.replace("-", "_").partition(":")
    if file in [module.name for module in pkgutil.iter_modules(models.__path__)]:
        found = _workloads(importlib.import_module(f"{models.__name__}.{file}"))
        if (name or file) in found:
            return found[name or file]
    found = _all_bundled()
    named = {id(workload): workload for key, workload in found.items() if not colon and key.endswith(f":{file}")}
    if len(named) == 1:
        return next(iter(named.values()))
    names = [key.partition(":")[2] for key in found]
    known = [_spelled(key, names) for key in found]
    close = _same_but_for_a_size(text, known)
    guess = f"did you mean {close!r}? there are: {', '.join(known)}" if close else nearest(text, known)
    raise UsageError(f"no model {text!r}, and no file, which is written file.py:name; {guess}")


def _spelled(key: str, names: list[str]) -> str:
    """The name with which a model is written: `llama`, `llama3-8b`, or `transformer:lm`, which says little alone."""
    module, _, name = key.partition(":")
    alone = names.count(name) == 1 and any(c.isdigit() for c in name)
    return module if name == module else name.replace("_", "-") if alone else key


def _same_but_for_a_size(text: str, known: Iterable[str]) -> str | None:
    """The name that differs only in its last number, by the smallest factor: llama3-8b for llama3-7b."""
    head, number, tail = (re.match(r"(.*?)(\d+)(\D*)$", text) or re.match(r"()()(.*)", text)).groups()  # pyright: ignore[reportOptionalMemberAccess]
    sizes = [
        (int(m[1]), name) for name in known if (m := re.fullmatch(rf"{re.escape(head)}(\d+){re.escape(tail)}", name))
    ]
    near = [(abs(math.log(max(n, 1) / max(int(number), 1))), name) for n, name in sizes] if number else []
    return min(near, default=(0, None))[1]


def _configured_by(path: Path) -> md.Workload:
    """The model of a Hugging Face config.json by its `model_type`, computed in the file's dtype with float32 weights.

    Raises `UsageError` for a type that no module of `meshdsl.models` reads, and for keys that the model does not know.
    """
    _check_file(path)
    values = load_json(path)
    readers: dict[object, md.Workload] = {}
    for workload in _all_bundled().values():
        if workload.hugging_face is not None:
            readers.setdefault(workload.hugging_face.fixed.get("model_type"), workload)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in readers:
        raise UsageError(
            f"{path} has no known model_type: {str(kind)[:60]!r}; there are: {', '.join(sorted(map(str, readers)))}"
        )
    values.pop("quantization_config", None)  # of the file's weights, which are not read
    workload, hub = readers[kind], md.HubConfig(values)
    assert workload.hugging_face is not None
    fields = workload.hugging_face.read_config(hub, workload.config)
    problems = [*hub.problems]
    if hub.dtype not in ("float32", "float16", "bfloat16"):
        problems.append(f"dtype is {hub.dtype[:60]!r}, which this model does not know")
    if problems:
        raise UsageError("\n  ".join([f"{path} does not fit {workload.name}", *problems]))
    return workload.replace(**fields, compute_dtype=hub.dtype)


def _all_bundled() -> dict[str, md.Workload]:
    """Every workload of `meshdsl.models`, by module:name."""
    modules = [importlib.import_module(f"{models.__name__}.{m.name}") for m in pkgutil.iter_modules(models.__path__)]
    return {f"{m.__name__.rpartition('.')[2]}:{key}": w for m in modules for key, w in _workloads(m).items()}


def _workloads(module: types.ModuleType) -> dict[str, md.Workload]:
    """The workloads of a module, and the losses in it that `md.from_jax` imported."""
    public = {key: value for key, value in vars(module).items() if key[0] != "_"}
    imported = {key: value for key, value in public.items() if isinstance(value, md.Imported)}
    return {key: value for key, value in public.items() if isinstance(value, md.Workload)} | {
        key: value.workload(key) for key, value in imported.items() if value.is_loss
    }


def _check_file(path: Path) -> None:
    try:
        if path.is_file():
            if path.stat().st_size > LONGEST:
                raise UsageError(f"{path} has more than {LONGEST} bytes, the limit of a workload's file")
            return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{str(path)[:60]!r} cannot be read: {reason}") from None
    raise UsageError(f"no file {str(path)!r}; {nearest_path(path, f'*{path.suffix}')}")


def _run(path: Path) -> types.ModuleType:
    folders = [str(path.parent.resolve())]
    with contextlib.suppress(OSError):  # the working directory was removed
        folders.append(str(Path.cwd()))
    for folder in folders:  # appended, so that installed modules take precedence
        if folder not in sys.path:
            sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"workload_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up to resolve text annotations
    try:
        spec.loader.exec_module(module)
    except (md.MeshdslError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit: a file that exits, even with 0, defines no workload
        where, text = raised(error), text_of(error)
        if isinstance(error, SyntaxError):
            where, text = Where(error.filename or str(path), error.lineno or 0), error.msg
        line = f"\n  at {where}  {where.source()}".rstrip() if where is not None else ""
        raise md.MeshdslError(f"{path} cannot be imported: {type(error).__name__}: {text}{line}") from error
    return module


def mesh_and_layout(workload: md.Workload, layout: str | None, mesh: str | None) -> tuple[md.Mesh, md.Layout]:
    """The mesh and the layout for a run. `layout` is a name in `workload.layouts`, or the text of a layout.

    `mesh` overrides the mesh of a named layout. Without both, the run uses one device.
    """
    if layout is None:
        return md.Mesh(mesh if mesh is not None else "all:1"), md.Layout("")
    if ":" in layout or not layout.strip():
        if mesh is None and layout.strip():
            raise UsageError(
                f"the layout {layout!r} needs a mesh, for example --mesh 'rows:2;cols:4'\n"
                f"  named layouts of {workload.name}, which include a mesh: {', '.join(workload.layouts) or 'none'}"
            )
        return md.Mesh(mesh if mesh is not None else "all:1"), md.Layout(layout)
    if layout not in workload.layouts:
        rules = "" if layout.isidentifier() else "\n  the rules of another one are written dim:axis, as in batch:rows"
        raise UsageError(f"{workload.name} has no layout {layout!r}; {nearest(layout, workload.layouts)}{rules}")
    own_mesh, rules = workload.layouts[layout]
    return md.Mesh(own_mesh if mesh is None else mesh), md.Layout(rules)


def filled(mesh: str, devices: int | None) -> str:
    """The axes of a mesh, of which `name:*` has the size with which all devices are used; 1 if they are not known.

    >>> filled("rows:*;cols:2", 8), filled("rows:4", 8)
    ('rows:4;cols:2', 'rows:4')

    Raises `MeshdslError` for several such axes, or if the other axes do not divide the devices.
    """
    alone = FILLS.sub(":1", mesh, count=1)
    others = 1 if alone == mesh else md.Mesh(alone).size
    if devices is not None and devices % others:
        raise UsageError(f"{devices} devices cannot be divided by {others}, the size of the other axes of {mesh!r}")
    return FILLS.sub(f":{devices // others if devices else 1}", mesh)
