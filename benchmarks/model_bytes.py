"""Bytes of models under their layouts, beside what a person would send: python -m benchmarks.model_bytes [--json]

What one device sends for a loss and its gradient in float32, by rings; from the compiled program, nothing runs. Over n
devices, an all-gather, a reduce-scatter or an all_to_all of Y bytes sends (n - 1) / n Y, and an all-reduce twice that.
b is a device's part of the batch, and X = 4 b length d_model bytes. The formulas are those of hand-written layers:

- model, data_model (Megatron): all-reduces of X: 4 a layer (6 in T5's decoder, 2 in Mamba), 1 for each embedding and
  for the output layer (ViT: of 4 b d_model for the latter), 1 a layer for the gradient of what T5's decoder reads from
  its encoder, 2 a layer of 4 b length (rank + 2 state) in Mamba, and 3 of 4 b length for the loss.
- sequence: a reduce-scatter and an all-gather for each all-reduce of X; and all-gathers of X for the inputs of products
  again in the backward pass: 2 a layer (3 in T5's decoder, 1 in Mamba) and 1 for the output layer.
- context: in each layer (n - 1) / n of a block of q, k, v and the result, or n - 1 blocks of k and v if that is less;
  as much for their gradients. In Mamba, kernel - 1 positions of `inner` to a neighbour, and n - 1 states and decays.
- expert: 4 all_to_alls a layer of the slots (dispatch "index"), 4 b length experts d_model bytes, since no token is
  dropped.
- all: an all-reduce of the gradient of each parameter, as large as its shard, over the devices that have it too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import meshdsl as md

SIZES: dict[str, dict[str, Any]] = {  # which the axes divide
    "llama": {"query_heads": 16, "heads": 8, "d_head": 8, "vocab": 64},
    "gpt2": {"heads": 8, "vocab": 64},
    "mixtral": {"query_heads": 16, "heads": 8, "d_head": 8, "vocab": 64},
    "t5": {"heads": 8, "d_head": 8, "vocab": 64},
    "mamba": {"vocab": 64},
    "vit": {"heads": 8, "classes": 16},
}
LAYOUTS = ("model", "data_model", "sequence", "context", "expert", "expert_model")


@dataclass(frozen=True)
class Case:
    """A workload under one of its layouts; the properties are the numbers of the formulas."""

    model: str
    layout: str
    workload: md.Workload

    @property
    def axes(self) -> dict[str, int]:
        return dict(md.Mesh(self.workload.layouts[self.layout][0]).axes)

    @property
    def rules(self) -> dict[str, tuple[str, ...]]:
        return {d: tuple(axes) for d, axes in md.Layout(self.workload.layouts[self.layout][1]).rules.items()}

    @property
    def config(self) -> Any:
        return self.workload.config

    @property
    def batch(self) -> int:
        return self.config.batch // math.prod(self.axes[a] for a in self.rules.get("batch", ()))

    @property
    def lengths(self) -> list[int]:
        """The positions of the sequences: T5's decoder and encoder."""
        if self.model == "vit":
            return [(self.config.size // self.config.patch) ** 2 + 1]
        return [self.config.length, *([self.config.source] if self.model == "t5" else [])]

    @property
    def layers(self) -> list[int]:
        return [self.config.decoder_layers, self.config.layers] if self.model == "t5" else [self.config.layers]

    def x(self, i: int = 0) -> int:
        """X of the sequence i."""
        return 4 * self.batch * self.lengths[i] * self.config.d_model


def cases() -> Iterator[Case]:
    for name, sizes in SIZES.items():
        workload = getattr(importlib.import_module(f"models.{name}"), name).replace(**sizes)
        for layout in (each for each in LAYOUTS if each in workload.layouts):
            slots = {"dispatch": "index"} if "expert" in layout else {}
            yield Case(name, layout, workload.replace(**slots))


def sent(case: Case) -> int:
    """Bytes that one device sends, of the compiled program."""
    params, _, batch = case.workload.specs()
    step = md.compile(md.grad(case.workload.loss(case.config)), *case.workload.layouts[case.layout])
    return round(sum(record.wire_bytes * record.count for record in step.program(params, batch).collectives))


def share(n: int, size: float) -> float:
    """The bytes that a device sends in an all-gather, a reduce-scatter or an all_to_all."""
    return size * (n - 1) / n


def by_hand(case: Case) -> float:
    """The formula of the module's docstring."""
    total = gradients(case)
    if "model" in case.layout or case.layout == "sequence":
        total += megatron(case)
    if "expert" in case.layout:
        slots = case.x() * case.config.experts
        total += 4 * case.config.layers * share(case.axes["rows"], slots)
    return total + (context(case) if case.layout == "context" else 0)


def gradients(case: Case) -> float:
    """All-reduces of gradients over the devices that share a shard and do not compute the same."""
    total = 0.0
    for spec in case.workload.specs()[0].values():
        split = {a for d in spec.dims for a in case.rules.get(d.name, ())}
        apart = {a for d in ("batch", "length") for a in case.rules.get(d, ())} - split
        size = 4 * math.prod(d.size for d in spec.dims) / math.prod(case.axes[a] for a in split)
        total += 2 * share(math.prod(case.axes[a] for a in apart), size)
    return total


def megatron(case: Case) -> float:
    """All-reduces, or pairs of a reduce-scatter and an all-gather, and all-gathers in the backward pass."""
    config, n = case.config, case.axes["cols"]
    per_layer = {"t5": (6, 4), "mamba": (2,)}.get(case.model, (4,))
    again = {"t5": (3, 2), "mamba": (1,)}.get(case.model, (2,))
    reduced = sum(k * layers * case.x(i) for i, (k, layers) in enumerate(zip(per_layer, case.layers, strict=True)))
    gathered = sum(k * layers * case.x(i) for i, (k, layers) in enumerate(zip(again, case.layers, strict=True)))
    if case.model == "vit":
        reduced += 4 * case.batch * config.d_model
    else:
        reduced, gathered = reduced + sum(map(case.x, range(len(case.lengths)))) + case.x(), gathered + case.x()
    if case.model == "t5":
        reduced += config.decoder_layers * case.x(1)
    small = 3 * 4 * case.batch * (1 if case.model == "vit" else case.lengths[0])
    if case.model == "mamba":
        small += 2 * config.layers * 4 * case.batch * config.length * (config.rank + 2 * config.state)
    return 2 * share(n, reduced + small) + (share(n, gathered) if case.layout == "sequence" else 0)


def context(case: Case) -> float:
    """The bytes that attention sends, or the scan of Mamba."""
    config, n = case.config, case.axes["ring"]
    if case.model == "mamba":
        states = 2 * (n - 1) * 4 * case.batch * config.inner * config.state
        return 2 * config.layers * (4 * case.batch * (config.kernel - 1) * config.inner + states)
    head = getattr(config, "d_head", config.d_model // config.heads)
    wide, narrow = getattr(config, "query_heads", config.heads) * head, config.heads * head
    pairs = [(0, 0), (0, 1), (1, 1)] if case.model == "t5" else [(0, 0)]
    total = 0.0
    for q, k in pairs:
        block = [4 * case.batch * length / n for length in case.lengths]
        swapped = share(n, 2 * block[q] * wide + 2 * block[k] * narrow)
        ring = (n - 1) * 2 * block[k] * narrow
        total += 2 * case.layers[min(q, len(case.layers) - 1)] * min(swapped, ring)
    return total


def main() -> None:
    """Print a row for each model and layout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines")
    options = parser.parse_args()
    if not options.json:
        print(f"{'model':8} {'layout':13} {'sent':>9} {'by hand':>9} {'ratio':>6}")
    for case in cases():
        ours, theirs = sent(case), round(by_hand(case))
        if options.json:
            row = {"model": case.model, "layout": case.layout, "sent": ours, "by_hand": theirs}
            print(json.dumps({"benchmark": "model_bytes", **row, "ratio": round(ours / theirs, 3)}))
        else:
            print(f"{case.model:8} {case.layout:13} {ours:9,} {theirs:9,} {ours / theirs:6.3f}", flush=True)


if __name__ == "__main__":
    main()
