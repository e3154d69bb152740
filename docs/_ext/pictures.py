"""The pictures in docs/images that `md.show` makes. `python docs/_ext/pictures.py` writes them; a test compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from papers import curve, papers, predictions

import meshdsl as md
from benchmarks.case_study import DATA
from meshdsl.cost.report.charts import lanes, memory_over_time, time_bars
from meshdsl.cost.report.html import STYLE
from meshdsl.models.llama import llama
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm

__all__ = ["FOLDER", "charts", "pictures"]

FOLDER = ROOT / "docs" / "images"
MESH = "rows:2 cols:4"
A100 = "a100-p4de"

# name: the dims of a tensor, its layout or sharding, the mesh
TENSORS: dict[str, tuple[str, Any, str]] = {
    "two_dims": ("batch:64 io:32", "batch:rows; io:cols", MESH),
    "copies": ("io:32 hidden:16", "batch:rows; hidden:cols", MESH),
    "two_axes": ("batch:64 io:32", "batch:rows,cols", MESH),
    "partial": ("batch:64 hidden:16", md.Sharding.of({"batch": ("rows",)}, partial=("cols",)), MESH),
    "match": ("batch:64 hidden:16", "batch:rows; hidden:cols", MESH),
    "new_dim": ("batch:8 vocab:32", "batch:rows; vocab:cols", MESH),
    "padded": ("batch:10 io:32", "batch:rows", "rows:4"),
}

X, W = md.spec("batch:64 io:32"), md.spec("io:32 hidden:16")


def contract(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.einsum(x, w, out="batch hidden")


def two_sums(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> md.Tensor:
    return md.einsum(x, w, out="batch hidden") + md.einsum(x, v, out="batch hidden")


def rename(x: md.Tensor) -> md.Tensor:
    return md.rename(x, length="memory")


def cumsum(x: md.Tensor) -> md.Tensor:
    return md.cumsum(x, "batch")


def prefer(x: md.Tensor, gate: md.Tensor) -> md.Tensor:
    return md.prefer(md.einsum(x, gate, out="group expert"), "expert")


def loop(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    def add(total: md.Tensor, part: md.Tensor) -> tuple[md.Tensor, None]:
        return total + md.einsum(part, w, out="batch hidden"), None

    return md.scan(add, md.zeros("batch:64 hidden:16"), x, over="chunk")[0]


def energy(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.local(lambda x, w: md.sum(md.square(x * w), "batch io"), x, w, out="", whole="io")


def reshard(x: md.Tensor) -> md.Tensor:
    return md.shard(x, {"io": "rows"})


def scatter(h: md.Tensor, v: md.Tensor) -> md.Tensor:
    return md.einsum(md.prefer(h, "d_ff"), v, out="length model")


def flatten(x: md.Tensor) -> md.Tensor:
    return md.flatten(x, "batch length", "token")


def shift(x: md.Tensor) -> md.Tensor:
    return md.shift(x, "batch", 1)


def sort(x: md.Tensor) -> md.Tensor:
    return md.sort(x, "batch")


def ring(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
    return md.attention(q, k, v, method="ring")


@md.model
def experts(x: md.Tensor) -> md.Tensor:
    expert, hidden = md.dims("expert:8 expert_hidden:64")
    return x + md.nn.moe_layer(x, expert, hidden, router="gshard", dispatch="index")[0]


def take(table: md.Tensor, ids: md.Tensor) -> md.Tensor:
    return md.take(table, ids, "vocab")


# a function, its layout, the mesh, the specs of its arguments
PROGRAMS: list[tuple[Callable[..., md.Tensor], str, str, tuple[Any, ...]]] = [
    (two_sums, "io:cols", MESH, (X, W, W)),
    (rename, "length:rows", MESH, (md.spec("length:8 head:4"),)),
    (cumsum, "batch:rows", "rows:4", (md.spec("batch:64 io:4"),)),
    (prefer, "expert:cols; group:cols", MESH, (md.spec("group:16 model:4"), md.spec("model:4 expert:8"))),
    (loop, "batch:rows; io:cols", MESH, (md.spec("chunk:4 batch:64 io:32"), W)),
    (energy, "batch:rows; io:cols", MESH, (md.spec("batch:8 io:4"), md.spec("io:4"))),
    (reshard, "batch:rows", MESH, (X,)),
    (contract, "batch:rows; io:cols", MESH, (X, W)),
    (scatter, "length:cols; d_ff:cols", MESH, (md.spec("length:8 d_ff:16"), md.spec("d_ff:16 model:4"))),
    (flatten, "length:rows", MESH, (md.spec("batch:4 length:6 model:8"),)),
    (shift, "batch:rows", "rows:4", (md.spec("batch:64 io:4"),)),
    (sort, "batch:rows; io:cols", MESH, (X,)),
    (take, "batch:rows; vocab:cols", MESH, (md.spec("vocab:32 model:8"), md.spec("batch:4", "int32"))),
]


def pictures() -> dict[str, str]:
    """The SVG text of every picture, by file name."""
    drawn = {f"{name}.svg": md.show(md.spec(dims), layout, mesh) for name, (dims, layout, mesh) in TENSORS.items()}
    for function, layout, mesh, specs in PROGRAMS:
        drawn[f"{function.__name__}.svg"] = md.show(md.compile(function, mesh, layout).program(*specs))
    x, attended = md.spec("batch:8 length:32 model:16"), md.spec("length:64 heads:4 head:8")
    moe = md.compile(lambda params, x: experts(params, x), "rows:4", "batch:rows; expert:rows")
    drawn["experts.svg"] = md.show(moe.program(experts.specs(x), x))
    drawn["ring.svg"] = md.show(md.compile(ring, "context:4", "length:context").program(*(attended,) * 3))
    deep = llama.replace(layers=8)
    piped = md.compile(deep.train_step(), "stages:4 rows:2", "layer:stages; batch:rows", microbatches=8)
    drawn["pipeline.svg"] = md.show(piped.program(*deep.specs()), most=3)
    sharded = md.compile(mlp.train_step(), "rows:8", "batch:rows", weight_update="sharded")
    drawn["sharded_update.svg"] = md.show(sharded.program(*mlp.specs()))
    mesh, layout = mlp.layouts["data_model"]
    drawn["step.svg"] = md.show(md.compile(mlp.train_step(), mesh, layout).program(*mlp.specs()))
    return {name: picture.svg + "\n" for name, picture in drawn.items()}


def two_layer_step(params: dict[str, md.Tensor], x: md.Tensor) -> tuple[dict[str, md.Tensor], md.Tensor]:
    def loss(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
        return md.mean(md.square(md.dot(md.relu(md.dot(x, params["w"], "io")), params["v"], "hidden")))

    value, grads = md.value_and_grad(loss)(params, x)
    return {name: p - 0.1 * grads[name] for name, p in params.items()}, value


def charts() -> dict[str, str]:
    """Charts of reports, by file name. No test compares them: they change with every figure of the cost model."""
    sizes = {"batch": 128, "length": 2048, "vocab": 32000, "layers": 24, "d_model": 2048, "d_ff": 8192}
    model = lm.replace(**sizes, heads=16, d_head=128, remat=True, compute_dtype="bfloat16")
    named = {"data": "batch:rows,cols", "data_model": "batch:rows; vocab:cols; d_ff:cols; heads:cols"}
    step = model.train_step()
    reports = {
        name: md.compile(step, "rows:4 cols:4", layout, donate=(0, 1)).cost(*model.specs(), machine="tpu-v5e")
        for name, layout in named.items()
    }
    most = max(report.peak_bytes for report in reports.values())
    drawn = {f"cost_memory_{name}.svg": memory_over_time(report, 920, most) for name, report in reports.items()}
    specs = {"w": md.spec("io:4096 hidden:8192"), "v": md.spec("hidden:8192 out:4096")}, md.spec("batch:8192 io:4096")
    for mode in ("none", "list"):
        compiled = md.compile(
            two_layer_step, "rows:8", "batch:rows", overlap=mode, machine=None if mode == "none" else A100
        )
        drawn[f"lanes_{mode}.svg"] = lanes(compiled.cost(*specs, machine=A100), 0.0048)
    return {"cost_time.svg": _alone(time_bars(reports))} | {name: _alone(svg) for name, svg in drawn.items()}


def case_study() -> dict[str, str]:
    """Times of the recipe and of the plan found, by file name, from the data of `benchmarks.case_study`."""
    drawn: dict[str, str] = {}
    for name, row in json.loads(DATA.read_text(encoding="utf-8")).items():
        published = row["published_seconds"] or 0.0
        bars: dict[str, Any] = {}
        for which in ("recipe", "found"):
            cost, seconds = row[which], row[which]["seconds"]
            interval = [seconds * end / row["recipe"]["seconds"] for end in row["recipe"]["interval"]]
            bars[which] = SimpleNamespace(
                seconds=seconds, parts=cost["parts"], interval=interval, lower_bound=published * (which == "recipe")
            )
        drawn[f"case_{name.replace('-', '_')}.svg"] = _alone(time_bars(bars, "published"))
    return drawn


def _alone(svg: str) -> str:
    """A chart of a report as a file of its own: with the style of the report's page."""
    font = "svg { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }"
    width, height = svg.split('viewBox="0 0 ')[1].split('"')[0].split()
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return svg.replace("<svg", start, 1).replace(">", f"><style>{STYLE}{font}</style>", 1) + "\n"


def measured(lines: Path, runs: Sequence[Path]) -> dict[str, str]:
    """The scatter of `python -m benchmarks.ground --points`, and the curve of `meshdsl train --json` of two runs."""
    points = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    losses: list[dict[int, float]] = []
    for file in runs:
        events = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        losses.append({event["step"]: event["loss"] for event in events if event["event"] == "step"})
    whole, before, after = losses
    named = {"rows:8, 120 steps": whole, "rows:8, then rows:2 cols:4": before | after}
    drawn = {
        "measured.svg": predictions(points),
        "resumed.svg": curve(named, (max(before), "resumed on rows:2 cols:4")),
    }
    return {name: _alone(svg) for name, svg in drawn.items()}


def tuned(lines: Path) -> dict[str, str]:
    """The curves of `python -m benchmarks.fine_tuning`: bits per byte of each run, in training and held out."""
    runs: dict[str, dict[int, float]] = {}
    for point in map(json.loads, lines.read_text(encoding="utf-8").splitlines()):
        runs.setdefault(f"{point['run']}, {point['split']}", {})[point["step"]] = point["bits_per_byte"]
    return {"fine_tuning.svg": _alone(curve(dict(sorted(runs.items())), unit="bits per byte"))}


if __name__ == "__main__":
    every = pictures() | charts() | case_study()
    every |= {name: _alone(svg) for name, svg in papers(ROOT / "docs" / "figures.json").items()}
    if sys.argv[1:2] == ["--tuned"]:
        every = tuned(Path(sys.argv[2]))
    elif len(sys.argv) > 1:  # what was measured elsewhere: points, a whole run, and a run in two parts
        file, *runs = map(Path, sys.argv[1:])
        every |= measured(file, runs)
    for name, svg in every.items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
