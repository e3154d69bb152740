"""The table of DeepSeek-V3: names of tensors, and keys of config.json."""

from __future__ import annotations

from typing import Any

import meshdsl as md
from meshdsl.models import llama, rotary

__all__ = ["HUGGING_FACE"]

_ATTENTION = {
    "wq_down": ("q_a_proj", "query_latent, model"), "norm_q/scale": ("q_a_layernorm", "query_latent"),
    "wq": ("q_b_proj", "heads head, query_latent"), "wkv_down": ("kv_a_proj_with_mqa", "latent, model"),
    "norm_kv/scale": ("kv_a_layernorm", "latent"), "wkv": ("kv_b_proj", "heads key_value, latent"),
    "wo": ("o_proj", "model, heads value"),
}  # fmt: skip
_PARTS = {
    "w_gate": ("gate_proj", "d_ff, model"),
    "w_in": ("up_proj", "d_ff, model"),
    "w_out": ("down_proj", "model, d_ff"),
}
_EXPERTS = {"wi_gate": _PARTS["w_gate"], "wi": _PARTS["w_in"], "wo": _PARTS["w_out"]}
_BIAS = "gate.e_score_correction_bias"


def tensors(config: Any) -> dict[str, tuple[str, str]]:
    """The lines of the table: the layers of both loops, and what surrounds them."""
    lines = {path: line for path, line in llama.TENSORS.items() if "layer/" not in path}
    for path, name in {"dense": "{dense}", "layer": f"{{layer+{config.dense_layers}}}"}.items():
        name = f"model.layers.{name}"
        lines[f"{path}/norm_1/scale"] = f"{name}.input_layernorm.weight", "model"
        lines[f"{path}/norm_2/scale"] = f"{name}.post_attention_layernorm.weight", "model"
        parts = {"attention": ("self_attn", _ATTENTION)}
        if path == "dense":
            parts |= {"feed_forward": ("mlp", _PARTS)}
        else:
            expert = "{node node_expert}" if config.nodes else "{expert}"
            parts |= {"shared": ("mlp.shared_experts", _PARTS), "moe": (f"mlp.experts.{expert}", _EXPERTS)}
            lines["layer/moe/gate"] = f"{name}.mlp.gate.weight", "gate, model"
            lines["layer/moe/gate_bias"] = f"{name}.mlp.{_BIAS}", "gate"
        for ours, (theirs, table) in parts.items():
            lines |= {f"{path}/{ours}/{key}": (f"{name}.{theirs}.{t}.weight", axes) for key, (t, axes) in table.items()}
    return lines


def settings(hub: md.HubConfig) -> dict[str, Any]:
    """The rotary positions; keys that follow from others, and those of training and of the second token."""
    hub.only("num_key_value_heads", hub.size("num_attention_heads"))
    hub.only("qk_head_dim", hub.size("qk_nope_head_dim") + hub.size("qk_rope_head_dim"))
    hub.only("head_dim", hub.size("qk_rope_head_dim"))
    for key in ("num_nextn_predict_layers", "ep_size", "aux_loss_alpha", "seq_aux", "auto_map"):
        hub.values.pop(key, None)
    return rotary.settings(hub, "yarn")


HUGGING_FACE = md.HuggingFace(
    tensors,
    {
        "vocab_size": "vocab", "num_hidden_layers": "layers", "first_k_dense_replace": "dense_layers",
        "hidden_size": "d_model", "num_attention_heads": "heads", "intermediate_size": "d_ff", "rms_norm_eps": "eps",
        "q_lora_rank": "query_latent", "kv_lora_rank": "latent", "qk_nope_head_dim": "d_head",
        "qk_rope_head_dim": "d_rotary", "v_head_dim": "d_value", "moe_intermediate_size": "d_expert",
        "n_routed_experts": "experts", "n_shared_experts": "shared", "num_experts_per_tok": "chosen",
        "n_group": "groups", "topk_group": "best_groups", "routed_scaling_factor": "scale",
    },
    fixed={
        "model_type": "deepseek_v3", "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "norm_topk_prob": True, "rope_interleave": True, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    settings=settings,
    config=lambda config: {**rotary.to_hub(config), "num_key_value_heads": config.heads},
    base="model",
    ignored=("model.layers.61.*",),  # of the published model, which predicts the second token
    architecture="DeepseekV3ForCausalLM",
)  # fmt: skip
