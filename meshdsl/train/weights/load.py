"""Reads a Hugging Face directory into sharded parameters: each process reads only the blocks of its devices."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from ...errors import CheckpointError, ShapeError, nearest, nearest_path, short
from ...ir import Type
from ...layouts import Layout, Mesh, MeshLike
from ...lowering import Program
from ...trace import Tensor
from ..checkpoint.arguments import check_no_url, parse_target
from ..checkpoint.device_put import Destination, assembled, targets
from ..checkpoint.grid import Box
from .config import HubConfig
from .files import Stored, open_directory, read_json
from .table import STACKED, HuggingFace, Rule, rule_of

_MOST = 40  # lines of an error
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def import_hugging_face(
    directory: str | Path,
    workload: Any,
    mesh: MeshLike | None = None,
    layout: Layout | str | None = None,
    *,
    program: Program | None = None,
    dtype: str | None = None,
    compute_dtype: str | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """The workload with the config of a Hugging Face directory, and its parameters under a layout.

    >>> import tempfile
    >>> import meshdsl as md
    >>> from meshdsl.models.llama import llama
    >>> params, _ = llama.init(md.random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     md.export_hugging_face(params, llama.replace(d_ff=128), folder)
    ...     workload, again = md.import_hugging_face(folder, llama, "rows:1", "vocab:rows")
    >>> workload.config.d_ff, again["embed"].dims
    (128, (vocab=256, model=64))

    `directory` has config.json and safetensors files, whose dtype is `dtype` in config.json, else float32. From files
    in 16 bits, parameters are float32 (master weights, which small updates change) and products are computed in
    bfloat16; from others, both are in the dtype of the files. `dtype` is another dtype of both, "stored" that of the
    files, for inference; `compute_dtype` is another dtype of the products. The parameters are sharded on `mesh` as
    `layout` says, or as the inputs `params` of `program`; without both, they are on one device. Each process reads only
    the blocks of its devices, so no host holds the model. Raises `CheckpointError` with all problems: tensors that are
    missing, unknown or of another shape, and values of config.json that the model does not support.
    """
    check_no_url(directory)
    table, folder = hugging_face_of(workload), Path(directory)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {str(folder)!r}; {nearest_path(folder, '*/')}")
    values = read_json(folder / "config.json")
    _check_kind(folder, workload, table, values)
    stored = _renamed(open_directory(folder), table.base)
    hub = HubConfig(values, tensors=stored)
    configured = _configured(workload, table, hub, _dtypes(hub.dtype, dtype, compute_dtype))
    if not hub.complete:
        _refuse(folder, workload, [*hub.problems, "the tensors were not checked, since their sizes are unknown"])
    rules = rules_of(configured, table)
    problems = [*hub.problems, *_mismatches(rules, stored, table, configured.config)]
    if problems:
        _refuse(folder, workload, problems)
    return configured, read_params(rules, stored, configured.config.param_dtype, *parse_target(mesh, layout, program))


def hugging_face_of(workload: Any) -> HuggingFace:
    """The table of a workload."""
    table = getattr(workload, "hugging_face", None)
    if table is None:
        raise ShapeError(
            f"{getattr(workload, 'name', workload)!r} has no table of Hugging Face tensors\n"
            "  give one: md.Workload(hugging_face=md.HuggingFace(...))"
        )
    return table


def _refuse(folder: Path, workload: Any, problems: Sequence[str]) -> NoReturn:
    more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
    listed = "\n".join(f"  {line}" for line in [*problems[:_MOST], *more])
    raise CheckpointError(f"{folder} does not fit {workload.name}\n{listed}")


def _check_kind(folder: Path, workload: Any, table: HuggingFace, values: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if config.json names another type of model; no other check would pass either."""
    kind, known = values.get("model_type"), table.fixed.get("model_type")
    if known is not None and kind is not None and kind != known:
        raise CheckpointError(
            f"{folder} is a model of type {short(kind)}, and {workload.name} reads {known!r}\n"
            f"  --model {folder}/config.json, or meshdsl.train.load of that file, is the model that reads it"
        )


def _dtypes(stored: str, dtype: str | None, compute_dtype: str | None) -> tuple[str, str]:
    """The dtypes of parameters and of products, for files of a dtype and the two that were asked for."""
    narrow = dtype is None and stored in ("float16", "bfloat16")
    param = "float32" if narrow else stored if dtype in (None, "stored") else dtype
    found = param, compute_dtype or ("bfloat16" if narrow else param)
    for each in found:
        if each not in _FLOATS:
            raise ShapeError(f"weights of dtype {each!r} are not supported; known: {', '.join(_FLOATS)}")
    return found


def _configured(workload: Any, table: HuggingFace, hub: HubConfig, dtypes: tuple[str, str]) -> Any:
    """The workload with the values of config.json."""
    param, compute = dtypes
    settings = {"param_dtype": param, "compute_dtype": compute, **table.read_config(hub, workload.config)}
    if param == "float64":
        settings["reduce_dtype"] = param
    return workload.replace(**settings)


def rules_of(workload: Any, table: HuggingFace) -> dict[str, Rule]:
    """The rule of each parameter; raises `ShapeError` for one without a line, unless the table has `merged`."""
    specs: Mapping[str, Type] = workload.model(workload.config).specs(workload.inputs(workload.config))
    lines = table.lines(workload.config)
    missing = [path for path in specs if path not in lines]
    if missing and table.merged is None:
        raise ShapeError(f"the table of {workload.name} has no line for {missing[0]!r}; {nearest(missing[0], lines)}")
    return {path: rule_of(path, lines[path], spec.dims) for path, spec in specs.items() if path in lines}


def _renamed(stored: Mapping[str, Stored], base: str) -> dict[str, Stored]:
    """The tensors by the names of the table; those of a bare model get the prefix that they lack."""
    if not base or any(name.startswith(f"{base}.") for name in stored):
        return dict(stored)
    return {f"{base}.{name}": entry for name, entry in stored.items()}


def _mismatches(rules: Mapping[str, Rule], stored: Mapping[str, Stored], table: HuggingFace, config: Any) -> list[str]:
    """A line for each tensor that is missing, unknown, or of another shape or kind than the table says."""
    problems: list[str] = []
    known: set[str] = set()
    for path, rule in rules.items():
        for name in rule.names():
            known.add(name)
            if name not in stored:
                problems.append(f"{name} is missing, for {path}")
            elif stored[name].shape != rule.stored_shape:
                problems.append(f"{name} has shape {stored[name].shape}, and {path} needs {rule.stored_shape}")
            elif stored[name].dtype.name not in _FLOATS:
                problems.append(f"{name} has dtype {stored[name].dtype}, and {path} needs one of {', '.join(_FLOATS)}")
    unused = [STACKED.sub("*", name) for path, (name, _) in table.lines(config).items() if path not in rules]
    ignored = (*table.ignored, *unused)
    unknown = [n for n in stored if n not in known and not any(fnmatch.fnmatchcase(n, p) for p in ignored)]
    return problems + [f"{name} of shape {stored[name].shape} is in the file and not in the table" for name in unknown]


def read_params(
    rules: Mapping[str, Rule],
    stored: Mapping[str, Stored],
    dtype: Any,
    mesh: Mesh | None,
    layout: Layout | None,
    program: Program | None,
) -> dict[str, Tensor]:
    """The parameters on devices, by path."""
    prefix = "params/" if program is not None else ""
    like = {f"{prefix}{path}": Type(rule.dims, jnp.dtype(dtype)) for path, rule in rules.items()}
    shardings = targets(like, mesh, layout, program)
    return {path: _read(rule, stored, shardings[f"{prefix}{path}"]) for path, rule in rules.items()}


def _read(rule: Rule, stored: Mapping[str, Stored], target: Destination) -> Tensor:
    """One parameter: for each block of this process's devices, the parts of the file's tensors that it covers."""

    def fill(box: Box, block: np.ndarray) -> None:
        for name, inside, place in rule.parts(box):
            block[inside] = rule.arranged(stored[name].view())[place]

    return assembled(target, fill)
