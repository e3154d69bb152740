"""Imported JAX models beside the bundled ones: python -m benchmarks.imported [NAME ...] [--tpu | --times]

The losses of `benchmarks/handwritten/twins.py` by `md.from_jax`, and the bundled models of the same sizes, each with
its gradient. Prints a JSON line for each model, size and layout: the bytes that one device sends. `--tpu` (extra `aot`,
no TPU) compiles both for eight v5e chips, and prints cycles and peak memory as `tpu_cycles` does, then ratios of the
imported one to the bundled one. `--times` prints the processor seconds that the imports of Llama 3 8B, with a scan over
its layers, and of a GPT-2 with 80 layers in a Python loop take. A NAME is a part of a line's name, as "llama small".
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import meshdsl as md
from benchmarks.handwritten import twins
from benchmarks.handwritten.twins import Sizes
from benchmarks.tpu_cycles import chips, compare, ours
from meshdsl.models.gpt2 import gpt2
from meshdsl.models.llama import llama

SIZES = {
    "small": Sizes(16, 256, 4096, 2, 512, 1024, 8, 4, 64),
    "large": Sizes(16, 512, 8192, 4, 1024, 2816, 16, 8, 64),
}
MODEL = "batch:rows; d_ff:cols; heads:cols; vocab:cols"
LAYOUTS = {
    "data": ("rows:8", "batch:rows"),
    "model": ("rows:2 cols:4", MODEL),
    "sequence": ("rows:4 cols:2", f"{MODEL}; length:cols"),
    "fsdp": ("rows:8", "batch:rows; d_ff:rows; vocab:rows"),
}
COMPILED = ("data", "model")  # by the TPU compiler
LLAMA3_8B = Sizes(512, 8192, 128256, 32, 4096, 14336, 32, 8, 128)
DEEP = SIZES["small"]._replace(layers=80)
Step = tuple[Callable[..., Any], tuple[Any, ...]]  # a gradient, and the types of its arguments


class Twin(NamedTuple):
    """A loss in plain JAX, its parameters, names of some axes, and the bundled model."""

    loss: Callable[..., Any]
    params: Callable[..., Any]
    names: dict[str, str]
    bundled: md.Workload
    sizes: Callable[[Sizes], dict[str, Any]]  # of the bundled model

    def imported(self, sizes: Sizes) -> md.Imported:
        tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length), "int32")
        loss = functools.partial(self.loss, d_head=sizes.d_head)
        return md.from_jax(loss, self.params(sizes, twins.spec), tokens, tokens, names=self.names, prefer=twins.PREFER)

    def gradients(self, sizes: Sizes) -> tuple[Step, Step]:
        """Of the imported loss, and of the bundled model."""
        m = self.imported(sizes)
        common = {name: n for name, n in sizes._asdict().items() if name not in ("heads", "groups", "d_head")}
        hand = self.bundled.replace(**common, **self.sizes(sizes))
        params, _, batch = hand.specs()
        return (md.value_and_grad(m), m.specs), (md.value_and_grad(hand.loss(hand.config)), (params, batch))


TWINS = {
    "llama": Twin(
        twins.llama, twins.llama_params, twins.LLAMA_NAMES, llama,
        lambda n: {"query_heads": n.heads, "heads": n.groups, "d_head": n.d_head, "remat": True},
    ),
    "gpt2": Twin(
        twins.gpt2, twins.gpt2_params, twins.GPT2_NAMES, gpt2, lambda n: {"heads": n.heads, "positions": n.length}
    ),
}  # fmt: skip


def sent(step: Step, mesh: str, layout: str) -> int:
    """The bytes that one device sends."""
    f, specs = step
    return round(sum(each.wire_bytes * each.count for each in md.compile(f, mesh, layout).program(*specs).collectives))


def print_times() -> None:
    for name, model, sizes in (("llama3_8b scanned", "llama", LLAMA3_8B), ("gpt2 80 layers", "gpt2", DEEP)):
        start = time.process_time()
        TWINS[model].imported(sizes)
        line = {"figure": "import_time", "workload": name, "processor_s": round(time.process_time() - start, 2)}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--tpu", action="store_true", help="compile for TPUs")
    parser.add_argument("--times", action="store_true", help="only the times of imports")
    parser.add_argument("--text", metavar="DIRECTORY", help="with --tpu: write the compiler's texts there")
    args = parser.parse_args()
    if args.times:
        return print_times()
    on = chips() if args.tpu else []
    for model, size, layout in ((m, s, at) for s in SIZES for m in TWINS for at in (COMPILED if args.tpu else LAYOUTS)):
        name = f"{model} {size} {layout}"
        if args.names and not any(part in name for part in args.names):
            continue
        steps = dict(zip(("meshdsl", "bundled"), TWINS[model].gradients(SIZES[size]), strict=True))
        if args.tpu:
            make = {k: functools.partial(ours, md.compile(f, *LAYOUTS[layout]), at, on) for k, (f, at) in steps.items()}
            compare(name, make, args.text)
        else:
            bytes_sent = {k: sent(step, *LAYOUTS[layout]) for k, step in steps.items()}
            ratio = round(bytes_sent["meshdsl"] / bytes_sent["bundled"], 4)
            print(json.dumps({"figure": "imported", "workload": name, **bytes_sent, "ratio": ratio}), flush=True)
    return None


if __name__ == "__main__":
    main()
