"""The names of Mamba's tensors and options in a Hugging Face directory."""

from __future__ import annotations

import meshdsl as md

__all__ = ["HUGGING_FACE"]

_MIXER = "backbone.layers.{layer}.mixer"
_TENSORS = {
    "embed": ("backbone.embeddings.weight", "vocab, model"),
    "layer/norm_1/scale": ("backbone.layers.{layer}.norm.weight", "model"),
    "layer/mixer/w_x": (f"{_MIXER}.in_proj.weight", "0/2 inner, model"),
    "layer/mixer/w_z": (f"{_MIXER}.in_proj.weight", "1/2 inner, model"),
    "layer/mixer/conv/w": (f"{_MIXER}.conv1d.weight", "inner, , length_window"),
    "layer/mixer/conv/b": (f"{_MIXER}.conv1d.bias", "inner"),
    "layer/mixer/w_u": (f"{_MIXER}.x_proj.weight", "parts, inner"),
    "layer/mixer/w_s": (f"{_MIXER}.dt_proj.weight", "inner, rank"),
    "layer/mixer/b_s": (f"{_MIXER}.dt_proj.bias", "inner"),
    "layer/mixer/log_a": (f"{_MIXER}.A_log", "inner, state"),
    "layer/mixer/d": (f"{_MIXER}.D", "inner"),
    "layer/mixer/w_out": (f"{_MIXER}.out_proj.weight", "model, inner"),
    "norm/scale": ("backbone.norm_f.weight", "model"),
    "unembed": ("lm_head.weight", "vocab, model"),
}
HUGGING_FACE = md.HuggingFace(
    _TENSORS,
    {
        "vocab_size": "vocab", "num_hidden_layers": "layers", "hidden_size": "d_model", "state_size": "state",
        "intermediate_size": "inner", "time_step_rank": "rank", "conv_kernel": "kernel",
        "layer_norm_epsilon": "eps", "tie_word_embeddings": "tied",
    },
    fixed={"model_type": "mamba", "hidden_act": "silu", "use_bias": False, "use_conv_bias": True},
    defaults={
        "intermediate_size": lambda hub: hub.size("expand", 2) * hub.size("hidden_size"), "state_size": 16,
        "time_step_rank": lambda hub: -(-hub.size("hidden_size") // 16), "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    base="backbone",
    architecture="MambaForCausalLM",
)  # fmt: skip
