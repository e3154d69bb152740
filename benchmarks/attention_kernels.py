"""Attention by the TPU compiler: python -m benchmarks.attention_kernels [--chips v5e v5p] [--lengths 4096 32768]

Needs the extra `aot`, but no TPU. Compiles a causal attention with its gradient (16 heads of 128,
bfloat16) for four chips, unsplit and split, by the plain formula, block by block, and by the Pallas kernels. Prints a
JSON line for each:

* `cycles`: the compiler's estimate for one device, without communication. It has none for a Pallas kernel, and counts
  blocks that a causal mask skips as computed.
* `kernel_cycles`: for Pallas kernels, the instructions (bundles) that the compiler schedules for a pair of blocks,
  times the pairs that a device computes, forward and backward. Waiting for memory is not in them.
* `peak_mb`: the compiler's peak memory of one device, beside the predicted one; it is left out if the program does not
  fit, with the bytes that it `needs`.

`--shipped` prints the bundles of JAX's own splash attention instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import meshdsl as md

HEADS, HEAD, DEVICES = 16, 128, 4
TOPOLOGIES = {"v5e": "tpu:v5e:2x2", "v5p": "tpu:v5p:2x2x1", "v6e": "tpu:v6e:2x2"}
CASES = {  # layout, method, kernel
    "plain unsplit": ("", "plain", "auto"),
    "blockwise unsplit": ("", "auto", "blockwise"),
    "pallas unsplit": ("", "auto", "pallas"),
    "plain heads": ("heads:x", "plain", "auto"),
    "blockwise heads": ("heads:x", "auto", "blockwise"),
    "pallas heads": ("heads:x", "auto", "pallas"),
    "blockwise ring": ("length:x", "ring", "blockwise"),
    "pallas ring": ("length:x", "ring", "pallas"),
    "pallas all_to_all": ("length:x", "all_to_all", "pallas"),
}


@contextmanager
def dumped() -> Iterator[Path]:
    """A folder into which the compiler's child process writes the schedules of kernels."""
    before = os.environ.get("LIBTPU_INIT_ARGS")
    with tempfile.TemporaryDirectory() as folder:
        flags = ("to=" + folder, "llo_text=true", "llo_pass_label_regex=.*final.*")
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{flag}" for flag in flags)
        try:
            yield Path(folder)
        finally:
            os.environ.pop("LIBTPU_INIT_ARGS")
            os.environ.update({} if before is None else {"LIBTPU_INIT_ARGS": before})


def scheduled(folder: Path, names: str) -> dict[str, int]:
    """Bundles of the longest stretch without a branch of each kernel: the computation of a pair of blocks."""
    cycles: dict[str, int] = {}
    for file in folder.glob("*final_bundles.txt"):
        name = re.search(rf"-({names})\w*[.\d]*-\d+-final_bundles", file.name)
        if name is None:
            continue
        at = [0]
        for line in file.read_text(encoding="utf-8").splitlines():
            address = re.match(r"\s*(0x[0-9a-f]+)\s", line)
            if address and "sbr.rel" in line:
                at.append(int(address.group(1), 16))
        longest = max((b - a for a, b in itertools.pairwise(at)), default=0)
        cycles[name.group(1)] = max(longest, cycles.get(name.group(1), 0))
    return cycles


def attend(method: str) -> Any:
    def total(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
        return md.sum(md.cast(md.attention(q, k, v, causal=True, method=method), "float32"))

    return md.grad(total, (0, 1, 2))


def pairs(length: int, block: int, heads: int) -> int:
    """Pairs of blocks that a device computes for these heads, under a causal mask."""
    n = length // block
    return heads * n * (n + 1) // 2


def line(chip: str, length: int, name: str) -> dict[str, Any]:
    layout, method, kernel = CASES[name]
    x = md.spec(f"batch:1 length:{length} heads:{HEADS} head:{HEAD}", "bfloat16")
    step = md.compile(attend(method), "x:4", layout, attention_kernel=kernel)
    with dumped() if kernel == "pallas" else nullcontext(Path()) as folder:
        compilation = md.compile_for(TOPOLOGIES[chip], step.program(x, x, x))
        bundles = scheduled(folder, "attention_forward|attention_backward") if kernel == "pallas" else {}
    row: dict[str, Any] = {"figure": "tpu_compiler", "chip": chip, "length": length, "case": name}
    row |= {"cycles": compilation.cycles} if compilation.cycles else {}
    row["predicted_mb"] = step.cost(x, x, x, machine=f"tpu-{chip}").peak_bytes / 1e6
    row |= {"peak_mb": compilation.memory.peak / 1e6} if compilation.memory else {"needs": compilation.needed}
    if bundles:
        # a ring in zigzag order computes as many pairs of positions on each of four devices as heads split over them
        size = min(512, length // (2 * DEVICES)) if method == "ring" else 512
        ways = 1 if not layout else DEVICES
        count = pairs(length, size, HEADS) / ways
        row |= {"bundles": bundles, "kernel_cycles": math.ceil(sum(bundles.values()) * count)}
    return row


def shipped(chip: str, length: int) -> Mapping[str, Any]:
    """Bundles for a pair of blocks of JAX's splash attention, whose sizes are those of our kernels."""
    topology = TOPOLOGIES[chip].removeprefix("tpu:")
    with dumped() as folder:
        command = [sys.executable, "-m", "benchmarks.shipped_attention", topology, str(length), str(HEAD)]
        subprocess.run(command, check=True)
        bundles = scheduled(folder, "splash_mha_fwd_residuals|splash_mha_dkv")
    return {"figure": "shipped", "chip": chip, "length": length, "kernel": "splash", "bundles": bundles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v5p"], choices=TOPOLOGIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 32768])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--shipped", action="store_true", help="JAX's splash attention, in place of the cases")
    args = parser.parse_args()
    for chip in args.chips:
        for length in args.lengths:
            if args.shipped:
                print(json.dumps(shipped(chip, length)), flush=True)
                continue
            for name in args.cases:
                print(json.dumps(line(chip, length, name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
