"""Published training runs as programs of this library: a workload, a mesh, a layout and a machine.

vtrain       GPT on one node of A100, Megatron-DeepSpeed with data and tensor parallelism, every layer recomputed
megatron     the 22 B model of Korthikanti et al. (2022) on one node of A100
llm-foundry  MPT on A100 and H100, PyTorch FSDP with a fused attention kernel written in Triton
maxtext      Llama-like models on slices of TPU v4 and v5e, parameters sharded over each slice; and Llama 2 7B on 1 to
             16 nodes of H100, parameters sharded over each node, results of products saved, batch 4 a GPU
recipes      Llama and Mistral on TPU v5p and v6e, parameters sharded over the slice

The published rates of MaxText count model FLOPs by its own formula; the same formula gives the seconds back. Where the
published run offloads or saves some projections, every layer is recomputed here. Parameters that are sharded over the
data axis are a sharded update with `regather`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models.transformer import lm

__all__ = ["Run", "runs"]

MODEL_AXIS = "heads:model; d_ff:model; vocab:model"
FULL = {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16", "remat": True}
GPT = {**FULL, "activation": "gelu", "tied": True}
# MaxText's configurations leave grad_dtype of its base.yml as it is, float32
LLAMA = {
    **FULL, "reduce_dtype": "float32", "activation": "silu", "gated": True, "norm": "rms", "positions": "rotary"
}  # fmt: skip
SIZES = {  # layers, d_model, heads of keys, queries per key, d_ff, vocabulary
    "Llama2-70B": (80, 8192, 8, 8, 28672, 32000),
    "Llama3.1-8B": (32, 4096, 8, 4, 14336, 128256),
    "Llama3.1-70B": (80, 8192, 8, 8, 28672, 128256),
    "Llama3.1-405B": (126, 16384, 8, 16, 53248, 128256),
    "Mistral-7B": (32, 4096, 8, 4, 14336, 32000),
}


@dataclass(frozen=True)
class Run:
    """One measured step: its program, its machine and its seconds. `micro` micro-batches run in one step."""

    source: str
    machine: str
    workload: md.Workload
    mesh: str
    layout: str
    sharded: bool  # parameters are sharded over the data axis
    micro: float
    seconds: float
    tp: int
    devices: int
    group: str | None = None  # the axis over which parameters are sharded, if there are replicas of the group

    @property
    def size(self) -> str:
        """The model, by its width and depth."""
        return f"{self.workload.config.d_model}x{self.workload.config.layers}"

    @property
    def key(self) -> str:
        """The text that identifies its program."""
        return f"{self.workload.config} {self.mesh} {self.layout} {self.sharded}{self.group or ''}"

    @property
    def tokens(self) -> float:
        """The tokens of one step, over all devices."""
        return self.micro * self.workload.config.batch * self.workload.config.length

    def step(self) -> md.Compiled:
        """The compiled train step of one micro-batch."""
        update = md.WeightUpdate("sharded", group=self.group, regather=True) if self.sharded else "replicated"
        train = self.workload.train_step()
        return md.compile(train, self.mesh, self.layout, donate=(0, 1), weight_update=update)


def runs(rows: Sequence[dict[str, Any]]) -> list[Run]:
    """The runs of all rows whose model, layout and batch are published."""
    readers: dict[str, Callable[[dict[str, Any]], Iterator[Run]]] = {
        "vtrain_single": _vtrain,
        "korthikanti_t5": _megatron,
        "llmfoundry": _llm_foundry,
        "maxtext_v5e": _maxtext,
        "maxtext_v4": _maxtext,
        "maxtext_h100": _maxtext_h100,
        "tpu_recipes": _recipe,
    }
    return [run for row in rows for run in readers.get(row["group"], lambda _: iter(()))(row)]


def _vtrain(row: dict[str, Any]) -> Iterator[Run]:
    m, p = row["model_config"], row["parallelism"]
    workload = lm.replace(
        **GPT, batch=m["micro_batch"] * p["dp"], length=m["seq"], vocab=51200, layers=m["layers"],
        d_model=m["d_model"], heads=m["heads"], d_head=m["d_model"] // m["heads"], d_ff=4 * m["d_model"],
    )  # fmt: skip
    micro = m["global_batch"] / m["micro_batch"] / p["dp"]
    mesh, layout = f"data:{p['dp']} model:{p['tp']}", f"batch:data; {MODEL_AXIS}"
    seconds = row["measured"]["iter_time_ms"] * 1e-3
    yield Run("vtrain", "a100-dgx:eager", workload, mesh, layout, False, micro, seconds, p["tp"], p["gpus"])


def _megatron(row: dict[str, Any]) -> Iterator[Run]:
    m, p = row["model_config"], row["parallelism"]
    if p["pp"] > 1:
        return
    whole = p["recompute"].startswith("full")
    workload = lm.replace(
        **GPT | {"remat": whole}, batch=m["micro_batch"] * p["dp"], length=m["seq"], vocab=51200, layers=m["layers"],
        d_model=m["d_model"], heads=m["heads"], d_head=m["d_model"] // m["heads"], d_ff=4 * m["d_model"],
    )  # fmt: skip
    layout = f"batch:data; {MODEL_AXIS}" + ("" if whole else "; length:model")  # Megatron's sequence parallelism
    mesh, seconds = f"data:{p['dp']} model:{p['tp']}", row["measured"]["iter_time_s"]
    yield Run("megatron", "a100-dgx:eager", workload, mesh, layout, False, 1, seconds, p["tp"], p["gpus"])


def _llm_foundry(row: dict[str, Any]) -> Iterator[Run]:
    m, p, hardware = row["model_config"], row["parallelism"], row["hardware"]
    if p["precision"] == "amp_fp8":
        return  # the bundled model has no products in 8 bits
    workload = lm.replace(
        **GPT | {"remat": p["act_ckpt"] == "True"}, batch=p["micro_batch"] * p["gpus"], length=m["seq"],
        vocab=m["vocab"], layers=m["layers"], d_model=m["d_model"], heads=m["heads"],
        d_head=m["d_model"] // m["heads"], d_ff=m["d_ff"],
    )  # fmt: skip
    machine = "h100:eager" if "H100" in hardware else "a100-dgx-40gb:eager" if "40GB" in hardware else "a100-dgx:eager"
    seconds = p["micro_batch"] * p["grad_accum"] * m["seq"] / row["measured"]["tokens_per_s_per_gpu"]
    on, gpus = f"{machine},triton", p["gpus"]
    yield Run("llm-foundry", on, workload, f"data:{gpus}", "batch:data", True, p["grad_accum"], seconds, 1, gpus)


def _maxtext(row: dict[str, Any]) -> Iterator[Run]:
    m, p = row["model_config"], row["parallelism"]
    tp = 16 if "tensor16" in p["ici"] else 1
    fsdp = int(p["ici"].split()[0].removeprefix("fsdp"))
    chips = fsdp * tp * p["dcn_data"]
    gated, length, vocab = m.get("gated_mlp", False), m.get("seq", 2048), m.get("vocab", 32000)  # MaxText's defaults
    # with tensor parallelism most sums are those of activations, which MaxText keeps in bfloat16
    reduced = "float32" if tp == 1 else "bfloat16"
    workload = lm.replace(
        **LLAMA | {"gated": gated, "reduce_dtype": reduced}, batch=m["per_device_batch"] * chips, length=length,
        vocab=vocab, layers=m["layers"], d_model=m["d_model"], heads=m["heads"], d_head=m["d_head"], d_ff=m["d_ff"],
    )  # fmt: skip
    width = m["heads"] * m["d_head"]
    matrices = m["layers"] * (4 * m["d_model"] * width + (2 + gated) * m["d_model"] * m["d_ff"]) + m["d_model"] * vocab
    attention = 12 * m["layers"] * width * length  # the whole square of scores, see the row's note
    seconds = (6 * matrices + attention) * m["per_device_batch"] * length / (row["measured"]["tflops_per_chip"] * 1e12)
    mesh, layout = f"slice:{p['dcn_data']} data:{fsdp} model:{tp}", f"batch:slice,data; {MODEL_AXIS}"
    chip = "v5e" if row["group"] == "maxtext_v5e" else "v4"
    yield Run("maxtext", f"tpu-{chip}:flash,overlap", workload, mesh, layout, True, 1, seconds, tp, chips)


def _maxtext_h100(row: dict[str, Any]) -> Iterator[Run]:
    m, nodes = row["model_config"], row["parallelism"]["nodes"]
    gpus, length, vocab, each = 8 * nodes, m["seq"], 32000, 4
    workload = lm.replace(
        **LLAMA | {"remat": "products"}, batch=each * gpus, length=length, vocab=vocab,
        layers=m["layers"], d_model=m["d_model"], heads=m["heads"], d_head=m["d_model"] // m["heads"], d_ff=m["d_ff"],
    )  # fmt: skip
    matrices = m["layers"] * (4 * m["d_model"] ** 2 + 3 * m["d_model"] * m["d_ff"]) + m["d_model"] * vocab
    flops = 6 * matrices + 12 * m["layers"] * m["d_model"] * length  # as for TPUs
    seconds = flops * each * length / (row["measured"]["tflops_per_gpu"] * 1e12)
    mesh, layout, group = (
        ("data:8", "batch:data", None) if nodes == 1 else (f"node:{nodes} data:8", "batch:node,data", "data")
    )
    yield Run("maxtext", "h100-a3:flash", workload, mesh, layout, True, 1, seconds, 1, gpus, group)


def _recipe(row: dict[str, Any]) -> Iterator[Run]:
    (name, *words), hardware, measured = row["model_config"]["name"].split(), row["hardware"], row["measured"]
    if name not in SIZES or hardware.startswith("TPU 2"):
        return
    layers, d_model, heads, queries, d_ff, vocab = SIZES[name]
    length = int(next(word for word in words if word.startswith("seq")).removeprefix("seq"))
    chips, chip = (512, "v5p") if "v5p" in hardware else (int(hardware.rpartition("-")[2]), "v6e")
    each = round(measured["tokens_per_s_per_device"] * measured["step_time_s"] / length)
    workload = lm.replace(
        **LLAMA, batch=each * chips, length=length, vocab=vocab, layers=layers, d_model=d_model, heads=heads,
        queries_per_key=queries, d_head=128, d_ff=d_ff,
    )  # fmt: skip
    on, seconds = f"tpu-{chip}:flash,overlap", measured["step_time_s"]
    yield Run("recipes", on, workload, f"data:{chips}", "batch:data", True, 1, seconds, 1, chips)
