"""The numbers that pages of the documentation show: python -m benchmarks.figures [GROUP ...] [--lines FILE]

A group is a benchmark that prints JSON lines. Its numbers go, as text, into `docs/figures.json`, and from there into
the pages, between `<!--KEY-->` and `<!--/-->`. Without a group, only the pages are written again. `--lines FILE` takes
lines that the benchmark of one group printed before.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
FILE = DOCS / "figures.json"
MARK = re.compile(r"<!--([\w.]+)-->(.*?)<!--/-->")


class Group(NamedTuple):
    """A command, and formats of a row: its key, and its numbers. A row without one of the fields has no such number."""

    command: str
    key: str
    numbers: dict[str, str]


TIMES = {"step": "{step_ms:.1f}", "exposed": "{exposed_ms:.1f}", "peak": "{peak_gb:.2f}"}
OVERLAP = TIMES | {"speedup": "{speedup:.2f}", "change": "{exposed_change:.0%}", "planning": "{planning_cpu_s:.0f}"}
GROUPS = {
    "dense": Group("benchmarks.overlap_dense", "{case}.{overlap}", TIMES),
    "lancet": Group(
        "benchmarks.overlap --machines a100-p4de v100-p3dn --routers switch batch_prioritised",
        "{size}.{machine}.{devices}.{router}.{overlap}",
        OVERLAP,
    ),
    "one_group": Group(
        "benchmarks.overlap --one-group --machines a100-p4de v100-p3dn --routers switch batch_prioritised "
        "--devices 16 32 64",
        "{size}.{machine}.{devices}.{router}.{overlap}",
        OVERLAP,
    ),
    "ragged_steps": Group(
        "benchmarks.overlap --one-group --exchange ragged --sizes S --machines a100-p4de v100-p3dn --modes none",
        "{size}.{machine}",
        {"step": "{step_ms:.1f}"},
    ),
    "family": Group("benchmarks.overlap_family --layers 12 36", "{layers}.{overlap}", TIMES),
    "gshard": Group(
        "benchmarks.moe_family parameters steps",
        "{experts}.{layers}",
        {
            "parameters": "{parameters:,}", "rate": "{steps_a_second:.2f}", "peak": "{peak_gigabytes:.1f}",
            "weights": "{weights_gigabytes:.1f}", "activations": "{activations_gigabytes:.1f}",
            "temporary": "{temporary_gigabytes:.1f}", "days": "{days:.1f}", "core_years": "{core_years:.1f}",
            "billions": "{billions:,.1f}", "millions": "{millions_on_a_device:,.0f}",
        },
    ),
    "gshard_batch": Group(
        "benchmarks.moe_family batch",
        "{tokens_of}.{experts}.{layers}",
        {
            "rate": "{steps_a_second:.2f}", "ratio": "{ratio:.2f}", "low": "{interval[0]:.2f}",
            "high": "{interval[1]:.2f}", "of_peak": "{of_peak:.0%}", "peak": "{peak_gigabytes:.1f}",
            "recomputed": "{recomputed}", "limited_rate": "{limited_steps_a_second:.2f}",
            "limited_peak": "{limited_peak_gigabytes:.1f}",
        },
    ),
    "communication": Group(
        "benchmarks.moe_family communication",
        "{wraps}.{megabytes}",
        {"all_reduce": "{all_reduce_growth:.1f}", "all_to_all": "{all_to_all_growth:.1f}"},
    ),
    "layer": Group(
        "benchmarks.moe_family breakdown",
        "{dispatch}.{wraps}",
        {
            "growth": "{growth:.2f}", "all_to_all": "{all_to_all_growth:.2f}", "gate": "{growth_of[gate]:.1f}",
            "dispatch": "{growth_of[dispatch and combine]:.2f}",
        },
    ),
    "layer_parts": Group(
        "benchmarks.moe_family breakdown",
        "{dispatch}.{wraps}.{experts}",
        {
            "feed_forward": "{milliseconds_of[feed-forward]:.2f}", "attention": "{milliseconds_of[attention]:.2f}",
            "gate": "{milliseconds_of[gate]:.2f}", "dispatch": "{milliseconds_of[dispatch and combine]:.2f}",
            "rest": "{milliseconds_of[norms and residuals]:.2f}", "total": "{milliseconds:.2f}",
            "all_to_all": "{all_to_all_share:.0%}",
        },
    ),
    "ragged": Group(
        "benchmarks.ragged_exchange",
        "{router}.{capacity_factor}.{skew}",
        {"padded": "{padded:,}", "sent": "{ragged:,}"},
    ),
    "mesh_tensorflow": Group(
        "benchmarks.mesh_tensorflow", "{table}.{d_ff}.{d_head}", {"billions": "{billions:.2f}"}
    ),
    "dispatch": Group(
        "benchmarks.paper_tables", "{operator}", {"growth": "{time_growth:.1f}", "order": "{seconds_order:.2f}"}
    ),
    "index_tpu": Group(
        "benchmarks.dispatch --tpu --tokens 128 512 1024 --experts 8",
        "{tokens}.{experts}.{model}",
        {"mask": "{mask:,}", "index": "{index:,}", "einsum": "{einsum:,}", "ratio": "{ratio:.2f}"},
    ),  # with a Python that has the extra `aot`; then with --tokens 512 2048 --experts 16 --model 1024
    "index_cpu": Group(
        "benchmarks.dispatch --tokens 2048 --experts 64",
        "{tokens}.{experts}.{method}",
        {"temporary": "{temp_bytes:,}", "operations": "{flops:,.0f}"},
    ),  # then with --dropless --tokens 2048 --experts 8
    "decoding": Group(
        "benchmarks.decoding --length 32 128 --layers 2", "{length}.{search}", {"temporary": "{temp_bytes:,}"}
    ),
    "programs": Group(
        "benchmarks.language_model --rounds 0",
        "{model}.{candidate}",
        {
            "count": "{collectives[all_reduce]}", "sent": "{collective_bytes[all_reduce]:,}",
            "memory": "{memory_bytes:,}",
        },
    ),
    "compiled": Group(
        "benchmarks.moe_family parameters --compile",
        "{topology}",
        {
            "needed": "{reported_gigabytes:.2f}", "predicted": "{predicted_gigabytes:.2f}",
            "all_to_alls": "{collectives_in_text[all_to_all]}", "all_reduces": "{collectives_in_text[all_reduce]}",
        },
    ),  # with a Python that has the extra `aot`
    "reshards": Group("benchmarks.reshards", "{operation}", {"bytes": "{bytes:,}", "gspmd": "{gspmd_bytes:,}"}),
    "update_memory": Group(
        "benchmarks.update_memory",
        "{model}.{update}",
        {"stored": "{stored_mb:,.0f}", "ours": "{ours_mb:,.0f}", "theirs": "{theirs_mb:,.0f}"}
        | {"rest": "{rest_theirs_mb:,.0f}"},
    ),  # with a Python that has the extra `aot`
    "cores": Group("benchmarks.mesh_tensorflow", "section.{section}", {"share": "{peak_share:.0%}"}),
    "steps": Group(
        "benchmarks.steps",
        "{case}.{steps}",
        {"slow": "{slow_mb:,.1f}", "ms": "{ms:,.2f}", "seconds": "{seconds:.0f}", "message": "{message_kb:,.0f}"},
    ),
    "slices": Group(
        "benchmarks.steps --slices", "{slices}.{steps}", {"stated": "{stated_mb:.1f}", "dcn": "{dcn_mb:.1f}"}
    ),
    "plan_search": Group(
        "benchmarks.plan_search",
        "{case}",
        {
            "step": "{step_s:.4g}", "known": "{best_known_s:.4g}", "behind": "{behind:.1%}", "gap": "{gap:.0%}",
            "estimated": "{estimated:,}", "costed": "{costed}", "low": "{least_ratio:.2f}",
            "high": "{greatest_ratio:.2f}", "processor": "{processor_s:.0f}",
        },
    ),
    "pipeline_search": Group(
        "benchmarks.plan_search --pipelines",
        "{case}",
        {
            "stages": "{stages}", "step": "{step_s:.2f}", "without": "{without_s:.2f}", "ticks": "{ticks_s:.2f}",
            "list": "{list_s:.2f}",
        },
    ),
    "tick_windows": Group(
        "benchmarks.pipelines --ticks",
        "{overlap}",
        {
            "cycles": "{cycles:,}", "peak": "{peak_mb}", "collectives": "{collectives}",
            "asynchronous": "{asynchronous}", "predicted": "{predicted_ms:.1f}", "exposed": "{exposed_ms:.1f}",
        },
    ),  # with a Python that has the extra `aot`
    "pipelines": Group(
        "benchmarks.pipelines --chunks",
        "chunks.{chunks}",
        {"predicted": "{predicted_ms:.1f}", "cycles": "{cycles:,}", "peak": "{peak_bytes:,}"},
    ),  # the same
    "gpipe": Group(
        "benchmarks.pipelines --gpipe",
        "{attention}",
        {"cycles": "{cycles_ratio:.2f}", "peak": "{peak_ratio:.2f}"},
    ),  # the same
    "trips": Group(
        "benchmarks.pipelines 8 32",
        "{remat}.{microbatches}",
        {"ratio": "{ratio:.3f}", "predicted": "{predicted_ratio:.3f}"},
    ),  # the same, then with --remat none
    "tpu": Group(
        "benchmarks.tpu_cycles", "{workload}.{candidate}", {"cycles": "{cycles:,}", "peak": "{peak_mb:,.1f}"}
    ),  # with a Python that has the extra `aot`; then with --large
    "tpu_memory": Group(
        "benchmarks.tpu_memory",
        "{points}",
        {
            "count": "{count}", "median": "{median_error:.1%}", "worst": "{worst_error:.1%}",
            "above": "{above_5_percent}",
        },
    ),  # the same
    "ground": Group(
        "benchmarks.ground --data measurements.json",
        "{by}.{source}.{machine}",
        {
            "rows": "{rows}", "error": "{mean_error:.1%}", "bias": "{bias:+.1%}", "inside": "{in_interval:.0%}",
            "tau": "{tau:.2f}", "within": "{tau_within_choices:.2f}", "lost": "{lost_by_best:.1%}",
        },
    ),  # of a file of published runs
    "presets": Group(
        "benchmarks.presets",
        "{name}",
        {
            "parameters": "{parameters:,}", "published": "{published_billions:.2f}", "seconds": "{seconds:.2f}",
            "rate": "{rate:,.0f}", "public": "{public:,.0f}", "ratio": "{ratio:.2f}",
        },
    ),
    "published": Group(
        "benchmarks.published_pipelines gpt3 llama3 deepseek",
        "{case}.{machine}.{chunks}",
        {"step": "{step_s:.1f}", "mfu": "{mfu:.1%}", "exposed": "{exposed:.0%}", "peak": "{peak_gb:.1f}"},
    ),
    "ticks": Group(
        "benchmarks.published_pipelines gpt3 llama3 deepseek --overlap ticks",
        "{case}.{machine}.{chunks}",
        {
            "step": "{step_s:.1f}", "mfu": "{mfu:.1%}", "exposed": "{exposed:.0%}", "peak": "{peak_gb:.1f}",
        },
    ),
    "updates": Group(
        "models.sharded_update --json",
        "{setting}",
        {
            "replicated": "{replicated_ms:.2f}", "sharded": "{sharded_ms:.2f}", "auto": "{auto_ms:.2f}",
            "saved": "{saved:.0%}", "padding": "{padding_mb:.2f}", "whole": "{whole_axis_ms:.2f}",
            "whole_padding": "{whole_axis_padding_mb:.0f}",
            "peak_replicated": "{replicated_peak_mb:,}", "peak_sharded": "{sharded_peak_mb:,}",
        },
    ),
    "balance": Group("benchmarks.attention --rounds 0", "{devices}.{group}", {"ratio": "{ratio:.2f}"}),
    "imbalance": Group(
        "benchmarks.attention --rounds 0", "{devices}.{zigzag}", {"above": "{slowest_above_mean:.0%}"}
    ),
    "long_attention": Group(
        "benchmarks.attention --rounds 0", "{method}.{layout}", {"peak": "{peak_gb:.1f}", "seconds": "{seconds:.1f}"}
    ),
    "case_study": Group(
        "benchmarks.case_study --numbers",
        "{case}",
        {
            "faster": "{faster:.0%}", "recipe_gb": "{recipe_gb:.1f}", "found_gb": "{found_gb:.1f}",
            "recipe_exposed": "{recipe_exposed:.0%}", "found_exposed": "{found_exposed:.0%}",
            "recipe_exposed_s": "{recipe_exposed_s:.2f}", "found_exposed_s": "{found_exposed_s:.2f}",
            "published": "{published_s:.2f}", "above": "{above:.0%}",
        },
    ),
    "attention_tpu": Group(
        "benchmarks.attention_kernels",
        "{chip}.{length}.{case}",
        {
            "cycles": "{cycles:,}", "kernel": "{kernel_cycles:,}", "peak": "{peak_mb:,.0f}",
            "predicted": "{predicted_mb:,.0f}", "forward": "{bundles[attention_forward]:,}",
            "backward": "{bundles[attention_backward]:,}",
        },
    ),  # with a Python that has the extra `aot`
    "windows": Group(
        "benchmarks.tpu_windows",
        "{chip}.{case}.{layers}.{overlap}",
        {
            "inside": "{inside}", "planned": "{planned}", "synchronous": "{synchronous}", "windows": "{windows}",
            "cycles": "{cycles:,}",
        },
    ),  # the same; then with other layers and chips
    "splash": Group(
        "benchmarks.attention_kernels --shipped",
        "{chip}.{length}",
        {"forward": "{bundles[splash_mha_fwd_residuals]:,}", "backward": "{bundles[splash_mha_dkv]:,}"},
    ),  # the same
    "cpu": Group(
        "benchmarks.moe_layer", "{model}.{layout}.{candidate}", {"ratio": "{cpu_ratio:.2f}"}
    ),  # then of `halo`
    "ranges": Group("tests.overlap.range_lengths", "{case}.{range_ms}", {"forward": "{forward_ms:.1f}"}),
}  # fmt: skip


def numbers(name: str, lines: list[str]) -> dict[str, str]:
    """The numbers of a group by key, from the lines that its benchmark printed."""
    group, found = GROUPS[name], {}
    for row in (json.loads(line) for line in lines if line.startswith("{")):
        for number, text in group.numbers.items():
            try:
                key, value = group.key.format_map(row), text.format_map(row)
            except KeyError:
                continue  # a row of another table of the same benchmark
            found[re.sub(r"[^\w.]+", "_", f"{name}.{key}.{number}").lower()] = value
    return found


def fill(page: str, known: dict[str, str]) -> str:
    """The page with the numbers that it names."""
    return MARK.sub(lambda mark: f"<!--{mark[1]}-->{known[mark[1]]}<!--/-->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--lines", type=Path)
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    for name in options.groups:
        command = [sys.executable, "-m", *GROUPS[name].command.split()]
        run = None if options.lines else subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        known |= numbers(name, (run.stdout if run else options.lines.read_text()).splitlines())
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
    for path in DOCS.rglob("*.md"):
        page = path.read_text(encoding="utf-8")
        if MARK.search(page):
            path.write_text(fill(page, known), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
