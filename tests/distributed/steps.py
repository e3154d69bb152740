"""The program of each of two processes: `python -m tests.distributed.steps PORT RANK FILE`.

The process has four of the eight devices of a mesh. It trains and writes the parts of the results that lie on its own
devices to FILE. The test runs the same functions in one process with eight devices.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import meshdsl as md
from meshdsl.models.mixtral import mixtral
from meshdsl.train.weights.files import Stored, open_directory

MIXTRAL = Path(__file__).parent.parent / "models" / "references" / "mixtral"
IMPORTED = "expert:rows; vocab:rows; heads:cols; d_ff:cols"
LAYOUTS = ["batch:rows; hidden:cols", "batch:rows,cols", "batch:cols; io:rows", "hidden:rows,cols"]


def whole_numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """-1, 0 and 1 as floats: every sum in the step stays below 2**24 and is exact, in any order."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


def step(w: md.Tensor, v: md.Tensor, x: md.Tensor, target: md.Tensor) -> dict[str, md.Tensor]:
    """One step of gradient descent on two layers, and a maximum: sums and maxima over every axis."""

    def loss(w: md.Tensor, v: md.Tensor) -> md.Tensor:
        h = md.relu(md.einsum(x, w, out="batch hidden"))
        return md.sum(md.square(md.einsum(h, v, out="batch io") - target))

    value, (dw, dv) = md.value_and_grad(loss, argnums=(0, 1))(w, v)
    return {"loss": value, "w": w - dw, "v": v - dv, "top": md.max(w, "hidden")}


def run(layout: str) -> dict[str, md.Tensor]:
    """The step on a mesh of eight devices, wherever they are. Its sizes do not all divide."""
    tensors = [
        md.tensor(whole_numbers((6, 8), 0), "io hidden"),
        md.tensor(whole_numbers((8, 6), 1), "hidden io"),
        md.tensor(whole_numbers((8, 6), 2), "batch io"),
        md.tensor(whole_numbers((8, 6), 3), "batch io"),
    ]
    return md.compile(step, md.Mesh("rows:2 cols:4"), md.Layout(layout))(*tensors)


def train() -> list[float]:
    """The losses of a few steps of a small language model."""
    from meshdsl.train import load, mesh_and_layout, train

    workload = load("models/transformer.py:lm").replace(
        batch=4, length=16, layers=2, d_model=32, heads=4, d_head=8, d_ff=64
    )
    records = train(workload, md.Plan(*mesh_and_layout(workload, "data_model", None)), steps=3, eval_batches=0)
    return [record["loss"] for record in records if "loss" in record]


def import_and_export(folder: str) -> tuple[dict[str, md.Tensor], list[str]]:
    """Mixtral from a Hugging Face directory, with experts on different processes, written to a shared folder.

    Returns the parameters, and the names of the tensors of which this process read a part.
    """
    names = {entry.start: name for name, entry in open_directory(MIXTRAL).items()}
    read, view = set[str](), Stored.view

    def noted(stored: Stored, mode: Any = "r") -> np.ndarray:
        if mode == "r":
            read.add(names[stored.start])
        return view(stored, mode)

    with mock.patch.object(Stored, "view", noted):
        workload, params = md.import_hugging_face(MIXTRAL, mixtral, "rows:4 cols:2", IMPORTED)
    md.export_hugging_face(params, workload, folder)
    return params, sorted(read)


def parts(name: str, tensor: md.Tensor) -> dict[str, np.ndarray]:
    """The blocks of a tensor on this process's devices, each with where it begins."""
    found = {}
    for shard in tensor.stored.addressable_shards:
        begin = ",".join(str(s.start or 0) for s in shard.index)
        found[f"{name}@{shard.device.id}@{begin}"] = np.asarray(shard.data)
    return found


def main(port: str, rank: str, file: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)  # as in the tests
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(rank), initialization_timeout=60)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    results: dict[str, Any] = {"losses": np.array(train())}
    for layout in LAYOUTS:
        for name, tensor in run(layout).items():
            results |= parts(f"{layout}@{name}", tensor)
    params, names = import_and_export(str(Path(file).parent / "exported"))
    for path, tensor in params.items():
        results |= parts(f"imported@{path}", tensor)
    np.savez(file, read=np.array(names), **results)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
