"""Flip bits in the files of a step at a URL: `python -m tests.checkpoint.flips [--cases 400]`.

So many in the file `meta`, and as many in each other file. A step is refused, or restored as it was saved.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
from collections import Counter
from pathlib import Path

import meshdsl as md

STEP = "step-00000001"


def flips(folder: Path, cases: int, seed: int = 0, pattern: str = "**/*") -> dict[str, Counter[str]]:
    """For each file of a saved step, how often it was refused, restored as it was, and restored differently."""
    rng, found = random.Random(seed), dict[str, Counter[str]]()
    w, v = md.random.normal(md.random.key(0), "io:64 hidden:32"), md.random.normal(md.random.key(1), "hidden:32")
    config, url = {"rate": 0.5}, f"file://{folder}/run"
    with md.Checkpoints(url, keep=None) as checkpoints:
        checkpoints.save(1, {"w": w, "v": v}, config=config, data={"batch": 7}, key=md.random.key(3))
        checkpoints.wait()
        for path in sorted((folder / "run" / STEP).glob(pattern)):
            if path.is_file() and (raw := path.read_bytes()):
                counts = found[str(path.relative_to(folder / "run" / STEP))] = Counter()
                for _ in range(cases):
                    damaged = bytearray(raw)
                    damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                    path.write_bytes(damaged)
                    counts[_outcome(checkpoints, {"w": w, "v": v}, config)] += 1
                path.write_bytes(raw)
    return found


def _outcome(checkpoints: md.Checkpoints, tree: dict[str, md.Tensor], config: object) -> str:
    try:
        again = checkpoints.restore(1)
    except md.CheckpointError:
        return "refused"
    same = all(again.tree[path].numpy().tobytes() == x.numpy().tobytes() for path, x in tree.items())
    key = again.key is not None and (again.key.numpy() == md.random.key(3).numpy()).all()
    return "same" if same and key and (again.config, again.data) == (config, {"batch": 7}) else "different"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # Orbax's own, of each damaged file
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for file, counts in flips(Path(folder), options.cases, options.seed).items():
            print(json.dumps({"file": file, **counts}), flush=True)
            total += counts
    print(json.dumps({"files": "all", **total}), flush=True)
    return int(total["different"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
