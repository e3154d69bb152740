"""Fine-tuning by the commands of docs/fine_tuning.md: python -m benchmarks.fine_tuning FOLDER

A small Llama learns the source files of Python's standard library, and is exported. Imported again, it is tuned on the
library's prose: all weights, and adapters alone. Prints a JSON line for each loss in bits per byte; `python
docs/_ext/pictures.py --tuned FILE` draws them. Takes six minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from meshdsl.train.data import corpus

VOCAB, MEAN_OF = 1024, 10
SIZES = {"vocab": VOCAB, "batch": 8, "length": 128, "layers": 4, "d_model": 128, "query_heads": 4, "heads": 2,
         "d_head": 32, "d_ff": 352}  # fmt: skip
TUNED = """import meshdsl as md
from meshdsl.models.llama import llama

tuned = md.nn.lora(llama, rank=16, match="*/w*")
"""


def prepare() -> None:
    """Write the texts, a tokenizer of the sources, and the model with adapters."""
    Path("base").mkdir()
    for kind in ("source", "prose"):
        texts = [d.text.decode("utf-8", "replace") for d in corpus().documents if d.kind == kind]
        Path(f"{kind}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        if kind == "source":
            tokenizer = ByteLevelBPETokenizer()
            tokenizer.train_from_iterator(texts, VOCAB, show_progress=False, special_tokens=["</s>"])
            tokenizer.save("base/tokenizer.json")
    Path("tuned.py").write_text(TUNED)


def run(*words: str) -> list[dict[str, object]]:
    """The JSON lines of a command of meshdsl."""
    print("$ meshdsl", *words, file=sys.stderr, flush=True)
    out = subprocess.run([sys.executable, "-m", "meshdsl", *words, "--json"], stdout=subprocess.PIPE, check=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def points(name: str, records: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Bits per byte of the held-out share, and of every ten training steps, of a run."""
    steps = {int(str(r["step"])): float(str(r["loss"])) for r in records if r["event"] == "step"}
    evaluated = [(int(str(r["step"])), float(str(r["bits_per_byte"])), float(str(r["loss"]))) for r in records
                 if r["event"] == "eval"]  # fmt: skip
    per_loss = evaluated[-1][1] / evaluated[-1][2]
    for first in range(1, max(steps), MEAN_OF):
        mean = math.fsum(steps[n] for n in range(first, first + MEAN_OF)) / MEAN_OF
        yield {"run": name, "split": "training", "step": first + MEAN_OF // 2, "bits_per_byte": mean * per_loss}
    for step, bits, _ in evaluated:
        yield {"run": name, "split": "held out", "step": step, "bits_per_byte": bits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the texts, the base and the runs")
    parser.add_argument("--steps", type=int, default=200, help="of each tuning; of the base, twice as many")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    os.chdir(options.folder)
    prepare()
    sizes = [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]
    text = ("--data", "source.jsonl", "--tokenizer", "base", "--set", "learning_rate=2e-3")
    run("train", "llama", *text, *sizes, "--steps", str(2 * options.steps), "--checkpoints", "learned")
    run("export", "learned", "hf:weights", "--model", "llama")
    shutil.copytree("weights", "base", dirs_exist_ok=True)
    for name, model, rate in (("all weights", "llama", "5e-4"), ("adapters", "tuned.py:tuned", "2e-3")):
        folder = name.replace(" ", "_")
        run("import", "hf:base", "--model", model, "--out", folder)
        data = ("--data", "prose.jsonl", "--held-out", "0.2", "--eval-every", "20")
        batch = ("--set", "batch=8", "--set", "length=128", "--set", f"learning_rate={rate}")
        records = run("train", model, "--config", f"{folder}/config.toml", *data, *batch, "--steps", str(options.steps))
        for point in points(name, records):
            print(json.dumps(point), flush=True)
        run("export", folder, f"hf:tuned_{folder}", "--model", model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
