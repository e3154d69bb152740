"""Writes parameters as a Hugging Face directory: each process writes the blocks of its devices into shared files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...errors import SaveError, ShapeError
from ...trace import Tensor, spec
from ..checkpoint import processes
from ..checkpoint.arguments import check_no_url
from ..checkpoint.grid import unpadded
from .config import HubConfig
from .files import DTYPES, INDEX, SINGLE, header_of, read_json, write_header
from .load import hugging_face_of, rules_of
from .table import HuggingFace, Rule

KEPT = (".json", ".txt", ".model", ".jinja", ".md")  # of files that hold no weights
LARGEST_KEPT = 1 << 28  # bytes
Types = dict[str, tuple[np.dtype, tuple[int, ...]]]


def export_hugging_face(
    params: Mapping[str, Tensor],
    workload: Any,
    directory: str | Path,
    *,
    largest_file: int = 5_000_000_000,
    dtype: str | None = None,
    base: str | Path | None = None,
) -> None:
    """Write parameters and config as a Hugging Face directory, which must be new or empty.

    >>> import os, tempfile
    >>> import meshdsl as md
    >>> from meshdsl.models.gpt2 import gpt2
    >>> params, _ = gpt2.init(md.random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     md.export_hugging_face(params, gpt2, folder)
    ...     sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']

    Files have at most `largest_file` bytes, unless one tensor is larger; several have an index. Tensors have the dtype
    of the parameters, or `dtype`: with "bfloat16", float32 parameters that were imported from it give the same bytes
    again. `base` is the directory from which the parameters were imported: its config.json is kept but for what the
    workload changed, and its other files that hold no weights, such as those of the tokenizer, are copied. Requires
    that the processes of
    a program share a file system. Raises `ShapeError` if the parameters are not those of the workload, and `SaveError`
    if the directory has files or cannot be written.
    """
    check_no_url(directory)
    table, folder = hugging_face_of(workload), Path(directory)
    rules = rules_of(workload, table)
    if table.merged is not None and params.keys() > rules.keys():
        params = table.merged(params)
    _check(params, rules, workload.name)
    chosen = None if dtype is None else spec([], dtype).dtype
    if chosen is not None and chosen not in DTYPES.values():
        raise ShapeError(
            f"safetensors files have no dtype {chosen.name}; known: {', '.join(sorted(map(str, DTYPES.values())))}"
        )
    config = _config(table, workload.config, dtype or workload.config.param_dtype, base)
    types = {name: (chosen or params[p].dtype, r.stored_shape) for p, r in rules.items() for name in r.names()}
    types = dict(sorted(types.items()))
    files = _files(types, largest_file)
    processes.on_first(f"{folder} cannot be written", lambda: _create(folder, files, config, base))
    where = {name: entry for file in files for name, entry in header_of(folder / file).items()}
    for path, rule in rules.items():
        _write(rule, params[path], where)
    processes.all_processes(True)  # until every process has written its blocks


def _check(params: Mapping[str, Tensor], rules: Mapping[str, Rule], name: str) -> None:
    problems = [f"{path} is missing" for path in rules if path not in params]
    problems += [f"{path} is no parameter of {name}" for path in params if path not in rules]
    for path, rule in rules.items():
        if path in params and params[path].dims != rule.dims:
            problems.append(f"{path} has the dims {params[path].dims}, and {name} has {rule.dims}")
        if path in params and params[path].dtype not in DTYPES.values():
            problems.append(f"{path} has dtype {params[path].dtype}, which safetensors files do not have")
    if problems:
        raise ShapeError("the parameters do not fit the workload\n" + "\n".join(f"  {line}" for line in problems))


def _files(types: Types, largest: int) -> dict[str, Types]:
    """The tensors of each file, in the order of names."""
    parts: list[Types] = [{}]
    size = 0
    for name, (dtype, shape) in types.items():
        more = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size + more > largest and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = (dtype, shape)
        size += more
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts)}


def _config(table: HuggingFace, config: Any, dtype: str, base: str | Path | None) -> dict[str, Any]:
    """The contents of config.json: those of the base with the keys that the workload's config changed."""
    written = table.write_config(config)
    if base is None:
        return {**written, "dtype": dtype}
    kept = read_json(Path(base) / "config.json")
    before = dataclasses.replace(config, **table.read_config(HubConfig(kept), config))
    same = table.write_config(before)
    changed = {key: value for key, value in written.items() if value != same.get(key)}
    return {**kept, **changed, "torch_dtype" if "torch_dtype" in kept else "dtype": dtype}


def copy_files(base: str | Path, folder: Path) -> None:
    """Copy the files of a Hugging Face directory that hold no weights: config.json, the tokenizer and the like."""
    for file in sorted(Path(base).iterdir()):
        if file.is_file() and file.suffix in KEPT and file.stat().st_size < LARGEST_KEPT and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)


def _create(folder: Path, files: Mapping[str, Types], config: Mapping[str, Any], base: str | Path | None) -> None:
    """Create the directory, config.json, the index, and files of the right sizes without elements."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SaveError(f"{folder} cannot be written: it has files already; give a new directory")
    if base is not None:
        copy_files(base, folder)
    for file, types in files.items():
        write_header(folder / file, types)
    if len(files) > 1:
        sizes = [os.path.getsize(folder / file) for file in files]
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {n: f for f, types in files.items() for n in types},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="ascii")
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="ascii")


def _write(rule: Rule, x: Tensor, where: Mapping[str, Any]) -> None:
    """Write this process's blocks of one parameter; of replicas, the first."""
    for shard in jax.numpy.asarray(x.stored).addressable_shards:
        if shard.replica_id:
            continue
        block = np.asarray(shard.data)
        for name, inside, place in rule.parts(unpadded(shard.index, x.shape)):
            view = where[name].view("r+")
            rule.arranged(view)[place] = block[inside]
            if isinstance(view, np.memmap):
                view.flush()
