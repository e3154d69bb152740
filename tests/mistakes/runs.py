"""Mistakes with checkpoints, files, weights, data and training."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.models.gpt2 import gpt2
from meshdsl.models.llama import llama
from meshdsl.models.mlp import mlp
from meshdsl.train import Iterated, Keeping, TokenFiles, load, train

HOME = tempfile.TemporaryDirectory()
RUN, OUT = Path(HOME.name) / "run", Path(HOME.name) / "out"
W = {"w": md.ones("io:2")}
SMALL = mlp.replace(batch=4, io=2, hidden=4)
ONE = md.Plan("all:1")
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}


def saved() -> md.Checkpoints:
    """A directory with the steps 1 and 2."""
    checkpoints = md.Checkpoints(RUN)
    if not checkpoints.steps():
        for step in (1, 2):
            checkpoints.save(step, W)
        checkpoints.close()
    return md.Checkpoints(RUN)


def hub(**config: Any) -> Path:
    """A directory as of Hugging Face, with this config.json and no weights."""
    folder = Path(HOME.name) / "hub"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tokens(count: int) -> Path:
    path = Path(HOME.name) / f"{count}.bin"
    np.arange(count, dtype=np.uint16).tofile(path)
    return path


def steps(**options: Any) -> list[Any]:
    return list(train(SMALL, ONE, **{"steps": 1, "eval_batches": 0, **options}))


ROWS = [
    (lambda: md.Checkpoints(3), "directory must be a path, got 3"),
    (lambda: md.Checkpoints(__file__), "directory is the file "),
    (lambda: md.Checkpoints(RUN, keep=0), "keep must be an integer from 1, or None to keep all steps; got 0"),
    (lambda: md.Checkpoints(RUN, keep="all"), "keep must be an integer from 1, or None to keep all steps; got"),
    (lambda: md.Checkpoints(OUT).save(W, 1), "a step must be an integer from 0 to 1000000000000000, got {'w':"),
    (lambda: md.Checkpoints(OUT).save(-1, W), "a step must be an integer from 0 to 1000000000000000, got -1"),
    (lambda: md.Checkpoints(OUT).save(1.5, W), "a step must be an integer from 0 to 1000000000000000, got 1.5"),
    (lambda: md.Checkpoints(OUT).save(1, np.ones(2)), "value: expected a tensor or a number, got an array of shape"),
    (lambda: md.Checkpoints(OUT).save(1, {"w": np.ones(2)}), "w: expected a tensor or a number, got an array of"),
    (lambda: md.Checkpoints(OUT).save(1, {"w": md.spec("io:2")}), "w is the spec float32[io=2], which has no values"),
    (lambda: md.Checkpoints(OUT).save(1, W, config=object()), "config is <object object at 0x"),
    (lambda: md.Checkpoints(OUT).save(1, W, key=0), "key= must be a random key, as from md.random.key(seed), got int"),
    (lambda: saved().save(1, W), "step-00000001 was not saved: step-00000001 already exists in "),
    (lambda: saved().restore(7), "step-00000007: the directory is missing"),
    (lambda: saved().restore("latest"), "a step must be an integer from 0 to 1000000000000000, got"),
    (lambda: saved().restore(W), "a step must be an integer from 0 to 1000000000000000, got {'w':"),
    (lambda: saved().restore(like={"v": md.spec("io:2")}), "the checkpoint of step 2 does not match like="),
    (lambda: saved().restore(like={"w": md.spec("io:3")}), "the checkpoint of step 2 does not match like="),
    (lambda: saved().restore(like={"w": md.spec("hidden:2")}), "the checkpoint of step 2 does not match like="),
    (lambda: saved().restore(like={"w": md.spec("io:2", "int32")}), "the checkpoint of step 2 does not match like="),
    (lambda: saved().restore(like={"w": np.ones(2)}), "an argument is a tensor, md.spec or number, got ndarray; name"),
    (lambda: saved().restore(layout="io:rows"), "the layout 'io:rows' needs a mesh; pass mesh="),
    (lambda: saved().restore(mesh=8), "a mesh is 8 (int); expected str or dict"),
    (lambda: saved().verify(7), "step-00000007: the directory is missing"),
    (lambda: saved().discard("all"), "a step must be an integer from 0 to 1000000000000000, got 'all'"),
    (lambda: md.export_safetensors(RUN, 1, OUT / "a.safetensors"), "the first argument must be"),
    (lambda: md.export_safetensors(saved(), 7, RUN.parent / "a.safetensors"), "step-00000007: the directory is"),
    (lambda: md.export_safetensors(saved(), 1, "/no/such/folder/a.safetensors"), "/no/such/folder/a.safetensors"),
    (lambda: md.import_safetensors("nothing.safetensors"), "nothing.safetensors cannot be read: FileNotFoundError:"),
    (lambda: md.import_safetensors(__file__), "runs.py cannot be read: SafetensorError"),
    (lambda: md.import_orbax("nothing"), "nothing cannot be read: FileNotFoundError: Checkpoint at "),
    (lambda: md.import_hugging_face("nothing", llama), "there is no folder 'nothing'"),
    (lambda: md.import_hugging_face(RUN.parent, llama), "config.json cannot be read: No such file"),
    (lambda: md.import_hugging_face(hub(model_type="bert"), llama), "is a model of type 'bert', and llama reads"),
    (lambda: md.import_hugging_face(hub(**LLAMA), gpt2), "and gpt2 reads 'gpt2'\n  --model"),
    (lambda: md.import_hugging_face(hub(**LLAMA), mlp), "'mlp' has no table of Hugging Face tensors"),
    (
        lambda: md.import_hugging_face(hub(**{**LLAMA, "num_attention_heads": 3}), llama),
        "has neither model.safetensors nor",
    ),
    (lambda: md.import_hugging_face(hub(**{**LLAMA, "hidden_size": "8"}), llama), "has neither model.safetensors nor"),
    (lambda: md.import_hugging_face(hub(**LLAMA), llama), "has neither model.safetensors nor"),
    (lambda: md.import_hugging_face(hub(**LLAMA), "llama"), "'llama' has no table of Hugging Face tensors"),
    (lambda: md.export_hugging_face(W, llama, OUT), "the parameters do not fit the workload"),
    (lambda: md.export_hugging_face(W, mlp, OUT), "'mlp' has no table of Hugging Face tensors"),
    (lambda: TokenFiles("train.bin", seed=0, batch=2, length=4), "the token file train.bin cannot be read: No such"),
    (lambda: TokenFiles(["nothing.bin"], seed=0, batch=2, length=4), "the token file nothing.bin cannot be read: No"),
    (lambda: TokenFiles([tokens(9)], seed=0, batch=2, length=40), "the training files have no window of 41 tokens"),
    (lambda: TokenFiles([tokens(9)], seed=0, batch=0, length=4), "batch 0 and length 4 must be at least 1, and the"),
    (lambda: TokenFiles([tokens(9)], seed=0, batch=2, length=4)("valid", 0), "the split must be one of train,"),
    (lambda: TokenFiles([tokens(9)], seed=0, batch=2, length=4)("held_out", 0), "there are no held_out files with a"),
    (lambda: Iterated(iter([{"x": 1}]), held_out=lambda i: {}), "an iterator of batches has the methods __next__,"),
    (lambda: load("models/mlp.py:mpl"), "models/mlp.py has no 'mpl'; did you mean 'mlp'?"),
    (lambda: load("models.mlp"), "no model 'models.mlp', and no file, which is written file.py:name"),
    (lambda: steps(batches=lambda split, step: {"x": np.ones((4, 2))}), "the batch has no array 'target'; it has: x"),
    (
        lambda: steps(batches=lambda split, step: {"x": np.ones((2, 4)), "target": np.ones((4, 2))}),
        "the array 'x' of the batch is",
    ),
    (lambda: steps(batches=lambda split, step: np.ones((4, 2))), "a batch is a dict of arrays, got ndarray"),
    (lambda: steps(batches=lambda split, step: None), "a batch is a dict of arrays, got NoneType"),
    (lambda: steps(batches=[{}]), "batches is a function (split, step) -> dict of arrays, got list"),
    (lambda: steps(steps=-1), "steps is a number of steps from 0, got -1"),
    (lambda: steps(steps=1.5), "steps is a number of steps from 0, got 1.5"),
    (lambda: steps(seed="a"), "expected a tensor, or numbers or booleans; got 'a' (str)"),
    (lambda: steps(non_finite="ignore"), "non_finite is 'stop' or 'skip', got 'ignore'"),
    (lambda: list(train("mlp", ONE, steps=1)), "train takes an md.Workload, got 'mlp'"),
    (lambda: list(train(SMALL, md.Plan("all:1", "bach:all"), steps=1)), "the layout names dim 'bach',"),
    (lambda: Keeping(RUN), "a run saves to md.Checkpoints(directory), got PosixPath('"),
    (lambda: Keeping(saved(), every=0), "a run saves every N steps, with N at least 1; got every=0"),
]
