"""Charts of measured figures beside ours: published runs, papers, and a training curve; see `pictures.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshdsl.cost.report.svg import (
    axis,
    decades,
    element,
    label_width,
    legend,
    linear,
    logarithmic,
    picture,
    steps,
    text,
)
from meshdsl.errors.units import seconds

WIDTH = 920
PAPER, OURS = ("part-2", "the paper"), ("part-0", "ours")
Bar = tuple[str, float]  # its class and length


def bars(
    title: str, entries: Sequence[tuple[str, str]], rows: Mapping[str, Sequence[Bar]], unit: str, stacked: bool = False
) -> str:
    """A row of bars for each label, one below the other or, `stacked`, one after the other."""
    left, right = label_width(rows) + 20, WIDTH - 90
    most = max((sum if stacked else max)(n for _, n in row) for row in rows.values())
    scale = linear(0, most, left, right)
    legend_svg, y = legend(entries, 8, 2, WIDTH - 8)
    y += 10
    top, drawn = y, list[str]()
    for label, row in rows.items():
        lines = 1 if stacked else len(row)
        drawn.append(text(left - 10, y + 8.5 * lines + 4, label, anchor="end", cls="label"))
        done = 0.0
        for cls, n in row:
            start, wide = scale(done), scale(n) - scale(0)
            drawn.append(element("rect", tip=f"{label}: {n:g} {unit}", x=start, y=y, width=wide, height=15, cls=cls))
            if not stacked:
                drawn.append(text(start + wide + 6, y + 12, f"{n:g}", cls="label"))
                y += 17
            done += n if stacked else 0
        if stacked:
            drawn.append(text(scale(done) + 6, y + 12, f"{done:.1f}", cls="label"))
            y += 17
        y += 9
    return picture(
        WIDTH, y + 26, title, legend_svg, axis("bottom", scale, steps(most), lambda n: f"{n:g} {unit}", y, top), *drawn
    )


def predictions(points: Sequence[dict[str, Any]]) -> str:
    """Predicted over measured seconds of published runs, on logarithmic axes, one colour a source."""
    sources = list(dict.fromkeys(point["source"] for point in points))
    times = [point[which] for point in points for which in ("measured", "predicted")]
    low, high = min(times) / 1.3, max(times) * 1.3
    left, right = 70, 620
    entries = [(f"held-{i}", f"{name}, {sum(p['source'] == name for p in points)}") for i, name in enumerate(sources)]
    legend_svg, top = legend(entries, left, 2, right - left)
    top, bottom = top + 20, top + 20 + right - left
    x, y = logarithmic(low, high, left, right), logarithmic(low, high, bottom, top)
    drawn = [
        legend_svg,
        axis("bottom", x, decades(low, high), seconds, bottom, top),
        axis("left", y, decades(low, high), seconds, left, right),
        text((left + right) / 2, bottom + 34, "measured time of a step", anchor="middle", cls="label"),
        text(left, top - 2, "predicted", cls="label"),
    ]
    for factor, cls in ((1.0, "roof"), (1.1, "grid"), (1 / 1.1, "grid")):
        ends = (max(low, low / factor), min(high, high / factor))
        (x1, y1), (x2, y2) = ((x(n), y(n * factor)) for n in ends)
        drawn.append(element("line", tip=f"{factor - 1:+.0%}", x1=x1, x2=x2, y1=y1, y2=y2, cls=cls))
    for point in points:
        measured, predicted = point["measured"], point["predicted"]
        times_of = f"{seconds(measured)} measured, {seconds(predicted)} predicted, {predicted / measured - 1:+.0%}"
        tip = f"{point['source']}, {point['machine']}: {point['name']}; {times_of}"
        cls = f"held-{sources.index(point['source'])}"
        drawn.append(element("circle", tip=tip, cx=x(measured), cy=y(predicted), r=3, cls=cls))
    return picture(right + 16, bottom + 42, "predicted and measured step times", *drawn)


def curve(runs: Mapping[str, Mapping[int, float]], mark: tuple[int, str] | None = None, unit: str = "") -> str:
    """Losses over steps, points of one colour for each run, and a mark at one step."""
    left, right, bottom = 60, WIDTH - 16, 260
    colours = ("part-0", "held-4") if len(runs) < 3 else ("part-0", "held-5", "part-3", "held-4")
    entries = [*zip(colours, runs, strict=False)]
    legend_svg, top = legend(entries, left, 2, right - left)
    last, high = (
        max(n for run in runs.values() for n in run),
        max(loss for run in runs.values() for loss in run.values()),
    )
    low = math.floor(min(loss for run in runs.values() for loss in run.values()))
    x, y = linear(0, last, left, right), linear(low, math.ceil(high), bottom, top + 8)
    drawn = [
        legend_svg,
        axis("bottom", x, steps(last, 8), lambda n: f"{n:g}", bottom, top + 8),
        axis("left", y, [*range(low, math.ceil(high) + 1)], lambda n: f"{n:g}", left, right),
        text((left + right) / 2, bottom + 32, "step", anchor="middle", cls="label"),
        text(right - 4, top + 22, unit, anchor="end", cls="label halo"),
    ]
    if mark is not None:
        drawn.append(element("line", x1=x(mark[0]), x2=x(mark[0]), y1=top + 8, y2=bottom, cls="peak"))
        drawn.append(text(x(mark[0]) + 6, top + 20, mark[1], cls="strong halo"))
    for i, ((cls, _), run) in enumerate(zip(entries, runs.values(), strict=True)):
        for n, loss in run.items():
            tip = f"step {n}: {loss:.4f}"
            drawn.append(element("circle", tip=tip, cx=x(n), cy=y(loss), r=3.4 - 1.6 * (i % 2), cls=cls))
    return picture(WIDTH, bottom + 40, "training curve", *drawn)


def papers(file: Path) -> dict[str, str]:
    """Figures of the papers beside ours, from `docs/figures.json`, by file name."""
    figures: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))

    def ours(key: str) -> float:
        return float(figures[key].replace(",", "").rstrip("%"))

    paper, own = PAPER[0], OURS[0]
    drawn = {
        "gshard_7": bars(
            "memory of GShard's models",
            [("held-0", "weights"), ("held-3", "activations"), ("held-4", "temporary")],
            {
                f"{experts:,} experts, {layers} layers": [
                    (cls, ours(f"gshard.{experts}.{layers}.{part}"))
                    for cls, part in (("held-0", "weights"), ("held-3", "activations"), ("held-4", "temporary"))
                ]
                for experts, layers in ((128, 12), (512, 36), (2048, 36), (2048, 60))
                if f"gshard.{experts}.{layers}.weights" in figures
            },
            "GB",
            stacked=True,
        ),
        "gshard_8": bars(
            "growth from 128 to 2,048 experts, and shares of a layer's time",
            [PAPER, OURS],
            {
                f"all_to_all in the time of a layer, {n:,} experts": [
                    (paper, published), (own, ours(f"layer_parts.einsum.true.{n}.all_to_all"))
                ]
                for n, published in ((128, 16.0), (2048, 36.0))
            },
            "%",
        ),
        "gshard_9": bars(
            "growth of times",
            [PAPER, OURS],
            {
                "figure 8, a layer, 128 to 2,048 experts": [(paper, 1.7), (own, ours("layer.einsum.true.growth"))],
                "figure 8, its all_to_alls": [(paper, 3.75), (own, ours("layer.einsum.true.all_to_all"))],
                "figure 9, all_reduce, 16 to 2,048": [(paper, 1.0), (own, ours("communication.true.8.all_reduce"))],
                "figure 9, all_to_all": [(paper, 9.0), (own, ours("communication.true.8.all_to_all"))],
            },
            "times",
        ),
        "update_11": bars(
            "step times without and with sharded updates",
            [PAPER, ("part-0", "ours, replicated"), ("part-1", "ours, sharded")],
            {
                **{
                    f"Transformer, 2,048 cores: {which}": [
                        (paper, published),
                        (cls, ours(f"updates.transformer_2_048_cores.{which}")),
                    ]
                    for which, cls, published in (("replicated", "part-0", 46.5), ("sharded", "part-1", 25.6))
                },
                **{
                    name: [("part-0", ours(f"updates.{key}.replicated")), ("part-1", ours(f"updates.{key}.sharded"))]
                    for name, key in (
                        ("ResNet-50, 2,048 cores", "resnet_50_2_048_cores"),
                        ("Transformer, 32 cores", "transformer_32_cores"),
                        ("NCF, 32 cores", "ncf_32_cores"),
                    )
                },
            },
            "ms",
        ),
        "update_12": bars(
            "peak memory at 32 cores",
            [("part-0", "ours, replicated"), ("part-1", "ours, sharded")],
            {
                name: [
                    ("part-0", ours(f"updates.{key}_32_cores.peak_replicated")),
                    ("part-1", ours(f"updates.{key}_32_cores.peak_sharded")),
                ]
                for name, key in (("ResNet-50", "resnet_50"), ("Transformer", "transformer"), ("NCF", "ncf"))
            },
            "MB",
        ),
        "lancet_11_12": bars(
            "speedups, 16 GPUs",
            [("part-2", "the paper, at most"), ("part-0", '"lancet", S and L'), ("part-1", '"halves", S and L')],
            {
                f"{name}, {chip}": [
                    (paper, published),
                    *(
                        (cls, ours(f"lancet.{size}.{machine}.16.{gate}.{mode}.speedup"))
                        for cls, mode in (("part-0", "lancet"), ("part-1", "halves"))
                        for size in "sl"
                    ),
                ]
                for name, chip, machine, gate, published in (
                    ("figure 11, Switch gate", "A100", "a100_p4de", "switch", 1.21),
                    ("figure 11, Switch gate", "V100", "v100_p3dn", "switch", 1.3),
                    ("figure 12, batch-prioritised", "A100", "a100_p4de", "batch_prioritised", 1.24),
                    ("figure 12, batch-prioritised", "V100", "v100_p3dn", "batch_prioritised", 1.24),
                )
            },
            "times",
        ),
        "lancet_13": bars(
            "reduction of exposed communication, 32 GPUs",
            [("part-2", "the paper, at most"), ("part-0", '"lancet", S and L'), ("part-1", '"halves", S and L')],
            {
                f"figure 13, {chip}": [
                    (paper, published),
                    *(
                        (cls, -ours(f"one_group.{size}.{machine}.32.switch.{mode}.change"))
                        for cls, mode in (("part-0", "lancet"), ("part-1", "halves"))
                        for size in "sl"
                    ),
                ]
                for chip, machine, published in (("A100", "a100_p4de", 69.0), ("V100", "v100_p3dn", 83.0))
            },
            "%",
        ),
        "lancet_16": bars(
            "ablation, 32 GPUs",
            [("part-0", "weight gradients alone"), ("part-1", "ranges alone"), ("part-3", "both")],
            {
                f"{size.upper()}, {chip}": [
                    (cls, ours(f"one_group.{size}.{machine}.32.switch.{mode}.speedup"))
                    for cls, mode in (("part-0", "dw"), ("part-1", "partition"), ("part-3", "lancet"))
                ]
                for chip, machine in (("A100", "a100_p4de"), ("V100", "v100_p3dn"))
                for size in "sl"
            },
            "times",
        ),
    }  # fmt: skip
    return {f"{name}.svg": svg for name, svg in drawn.items()}
