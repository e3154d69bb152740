"""Writes the references in this folder with `transformers` and `torch`, which are not dependencies of meshdsl.

    python -m venv hf && hf/bin/pip install torch transformers && hf/bin/python tests/models/references/make.py

For each model a folder: `config.json` and the weights as `save_pretrained` writes them, in several files for one model;
`reference.safetensors` with the inputs, the `logits` of the model in float64, `loss`, the mean cross entropy of
`targets`, and the `greedy` tokens of models that generate; and `gradients.safetensors`, the gradient of that loss by
the names of the weights. The weights are random numbers that float32 stores exactly. `origin.json` has the versions.

The inputs are `tokens`, for a model with an encoder also `source`, or `image`. A model with batch norm is in training
for logits, loss and gradients; `evaluated` has its logits with the running statistics, and `after/NAME` the statistics
after the training step.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (torch and transformers are not installed beside meshdsl)

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
TEXT = {"vocab_size": 29, "num_hidden_layers": 2}
LLAMA = {**TEXT, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MIXTRAL = {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
GEMMA = {**LLAMA, "hidden_size": 16, "head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 6}
GEMMA |= {"pad_token_id": None}  # the row of a padding token has no gradient from the embedding
GEMMA_2 = {"num_hidden_layers": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
DEEPSEEK = {
    **TEXT, "num_hidden_layers": 3, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 8,
    "v_head_dim": 3, "moe_intermediate_size": 6, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 0.7,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
VIT = {
    "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20, "image_size": 8,
    "patch_size": 2, "num_labels": 7,
}  # fmt: skip
RESNET = {"embedding_size": 4, "num_labels": 7, "num_channels": 3}
T5 = {
    "vocab_size": 29, "d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
}  # fmt: skip
MODELS = {
    "llama2": (transformers.LlamaForCausalLM, LLAMA | {"head_dim": 4, "rms_norm_eps": 1e-6}),
    "llama3": (
        transformers.LlamaForCausalLM,
        LLAMA | {"head_dim": 8, "rope_parameters": LLAMA_3, "tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3ForCausalLM, LLAMA | {"head_dim": 4}),
    "gemma2": (transformers.Gemma2ForCausalLM, GEMMA | GEMMA_2),
    "gemma3": (transformers.Gemma3ForCausalLM, GEMMA | {"num_hidden_layers": 8, "rope_parameters": GEMMA_3_ROPE}),
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM, DEEPSEEK),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {"vocab_size": 29, "n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16},
    ),
    "mixtral": (transformers.MixtralForCausalLM, LLAMA | MIXTRAL),
    "vit": (transformers.ViTForImageClassification, VIT),
    "resnet_basic": (
        transformers.ResNetForImageClassification,
        RESNET | {"hidden_sizes": [4, 4, 6, 8], "depths": [1, 3, 1, 1], "layer_type": "basic"},
    ),
    "resnet_bottleneck": (
        transformers.ResNetForImageClassification,
        RESNET | {"hidden_sizes": [8, 8, 12, 16], "depths": [2, 1, 1, 1], "layer_type": "bottleneck"},
    ),
    "t5": (transformers.T5ForConditionalGeneration, T5),
    "t5_gated": (
        transformers.T5ForConditionalGeneration,
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1},
    ),
    "mamba": (
        transformers.MambaForCausalLM,
        TEXT | {"hidden_size": 12, "state_size": 4, "time_step_rank": 3},
    ),
}  # fmt: skip
UNTIED = ("t5_gated",)  # with an output layer of its own, as T5 1.1 has it
SHARDED = {"llama2": "6KB"}  # largest file
BATCH, LENGTH, SOURCE, GREEDY = 2, 9, 7, 6
SIZES = {"vit": (8, 8), "resnet": (32, 40)}  # of images


def randomise(model: torch.nn.Module) -> None:
    """Random weights that float32 stores exactly, of about the size that training gives them; norms are not 1.

    Those of Gemma are added to 1.
    """
    one = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            scale = 0.3 if p.ndim > 1 else 0.2
            p.copy_(noise * scale + (one if "norm" in name and name.endswith("weight") and p.ndim == 1 else 0.0))
        for name, b in model.named_buffers():
            if "correction_bias" in name:
                b.copy_(torch.randn(b.shape, generator=generator, dtype=torch.float32) * 0.1)
            if "running" in name:
                noise = torch.randn(b.shape, generator=generator, dtype=torch.float32) * 0.2
                b.copy_(1 + noise.abs() if name.endswith("var") else noise)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """transformers casts norms, softmax and rotary angles to float32, also in a float64 model; here to float64."""
    names, method = ("float32", "float"), torch.Tensor.float
    kept = {name: getattr(torch, name) for name in names}
    try:
        for name in names:
            setattr(torch, name, torch.float64)
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = method
        for name, dtype in kept.items():
            setattr(torch, name, dtype)


def inputs_of(name: str, config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """A batch with its targets."""
    if config.model_type in SIZES:
        images = torch.randn(4, config.num_channels, *SIZES[config.model_type], dtype=torch.float32)
        return {"image": images, "targets": torch.randint(config.num_labels, (4,))}
    tokens, targets = (torch.randint(config.vocab_size, (BATCH, LENGTH)) for _ in range(2))
    if config.is_encoder_decoder:
        return {"source": torch.randint(config.vocab_size, (BATCH, SOURCE)), "tokens": tokens, "targets": targets}
    return {"tokens": tokens, "targets": targets}


def call(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits."""
    if "image" in batch:
        return model(pixel_values=batch["image"].double()).logits
    if "source" in batch:
        return model(input_ids=batch["source"], decoder_input_ids=batch["tokens"]).logits
    return model(input_ids=batch["tokens"], use_cache=False).logits


def greedy(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The likeliest tokens after each prompt, one after the other; of a decoder, after its start token."""
    tokens = torch.zeros(BATCH, 1, dtype=torch.int64) if "source" in batch else batch["tokens"]
    for _ in range(GREEDY):
        tokens = torch.cat([tokens, call(model, batch | {"tokens": tokens})[:, -1:].argmax(-1)], 1)
    return tokens[:, -GREEDY:]


def made(name: str) -> torch.nn.Module:
    kind, sizes = MODELS[name]
    config = kind.config_class(**sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config)
    if name in UNTIED:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def save(model: torch.nn.Module, folder: Path, **options: str) -> None:
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)


def save_gradients(model: torch.nn.Module, file: Path) -> None:
    """The gradients as a file of the weights' names: those of `save_pretrained`, which may differ from the module's."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for p in model.parameters():
            p.copy_(p.grad)
        for b in model.buffers():
            b.zero_()
        save(model, Path(folder))
        shutil.copy(Path(folder) / "model.safetensors", file)


def write(name: str) -> None:
    torch.manual_seed(0)
    stored = made(name)
    config = stored.config
    randomise(stored)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    save(stored, folder, max_shard_size=SHARDED.get(name, "1GB"))
    batch = inputs_of(name, config)
    results = {}
    with in_float64():
        model = made(name).double().eval()
        model.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in stored.state_dict().items()})
        norms = any("running" in name for name, _ in model.named_buffers())
        if norms:
            results["evaluated"] = call(model, batch).detach()
            model.train()
        logits = call(model, batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())
        loss.backward()
        results |= {f"after/{k}": v.clone() for k, v in model.named_buffers() if "running" in k}
        if "tokens" in batch:
            results["greedy"] = greedy(model, batch).int()
        save_gradients(model, folder / "gradients.safetensors")
    results |= {"logits": logits.detach(), "loss": loss.detach()}
    results |= {k: v if v.is_floating_point() else v.int() for k, v in batch.items()}
    save_file({k: v.contiguous() for k, v in results.items()}, folder / "reference.safetensors")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "model": type(model).__name__}
    (folder / "origin.json").write_text(json.dumps({"made by": "tests/models/references/make.py", **versions}) + "\n")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        write(chosen)
        print(chosen, sum(f.stat().st_size for f in (HERE / chosen).iterdir()), "bytes")
