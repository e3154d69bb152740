"""The train steps whose predicted memory is compared with the TPU compiler's, by the part of the evidence they are.

The fusion model was developed on FITTED. KNOWN were compiled later, and are known to the model's authors: the rules
for long sequences, experts and loops were written with them. EARLIER and TESTED were predicted before they were
compiled. The rules for softmaxes and loops are newer than EARLIER, and the newest ones (combined sums, the order of
backward loops) were chosen with all parts in view.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import meshdsl as md
from meshdsl.models import gpt_moe, mlp, moe_transformer, resnet, transformer

__all__ = ["EARLIER", "FITTED", "KNOWN", "PARTS", "TESTED", "Point"]


class Point(NamedTuple):
    """A train step under a plan, and the chips it is compiled for."""

    workload: md.Workload
    plan: md.Plan
    topology: str


MLP = mlp.mlp.replace(batch=32768, io=4096, hidden=16384)
LM = transformer.lm.replace(
    layers=4, d_model=1024, heads=8, d_head=128, d_ff=4096, vocab=8192, batch=32, length=1024, compute_dtype="bfloat16"
)
WIDE = LM.replace(layers=2, vocab=32768, batch=64, length=512)
MODERN = LM.replace(norm="rms", gated=True, positions="rotary", batch=128, remat=True)
LONG = LM.replace(layers=2, length=4096, batch=8, remat=True)
PLAIN = LONG.replace(attention="plain")
GQA = LONG.replace(heads=2, queries_per_key=4, norm="rms", gated=True, positions="rotary")
SHORT = resnet.resnet50.replace(blocks=(1, 1, 1, 1), batch=256)
EXPERTS = moe_transformer.moe.replace(
    experts=16, layers=2, d_model=512, heads=8, d_head=64, d_ff=2048, expert_hidden=2048, vocab=8192, source=512,
    length=512, batch=64, compute_dtype="bfloat16",
)  # fmt: skip
SWITCH = gpt_moe.gpt_moe.replace(
    experts=16, layers=4, d_model=512, heads=8, d_head=64, d_ff=2048, expert_hidden=2048, vocab=8192, length=1024,
    batch=32, compute_dtype="bfloat16",
)  # fmt: skip
SMALL = LM.replace(layers=6, d_model=768, heads=6, d_ff=3072, batch=48, length=512)
LAYOUTS = {**transformer.LAYOUTS, "16": ("rows:4 cols:4", transformer.LAYOUTS["sequence"][1])}
LAYOUTS |= {"context": ("rows:2 cols:4", "batch:rows; length:cols")}
EXPERT_LAYOUTS = moe_transformer.LAYOUTS
REGATHER = md.WeightUpdate("sharded", regather=True)


def _point(chips: str, workload: md.Workload, at: tuple[str, str], **knobs: Any) -> Point:
    return Point(workload, md.Plan(*at, **knobs), f"tpu:{chips}")


FITTED = {
    "mlp data": _point("v5e:2x4", MLP, mlp.LAYOUTS["data"]),
    "mlp model": _point("v5e:2x4", MLP, mlp.LAYOUTS["model"]),
    "mlp three_d": _point("v4:2x2x1", MLP, mlp.LAYOUTS["three_d"]),
    "mlp io": _point("v5e:2x4", MLP.replace(batch=8192, io=8192), ("all:8", "io:all")),
    "lm data_model": _point("v5e:2x4", LM, LAYOUTS["data_model"]),
    "lm data_model, batch 64": _point("v5e:2x4", LM.replace(batch=64), LAYOUTS["data_model"]),
    "lm data_model, 8 layers": _point("v5e:2x4", LM.replace(layers=8), LAYOUTS["data_model"]),
    "lm data_model, remat": _point("v5e:2x4", LM.replace(remat=True), LAYOUTS["data_model"]),
    "lm wide data": _point("v5e:2x4", WIDE, LAYOUTS["data"]),
    "lm wide sequence": _point("v5e:2x4", WIDE, LAYOUTS["sequence"]),
}
KNOWN = {
    "mlp data_model": _point("v5p:2x2x2", MLP.replace(batch=65536), mlp.LAYOUTS["data_model"]),
    "mlp 16 devices": _point("v5e:4x4", MLP, ("rows:4 cols:4", "batch:rows; hidden:cols")),
    "lm float32": _point("v6e:2x4", LM.replace(compute_dtype="float32"), LAYOUTS["data_model"]),
    "lm modern": _point("v5p:2x2x2", MODERN.replace(batch=32, remat=False), LAYOUTS["data_model"]),
    "lm modern data": _point("v5p:2x2x2", MODERN, LAYOUTS["data"]),
    "lm model": _point("v5e:2x4", LM.replace(batch=16), LAYOUTS["model"]),
    "lm collectives kept, 16 devices": _point("v5e:4x4", LM.replace(remat="collectives", batch=64), LAYOUTS["16"]),
    "lm bfloat16 parameters": _point("v4:2x2x1", WIDE.replace(param_dtype="bfloat16"), LAYOUTS["data_model"]),
    "lm heads of 64": _point("v6e:2x4", LM.replace(heads=16, d_head=64), LAYOUTS["sequence"]),
    "resnet data": _point("v5e:2x4", SHORT, resnet.LAYOUTS["data"]),
    "4096 data": _point("v5e:2x4", LONG, LAYOUTS["data"]),
    "4096 plain, data": _point("v5e:2x4", PLAIN, LAYOUTS["data"]),
    "4096 grouped queries, data_model": _point("v5p:2x2x2", GQA.replace(batch=16), LAYOUTS["data_model"]),
    "4096 context": _point("v5e:2x4", LONG, LAYOUTS["context"]),
    "8192 data": _point("v5e:2x4", LONG.replace(length=8192), LAYOUTS["data"]),
    "16 experts": _point("v5e:2x4", EXPERTS, EXPERT_LAYOUTS["experts"]),
    "switch 16 experts, model": _point("v5e:2x4", SWITCH, EXPERT_LAYOUTS["experts_model"]),
    "lm 4 micro-batches": _point("v5e:2x4", LM.replace(batch=64), LAYOUTS["data_model"], microbatches=4),
    "lm sharded update": _point("v5e:2x4", LM, LAYOUTS["data"], weight_update="sharded"),
    "lm regather": _point("v5e:2x4", LM.replace(remat=True), LAYOUTS["data"], weight_update=REGATHER),
}
EARLIER = {
    "4096 plain, grouped queries, regather": _point(
        "v6e:2x4", GQA.replace(attention="plain"), LAYOUTS["data"], weight_update=REGATHER
    ),
    "4096 plain, data_model, no remat": _point("v5p:2x2x2", PLAIN.replace(remat=False), LAYOUTS["data_model"]),
    "4096 sequence": _point("v4:2x2x1", LONG, LAYOUTS["sequence"]),
    "4096 grouped queries, 4 micro-batches": _point("v5e:2x4", GQA.replace(batch=32), LAYOUTS["data"], microbatches=4),
    "8192 data_model": _point("v6e:2x4", LONG.replace(length=8192, batch=8), LAYOUTS["data_model"]),
    "8192 context, grouped queries": _point("v5p:2x2x2", GQA.replace(length=8192), LAYOUTS["context"]),
    "8192 no remat": _point("v4:2x2x1", LONG.replace(length=8192, remat=False), LAYOUTS["data"]),
    "2048 plain, data": _point("v5e:2x4", LM.replace(layers=2, length=2048, batch=16), LAYOUTS["data"]),
    "16 experts, data": _point("v5p:2x2x2", EXPERTS, EXPERT_LAYOUTS["data"]),
    "16 experts, sequence": _point("v6e:2x4", EXPERTS, EXPERT_LAYOUTS["sequence"]),
    "switch 16 experts, length 2048": _point(
        "v5p:2x2x2", SWITCH.replace(length=2048, batch=16), EXPERT_LAYOUTS["experts"]
    ),
    "switch 16 experts, batch 64": _point("v4:2x2x1", SWITCH.replace(batch=64), EXPERT_LAYOUTS["experts"]),
    "lm modern, 8 micro-batches": _point("v6e:2x4", MODERN.replace(remat=False), LAYOUTS["data_model"], microbatches=8),
    "lm modern regather, 2 micro-batches": _point(
        "v5p:2x2x2", MODERN.replace(batch=64), LAYOUTS["data"], weight_update=REGATHER, microbatches=2
    ),
    "lm wide sharded update": _point("v4:2x2x1", WIDE, LAYOUTS["data_model"], weight_update="sharded"),
    "lm 768 sharded update": _point("v5e:2x4", SMALL, LAYOUTS["data"], weight_update="sharded"),
    "lm 768 modern regather": _point(
        "v6e:2x4", SMALL.replace(norm="rms", gated=True, remat=True), LAYOUTS["data"], weight_update=REGATHER
    ),
    "lm 12 layers, 2048, remat": _point(
        "v4:2x2x1", LM.replace(layers=12, length=2048, batch=16, remat=True), LAYOUTS["data_model"]
    ),
    "lm 1536 model": _point(
        "v6e:2x4", LM.replace(layers=3, d_model=1536, heads=16, d_ff=6144, batch=16), LAYOUTS["model"]
    ),
    "4096 plain, grouped queries, data_model": _point(
        "v5p:2x2x2", GQA.replace(attention="plain", batch=16), LAYOUTS["data_model"]
    ),
    "switch 8 layers, length 512": _point("v5e:2x4", SWITCH.replace(layers=8, length=512), EXPERT_LAYOUTS["experts"]),
    "4096 blockwise": _point("v5e:2x4", LONG, LAYOUTS["data"], attention_kernel="blockwise"),
    "8192 blockwise": _point("v6e:2x4", LONG.replace(length=8192), LAYOUTS["data"], attention_kernel="blockwise"),
    "32768 data": _point("v5e:2x4", LONG.replace(length=32768), LAYOUTS["data"]),
    "32768 context": _point("v5p:2x2x2", LONG.replace(length=32768), LAYOUTS["context"]),
}
TESTED = {
    "lm tied": _point("v5e:2x4", LM.replace(layers=6, tied=True, batch=64), LAYOUTS["data"]),
    "lm modern tied, heads of 64, remat": _point(
        "v6e:2x4", MODERN.replace(tied=True, heads=16, d_head=64, batch=64), LAYOUTS["data_model"]
    ),
    "lm one key head, regather": _point(
        "v5p:2x2x2", LM.replace(heads=1, queries_per_key=8, gated=True), LAYOUTS["data"], weight_update=REGATHER
    ),
    "2048 products kept": _point(
        "v4:2x2x1", LM.replace(layers=3, length=2048, batch=16, remat="products"), LAYOUTS["data_model"]
    ),
    "4096 grouped queries, sequence": _point("v5e:2x4", GQA.replace(heads=4, gated=False), LAYOUTS["sequence"]),
    "switch 6 layers, length 256": _point(
        "v6e:2x4", SWITCH.replace(layers=6, length=256, batch=128), EXPERT_LAYOUTS["data"]
    ),
}
PARTS = {"fitted": FITTED, "known": KNOWN, "earlier": EARLIER, "tested": TESTED}
