"""Models with weights of Hugging Face: logits, gradients and greedy tokens equal those of `transformers`, float64.

The references were written by tests/models/references/make.py. By default, every model runs under each of its layouts,
logits and gradients by the simulator; `-m slow` adds 25 random layouts of each.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import deepseek, gemma2, gemma3, gpt2, llama, mamba, mixtral, qwen3, resnet_bn, t5, vit
from meshdsl.models.rotary import Rotary
from meshdsl.train.checkpoint.grid import Box
from meshdsl.train.weights.files import header_of, open_directory
from meshdsl.train.weights.load import read_params, rules_of
from meshdsl.train.weights.table import rule_of

REFERENCES = Path(__file__).parent / "references"
MODELS: dict[str, md.Workload] = {
    "llama2": llama.llama, "llama3": llama.llama, "qwen3": qwen3.qwen3, "gpt2": gpt2.gpt2, "mixtral": mixtral.mixtral,
    "gemma2": gemma2.gemma2, "gemma3": gemma3.gemma3, "deepseek_v3": deepseek.deepseek,
    "vit": vit.vit, "resnet_basic": resnet_bn.resnet_bn, "resnet_bottleneck": resnet_bn.resnet_bn,
    "t5": t5.t5, "t5_gated": t5.t5, "mamba": mamba.mamba,
    "deepseek_v3 by node": deepseek.deepseek_by_node.replace(capacity_factor=0.0, dispatch="index"),
}  # fmt: skip
TOLERANCE = 1e-13  # of logits of size 3, and of gradients of size 0.5


def directory(name: str) -> Path:
    return REFERENCES / name.partition(" ")[0]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """Tokens, targets, logits, loss and greedy tokens."""
    return {key: np.array(entry.view()) for key, entry in header_of(directory(name) / "reference.safetensors").items()}


@functools.cache
def imported(name: str) -> tuple[md.Workload, dict[str, md.Tensor]]:
    """The workload for the batch of the reference, and its parameters in float64."""
    workload, params = md.import_hugging_face(directory(name), MODELS[name], dtype="float64")
    shapes = {d.name: d.size for x in batch_of(name).values() for d in x.dims}
    return workload.replace(**{d: n for d, n in shapes.items() if hasattr(workload.config, d)}), params


@functools.cache
def gradients(name: str) -> dict[str, np.ndarray]:
    """The reference's gradients, by our paths."""
    workload, _ = imported(name)
    assert workload.hugging_face is not None
    stored = header_of(directory(name) / "gradients.safetensors")
    found = read_params(rules_of(workload, workload.hugging_face), stored, "float64", None, None, None)
    return {path: x.numpy() for path, x in found.items()}


def batch_of(name: str) -> dict[str, md.Tensor]:
    dims = {"tokens": "batch length", "source": "batch source", "image": "batch color height width"}
    dims["targets"] = "batch" if "image" in reference(name) else "batch length"
    return {key: md.tensor(x, dims[key]) for key, x in reference(name).items() if key in dims}


def step_of(workload: md.Workload) -> Any:
    """The function `(params, batch) -> (logits, gradients)`."""
    logits_of, loss_of = workload.model(workload.config), workload.loss(workload.config)

    def value(params: Any, batch: Any) -> Any:
        found = loss_of(params, batch)
        return found[0] if isinstance(found, tuple) else found

    def step(params: Any, batch: Any) -> Any:
        return logits_of(params, batch), md.grad(value)(params, batch)

    return step


@functools.cache
def compiled(name: str) -> md.Compiled:
    """The step, whose trace all layouts share."""
    return md.compile(step_of(imported(name)[0]), "", "")


def errors(name: str, mesh: str, layout: str) -> tuple[float, float]:
    """The largest error of logits and of gradients under a layout; every device is run in NumPy."""
    params = imported(name)[1]
    program = compiled(name).under(mesh, layout).program(params, batch_of(name))
    logits, *grads = md.simulate(program, *jax.tree.leaves((params, batch_of(name))))
    expected = [gradients(name)[path] for path in sorted(params)]
    computed = reference(name)["evaluated" if "evaluated" in reference(name) else "logits"]
    return apart(logits, computed), max(apart(g, e) for g, e in zip(grads, expected, strict=True))


def apart(x: Any, expected: np.ndarray) -> float:
    """The largest error, relative to the largest element if that is above 1."""
    return float(np.abs(np.asarray(x) - expected).max() / max(1.0, np.abs(expected).max()))


EVERY = [(name, layout) for name in MODELS for layout in MODELS[name].layouts]
QUICK = [
    ("llama2", "zero"), ("llama2", "sequence"), ("llama2", "context"), ("llama3", "zero_context"),
    ("qwen3", "zero_context"), ("gpt2", "data_model"), ("gpt2", "zero_context"), ("mixtral", "expert_model"),
    ("mixtral", "zero_context"),
    ("gemma2", "data_model"), ("gemma2", "zero_context"), ("gemma3", "sequence"), ("gemma3", "context"),
    ("deepseek_v3", "zero_context"), ("deepseek_v3", "expert_model"), ("deepseek_v3", "sequence"),
    ("deepseek_v3 by node", "node_zero"), ("deepseek_v3 by node", "node_model"),
    ("vit", "zero"), ("vit", "sequence"), ("vit", "context"), ("resnet_bottleneck", "spatial"),
    ("t5", "context"), ("t5_gated", "sequence"), ("mamba", "zero"), ("mamba", "sequence"),
    ("mamba", "context"),
]  # fmt: skip


def case(pair: tuple[str, str]) -> Any:
    return pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("name", "layout"), [case(pair) for pair in EVERY])
def test_model_equals_transformers_under_its_layouts(name: str, layout: str):
    assert max(errors(name, *MODELS[name].layouts[layout])) < TOLERANCE


@pytest.mark.parametrize("layout", ["data", pytest.param("spatial", marks=pytest.mark.slow)])
def test_running_statistics_equal_those_of_transformers(layout: str):
    """A training step stores those of the whole batch; evaluation uses the old ones, and its loss is that of them."""
    name = "resnet_basic"
    workload, params = imported(name)
    assert workload.hugging_face is not None
    state = workload.optimizer(workload.config).init(params)
    assert not [keys for keys, _ in jax.tree_util.tree_leaves_with_path(state) if "norm/mean" in str(keys)]
    program = md.compile(workload.train_step(), *workload.layouts[layout]).program(params, state, batch_of(name))
    found = md.simulate(program, *jax.tree.leaves((params, state, batch_of(name))))
    after = dict(zip(sorted(params), found, strict=False))
    stored = header_of(directory(name) / "reference.safetensors")
    rules = {p: r for p, r in rules_of(workload, workload.hugging_face).items() if p.endswith(("/mean", "/var"))}
    names = {key.removeprefix("after/"): x for key, x in stored.items() if key.startswith("after/")}
    expected = read_params(rules, names, "float64", None, None, None)
    assert len(expected) == 28 and len(names) == 32  # two blocks are stacked
    for path, x in expected.items():
        assert np.abs(np.asarray(after[path]) - x.numpy()).max() < TOLERANCE, path
        assert np.abs(x.numpy() - params[path].numpy()).max() > 1e-3, path
    value = md.compile(workload.eval_step(), "", "")(params, batch_of(name))["loss"].item()
    logits, targets = reference(name)["evaluated"], reference(name)["targets"]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(value, -log_p[np.arange(len(targets)), targets].mean(), rtol=1e-13)


def test_zero_sends_what_the_formula_says():
    """Each sharded weight of the layers is gathered for both passes, the embedding and the output layer for one.

    Their gradients are reduce-scattered, those of the norms all-reduced; no activation is sent.
    """
    workload = llama.llama.replace(query_heads=16, heads=8, d_head=8)
    params, _, batch = workload.specs()
    mesh, layout = llama.LAYOUTS["zero"]
    records = md.compile(md.grad(workload.loss(workload.config)), mesh, layout).program(params, batch).collectives
    assert {record.kind for record in records} == {"all_gather", "reduce_scatter", "all_reduce"}
    times = {path: 2 if "layer" not in path or path.endswith("scale") else 3 for path in params}
    expected = sum(times[path] * 4 * math.prod(d.size for d in spec.dims) for path, spec in params.items()) * 7 / 8
    expected += 8 * 2 * 7 / 8  # the number of targets that are not ignored, in JAX's default integer: 64 bits here
    assert sum(record.wire_bytes * record.count for record in records) == expected


def random_layout(workload: md.Workload, seed: int) -> tuple[str, str]:
    """A mesh of up to 8 devices and rules for random dims of a workload; it may be illegal."""
    rng = np.random.default_rng(seed)
    mesh = ["a:2", "a:4", "a:8", "a:2 b:2", "a:2 b:4", "a:3", "a:3 b:2", "a:2 b:2 c:2"][rng.integers(8)]
    specs = [*workload.specs()[0].values(), *workload.specs()[2].values()]
    names = sorted({d.name for spec in specs for d in spec.dims} - {"layer"})
    axes = [*md.Mesh(mesh).axes]
    rules: dict[str, str] = {}
    for _ in range(rng.integers(1, 6)):
        rules[str(rng.choice(names))] = str(rng.choice(axes))
    return mesh, "; ".join(f"{dim}:{axis}" for dim, axis in rules.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_transformers_under_random_layouts(name: str):
    found: list[float] = []
    for seed in range(1000):
        if len(found) == 25:
            break
        try:
            found.append(max(errors(name, *random_layout(imported(name)[0], seed))))
        except md.LayoutError:  # two dims of one tensor on one axis
            continue
    print(json.dumps({"model": name, "layouts": len(found), "worst": max(found)}))
    assert len(found) == 25 and max(found) < TOLERANCE


def continued(name: str, mesh: str, layout: str, *key: md.Tensor) -> np.ndarray:
    """Six tokens after each prompt, under a layout, greedy without a key; every device is run in NumPy."""
    workload, params = imported(name)
    assert workload.decoder is not None
    decode = workload.decoder(workload.config, functools.partial(md.nn.decode.generate, tokens="token:6"))
    batch = batch_of(name)
    prompt = md.rename(batch["source"], source="length") if "source" in batch else batch["tokens"]
    program = md.compile(decode, mesh, layout).program(params, prompt, *key)
    return np.asarray(md.simulate(program, *jax.tree.leaves(params), prompt, *key)[0])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3", "zero_context"),
        ("llama2", "model"),
        ("qwen3", "context"),
        ("gemma2", "model"),
        ("gemma3", "context"),
        ("deepseek_v3", "expert_model"),
        ("deepseek_v3 by node", "node_model"),
        ("gpt2", "sequence"),
        ("mixtral", "expert_model"),
        ("t5", "model"),
        ("mamba", "context"),
        pytest.param("t5_gated", "zero_context", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(name: str, layout: str):
    np.testing.assert_array_equal(continued(name, *MODELS[name].layouts[layout]), reference(name)["greedy"])


def test_sampled_tokens_do_not_depend_on_the_layout():
    key = md.random.key(5)
    sampled = continued("gpt2", "rows:1", "", key)
    assert (sampled != reference("gpt2")["greedy"]).any()
    np.testing.assert_array_equal(continued("gpt2", *gpt2.LAYOUTS["zero"], key), sampled)


def bits(directory: Path) -> dict[str, tuple[Any, ...]]:
    stored = open_directory(directory)
    found = {name: (entry.dtype, entry.shape, np.array(entry.view()).tobytes()) for name, entry in stored.items()}
    return {name: x for name, x in found.items() if "num_batches_tracked" not in name}  # a count that nothing reads


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama2", "heads:b model:a vocab:b"), ("gpt2", "layer:a model:b vocab:a"), ("llama3", ""),
        ("mixtral", "expert:a d_ff:b heads:b"), ("qwen3", "head:a"),
        ("gemma2", "model:a heads:b d_ff:b"), ("gemma3", "model:a heads:b"), ("deepseek_v3", "expert:a heads:b"),
        ("deepseek_v3 by node", "node:a node_expert:b"),
        ("vit", "length:a d_ff:b height_window:b"),
        ("resnet_bottleneck", "middle2:a stage1:b layer1:a"),
        ("t5_gated", "heads:a bucket:b d_ff:b"), ("mamba", "inner:a vocab:b"),
    ],
)  # fmt: skip
def test_import_and_export_is_bitwise_the_same(name: str, layout: str, tmp_path: Path):
    workload, params = md.import_hugging_face(directory(name), MODELS[name], "a:3 b:2", layout)
    md.export_hugging_face(params, workload, tmp_path / "out", largest_file=6000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert bits(tmp_path / "out") == bits(directory(name))
    again, _ = md.import_hugging_face(tmp_path / "out", MODELS[name])
    assert again.config == workload.config


def test_import_reads_only_the_blocks_of_its_devices(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    zeros = np.zeros

    def counted(shape: Any, *rest: Any, **more: Any) -> np.ndarray:
        made = zeros(shape, *rest, **more)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(np, "zeros", counted)
    _, params = md.import_hugging_face(REFERENCES / "llama2", llama.llama, "a:4", "vocab:a d_ff:a head:a")
    monkeypatch.undo()
    assert max(sizes) == 2 * 12 * 5 * 4 < params["embed"].array.nbytes  # a quarter of both layers' w_in
    assert params["embed"].stored.sharding.shard_shape(params["embed"].stored.shape) == (8, 12)


def copied(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a reference with other values in config.json; None removes a key."""
    shutil.copytree(REFERENCES / name, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_import_lists_all_problems(tmp_path: Path, golden: Any):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32}
    changes = {"rope_parameters": rope, "hidden_act": "gelu", "num_hidden_layers": 3, "intermediate_size": 24}
    folder = copied("llama2", tmp_path / "hf", sliding_window=16, attention_bias=True, **changes)
    with pytest.raises(md.CheckpointError) as caught:
        md.import_hugging_face(folder, llama.llama)
    golden("import_hugging_face", str(caught.value.args[0]).replace(str(folder), "hf").partition("\n  at ")[0])


def test_import_reads_older_config_files(tmp_path: Path):
    scaling = {"type": "linear", "factor": 2.0}
    old = copied("llama2", tmp_path / "a", rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
    assert md.import_hugging_face(old, llama.llama)[0].config.rotary == Rotary(500.0, 2.0, "linear")
    with pytest.raises(md.CheckpointError, match="is a model of type 'gpt2', and llama reads 'llama'"):
        md.import_hugging_face(REFERENCES / "gpt2", llama.llama)
    hub = md.HubConfig({"hidden_size": 64, "num_attention_heads": 8})
    assert llama.llama.hugging_face is not None
    found = llama.llama.hugging_face.read_config(hub, llama.Config())
    assert (found["d_head"], found["heads"], found["query_heads"]) == (8, 8, 8)


def test_lists_and_offsets_of_a_table():
    hub = md.HubConfig({"depths": [2, 3], "widths": [4, 0], "text": "45"})
    assert hub.sizes("depths") == (2, 3) and hub.sizes("other", (5,)) == (5,) and hub.sizes("widths") == (1,)
    assert hub.sizes("text") == (1,) and not hub.complete
    assert hub.problems[0] == "widths is [4, 0], and must be a list of positive integers up to 16777216"
    rule = rule_of("w", ("a.{layer+2}.b.{expert}", "io"), md.dims("layer:2 expert:2 io:3"))
    assert rule.names() == ["a.2.b.0", "a.2.b.1", "a.3.b.0", "a.3.b.1"]


def test_one_index_of_two_dims_of_a_table():
    rule = rule_of("w", ("a.{node expert}", "io"), md.dims("node:2 expert:3 io:2"))
    assert [name for name, _, _ in rule.parts(Box((1, 1, 0), (1, 2, 2)))] == ["a.4", "a.5"]


def test_deepseek_by_node_keeps_the_node_limit_of_the_file():
    """A token of these weights has experts in two of four groups, which are the nodes."""
    config = imported("deepseek_v3 by node")[0].config
    assert (config.nodes, config.groups, config.best_groups, config.chosen) == (4, 4, 2, 3)


def test_a_statistic_that_is_no_parameter_is_an_error():
    def loss(config: Any) -> Any:
        run = vit.model(config)
        return lambda params, batch: (md.mean(run(params, batch)), {}, {"mean": md.tensor(0.0, "")})

    step = dataclasses.replace(vit.vit, loss=loss).train_step()
    with pytest.raises(md.ShapeError, match="a running statistic 'mean', which is no parameter; known: "):
        md.eval_shape(step, *vit.vit.specs())


def test_config_that_is_incomplete_is_reported_without_tensors(tmp_path: Path):
    folder = copied("llama2", tmp_path / "hf", vocab_size="29", hidden_size=None)
    with pytest.raises(md.CheckpointError) as caught:
        md.import_hugging_face(folder, llama.llama)
    assert "hidden_size is missing" in str(caught.value)
    assert "vocab_size is '29', and must be a positive integer" in str(caught.value)
    assert "the tensors were not checked" in str(caught.value)


def test_import_accepts_files_of_the_bare_model(tmp_path: Path):
    workload, params = md.import_hugging_face(REFERENCES / "gpt2", gpt2.gpt2)
    md.export_hugging_face(params, workload, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b"transformer.", b"").ljust(size)
    file.write_bytes(content[:8] + header + content[8 + size :])
    again = md.import_hugging_face(tmp_path / "out", gpt2.gpt2)[1]
    assert all((again[path].numpy() == x.numpy()).all() for path, x in params.items())


@pytest.mark.parametrize("damage", ["short", "offsets", "dtype", "json", "none", "index", "nul", "fifo", "missing"])
def test_damaged_files_are_refused(damage: str, tmp_path: Path):
    folder = copied("gpt2", tmp_path / "hf")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    changed = {
        "short": content[:-1],
        "offsets": content.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
        "dtype": content.replace(b'"F32"', b'"F99"', 1),
        "json": content.replace(b"{", b"[", 1),
        "none": b"",
    }
    file.write_bytes(changed.get(damage, content))
    if damage in ("index", "nul", "fifo"):
        name = {"index": "../model.safetensors", "nul": "a\0b", "fifo": "fifo"}[damage]
        os.mkfifo(folder / "fifo")  # to open it would wait
        index = {"weight_map": {"transformer.wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if damage == "missing":
        file.unlink()
    with pytest.raises(md.CheckpointError, match=str(folder)):
        md.import_hugging_face(folder, gpt2.gpt2)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path):
    file = copied("gpt2", tmp_path / "hf") / "model.safetensors"
    stored = next(iter(header_of(file).values()))
    stored.view()
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(md.CheckpointError, match=r"model\.safetensors was written to or replaced while it was read"):
        stored.view()


def test_import_of_a_16_bit_directory_makes_float32_parameters(tmp_path: Path) -> None:
    params, _ = llama.llama.init(md.random.key(0))
    md.export_hugging_face(params, llama.llama, tmp_path / "narrow", dtype="bfloat16")
    workload, found = md.import_hugging_face(tmp_path / "narrow", llama.llama)
    assert (workload.config.param_dtype, workload.config.compute_dtype) == ("float32", "bfloat16")
    assert {x.dtype.name for x in found.values()} == {"float32"}
    md.export_hugging_face(found, workload, tmp_path / "again", dtype="bfloat16")
    files = [tmp_path / name / "model.safetensors" for name in ("narrow", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    stored, found = md.import_hugging_face(tmp_path / "narrow", llama.llama, dtype="stored")
    assert (stored.config.param_dtype, stored.config.compute_dtype) == ("bfloat16", "bfloat16")
    assert {x.dtype.name for x in found.values()} == {"bfloat16"}
    with pytest.raises(md.ShapeError, match="no dtype"):
        md.export_hugging_face(params, llama.llama, tmp_path / "other", dtype="complex64")
