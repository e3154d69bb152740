"""GPT-2: learned positions, layer norm, biases, the tanh form of GELU, and a tied output layer (Radford et al., 2019).

    x = embed[tokens] + positions
    for each layer:  x = x + attention(norm(x));  x = x + gelu(norm(x) w_in + b_in) w_out + b_out
    logits = norm(x) embed;  loss = mean over batch and length of the cross entropy

The layouts are those of models/llama.py. A prompt and the tokens after it have at most `positions` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import meshdsl as md
from meshdsl.models import causal, llama

__all__ = [
    "Config", "LAYOUTS", "gpt2", "gpt2_large", "gpt2_medium", "gpt2_small", "gpt2_xl", "gpt3_175b", "network",
]  # fmt: skip


@dataclass(frozen=True)
class Config(causal.Config):
    """Sizes and options; the defaults fit a laptop."""

    positions: int = 64  # rows of the table of positions, at least `length`


LAYOUTS = llama.LAYOUTS


def network(config: Config) -> tuple[causal.Network, causal.Empty]:
    """The network of models/causal.py, and its empty cache."""
    (_, wide, heads, d_ff, _), precision = config.dims(), config.precision
    head, rows = md.Dim("head", config.d_model // config.heads), md.Dim("position", config.positions)
    attention = causal.Attention(wide, heads, head, precision, biases=True)
    norm = partial(md.nn.layer_norm, over=wide, eps=config.eps, precision=precision)

    def feed_forward(x: md.Tensor) -> md.Tensor:
        with md.scope("feed_forward"):
            y = md.gelu(causal.linear(x, "w_in", [wide], [d_ff], precision, "b_in"))
            return causal.linear(y, "w_out", [d_ff], [wide], precision, "b_out")

    def block(x: md.Tensor, attend: causal.Attend) -> md.Tensor:
        x = x + attend(norm(x, name="norm_1"))
        return x + feed_forward(norm(x, name="norm_2"))

    def place(x: md.Tensor, positions: md.Tensor) -> md.Tensor:
        if any(d.size > rows.size for d in positions.dims if d.name == "length"):
            raise md.ShapeError(f"the table of positions has {rows.size} rows, and the tokens have {positions.dims}")
        table = md.param("positions", [rows, wide], init=md.init.normal(0.01), dtype=precision.param)
        return x + md.cast(md.take(table, positions, rows), x.dtype)

    return causal.stacked(config, attention, block, norm, tied=True, place=place)


TENSORS = {
    "embed": ("transformer.wte.weight", "vocab, model"),
    "positions": ("transformer.wpe.weight", "position, model"),
    "layer/norm_1/scale": ("transformer.h.{layer}.ln_1.weight", "model"),
    "layer/norm_1/bias": ("transformer.h.{layer}.ln_1.bias", "model"),
    "layer/attention/wq": ("transformer.h.{layer}.attn.c_attn.weight", "model, 0/3 heads head"),
    "layer/attention/wk": ("transformer.h.{layer}.attn.c_attn.weight", "model, 1/3 heads head"),
    "layer/attention/wv": ("transformer.h.{layer}.attn.c_attn.weight", "model, 2/3 heads head"),
    "layer/attention/bq": ("transformer.h.{layer}.attn.c_attn.bias", "0/3 heads head"),
    "layer/attention/bk": ("transformer.h.{layer}.attn.c_attn.bias", "1/3 heads head"),
    "layer/attention/bv": ("transformer.h.{layer}.attn.c_attn.bias", "2/3 heads head"),
    "layer/attention/wo": ("transformer.h.{layer}.attn.c_proj.weight", "heads head, model"),
    "layer/attention/bo": ("transformer.h.{layer}.attn.c_proj.bias", "model"),
    "layer/norm_2/scale": ("transformer.h.{layer}.ln_2.weight", "model"),
    "layer/norm_2/bias": ("transformer.h.{layer}.ln_2.bias", "model"),
    "layer/feed_forward/w_in": ("transformer.h.{layer}.mlp.c_fc.weight", "model, d_ff"),
    "layer/feed_forward/b_in": ("transformer.h.{layer}.mlp.c_fc.bias", "d_ff"),
    "layer/feed_forward/w_out": ("transformer.h.{layer}.mlp.c_proj.weight", "d_ff, model"),
    "layer/feed_forward/b_out": ("transformer.h.{layer}.mlp.c_proj.bias", "model"),
    "norm/scale": ("transformer.ln_f.weight", "model"),
    "norm/bias": ("transformer.ln_f.bias", "model"),
}
gpt2 = causal.workload(
    "gpt2",
    Config(),
    network,
    layouts=LAYOUTS,
    hugging_face=md.HuggingFace(
        TENSORS,
        {
            "vocab_size": "vocab", "n_positions": "positions", "n_layer": "layers", "n_embd": "d_model",
            "n_head": "heads", "n_inner": "d_ff", "layer_norm_epsilon": "eps",
        },
        fixed={
            "model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        defaults={"n_inner": lambda hub: 4 * hub.size("n_embd"), "layer_norm_epsilon": 1e-5},
        settings=lambda hub: {"length": min(Config.length, hub.size("n_positions"))},
        base="transformer",
        ignored=("*.attn.bias", "*.attn.masked_bias", "lm_head.weight"),
        architecture="GPT2LMHeadModel",
    ),
)  # fmt: skip
gpt2_small = gpt2.replace(length=1024, positions=1024, vocab=50257, layers=12, d_model=768, heads=12, d_ff=3072)
gpt2_medium = gpt2_small.replace(layers=24, d_model=1024, heads=16, d_ff=4096)
gpt2_large = gpt2_small.replace(layers=36, d_model=1280, heads=20, d_ff=5120)
gpt2_xl = gpt2_small.replace(layers=48, d_model=1600, heads=25, d_ff=6400)
# Brown et al., 2020, table 2.1, with 3.2 million tokens a step; every layer sees all positions, and half of the
# paper's layers only bands of them.
gpt3_175b = gpt2.replace(
    batch=1536, length=2048, positions=2048, vocab=50257, layers=96, d_model=12288, heads=96, d_ff=49152,
    compute_dtype="bfloat16",
)  # fmt: skip
