"""Writes the references in this folder with `transformers` and `torch`, which are not dependencies of meshdsl.

    python -m venv hf && hf/bin/pip install torch transformers && hf/bin/python tests/models/references/make.py

For each model a folder: `config.json` and the weights as `save_pretrained` writes them, in several files for one model;
`reference.safetensors` with `tokens` (or `pixels`), the `logits` of the model in float64, and `loss`, the mean cross
entropy of `targets`; and `gradients.safetensors`, the gradient of that loss by the names of the weights. The weights
are random numbers that float32 stores exactly. `origin.json` has the versions.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (torch and transformers are not installed beside meshdsl)

from __future__ import annotations

import contextlib
import json
import shutil
import sys
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
MODELS = {
    "llama2": (transformers.LlamaConfig, LLAMA | {"head_dim": 4, "rms_norm_eps": 1e-6}),
    "llama3": (
        transformers.LlamaConfig,
        LLAMA | {"head_dim": 8, "rope_parameters": LLAMA_3, "tie_word_embeddings": True},
    ),
    "gpt2": (transformers.GPT2Config, {"vocab_size": 29, "n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16}),
}  # fmt: skip
SHARDED = {"llama2": "6KB"}  # largest file
LENGTH = 9


def randomise(model: torch.nn.Module) -> None:
    """Random weights that float32 stores exactly, of about the size that training gives them; norms are not 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            scale = 0.3 if p.ndim > 1 else 0.2
            p.copy_(noise * scale + (1.0 if "norm" in name and name.endswith("weight") and p.ndim == 1 else 0.0))


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


def write(name: str) -> None:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = kind(**sizes)
    config._attn_implementation = "eager"
    stored = transformers.AutoModelForCausalLM.from_config(config)
    randomise(stored)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    stored.save_pretrained(folder, max_shard_size=SHARDED.get(name, "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens, targets = (torch.randint(config.vocab_size, (2, LENGTH)) for _ in range(2))
    with in_float64():
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        model.load_state_dict({k: v.double() for k, v in stored.state_dict().items()})
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), targets.reshape(-1))
        loss.backward()
        greedy = tokens
        for _ in range(6):
            greedy = torch.cat([greedy, model(input_ids=greedy).logits[:, -1:].argmax(-1)], 1)
    ids = {"tokens": tokens.int(), "targets": targets.int(), "greedy": greedy[:, LENGTH:].int()}
    results = {"logits": logits.detach(), "loss": loss.detach()}
    save_file({k: v.contiguous() for k, v in (ids | results).items()}, folder / "reference.safetensors")
    grads = {k: p.grad.contiguous() for k, p in model.named_parameters()}
    save_file(grads, folder / "gradients.safetensors")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "model": type(model).__name__}
    (folder / "origin.json").write_text(json.dumps({"made by": "tests/models/references/make.py", **versions}) + "\n")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        write(chosen)
        print(chosen, sum(f.stat().st_size for f in (HERE / chosen).iterdir()), "bytes")
