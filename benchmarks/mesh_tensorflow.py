"""The models of Mesh-TensorFlow's tables 2 and 3, and its claim of section 9: python -m benchmarks.mesh_tensorflow

Shazeer et al., 2018: six layers, and a vocabulary of 32,768, which makes the published numbers of parameters. Our
translation model embeds the source with the table of the target, as the last row of table 3; the others have a table
of the source's own, which is added. A JSON line for each size has the parameters beside the paper's; the last line is
the predicted share of the peak of 512 cores of TPU v2 in a training step of the largest language model. Nothing is run.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax

import meshdsl as md
from meshdsl.models import seq2seq, transformer

# the feed-forward size, heads, size of a head, and the paper's parameters in billions
TABLE_2 = [(4096 << i, 4 << i, 256, b) for i, b in enumerate((0.14, 0.22, 0.37, 0.67, 1.28, 2.48, 4.90))]
TABLE_3 = [(2048 << i, 4 << i, 128, b) for i, b in enumerate((0.15, 0.24, 0.42, 0.77, 1.48, 2.89))]
TABLE_3.append((4096, 16, 64, 0.21))
COMMON: dict[str, Any] = {"layers": 6, "d_model": 1024, "vocab": 32768, "batch": 256}
MESH = "rows:16 cols:32"


def sized(workload: md.Workload, d_ff: int, heads: int, d_head: int) -> md.Workload:
    return workload.replace(**COMMON, d_ff=d_ff, heads=heads, d_head=d_head)


def parameters(workload: md.Workload) -> int:
    """The number of weights; nothing is computed."""
    shapes = md.eval_shape(workload.init, md.random.key(0))[0]
    return sum(math.prod(d.size for d in x.dims) for x in jax.tree_util.tree_leaves(shapes))


def main() -> None:
    models = {2: (transformer.lm.replace(length=256), TABLE_2), 3: (seq2seq.seq2seq, TABLE_3)}
    for table, (workload, rows) in models.items():
        for d_ff, heads, d_head, paper in rows:
            count = parameters(sized(workload, d_ff, heads, d_head))
            if table == 3 and d_head == 128:
                count += COMMON["vocab"] * COMMON["d_model"]
            row = {"figure": "mesh_tensorflow", "table": table, "d_ff": d_ff, "d_head": d_head, "parameters": count}
            print(json.dumps({**row, "billions": count / 1e9, "paper": paper}), flush=True)
    largest = sized(models[2][0].replace(compute_dtype="bfloat16"), *TABLE_2[-1][:3])
    step = md.compile(largest.train_step(), MESH, transformer.LAYOUTS["data_model"][1], donate=(0, 1))
    report = step.cost(*largest.specs(), machine="tpu-v2")
    share = {"seconds": report.seconds, "peak_share": report.utilisation, "peak_gb": report.peak_bytes / 1e9}
    print(json.dumps({"figure": "mesh_tensorflow", "section": 9, **share}))


if __name__ == "__main__":
    main()
