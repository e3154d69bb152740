"""Peak memory with replicated and sharded weight updates: predicted, and from the TPU compiler.

    python -m benchmarks.update_memory [--topology tpu:v5e:2x4] [--full] [MODEL ...]

Compares W + V + P with W + V/N + P for the three models of `models.sharded_update` on eight devices, where W is the
weights, V the optimizer state and P the rest of the peak. Needs the extra `aot`, but no TPU. Prints a JSON
line for each model and mode, with bytes per device. `--full` runs the compiler with full effort, which takes several
times as long.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import meshdsl as md
from meshdsl.models.sharded_update import LARGE, MODES, Setting, step


def measure(setting: Setting, mode: str, topology: str, effort: str) -> dict[str, Any]:
    """The predicted and the compiler's memory of one train step, with the parts for weights and state."""
    compiled, types = step(setting, mode)
    program = compiled.program(*types)
    inputs = {part: [v for v in program.ins if v.name.partition("/")[0] == part] for part in ("params", "state")}
    donated = [v for vs in inputs.values() for v in vs]
    ours = md.memory(program, donated=donated)
    result = md.compile_for(topology, program, donated=donated, effort=effort)
    assert result.memory is not None, str(result)
    input_bytes = {part: sum(map(program.local_bytes, vs)) for part, vs in inputs.items()}
    return {
        "figure": "update_memory",
        "model": setting.label,
        "update": mode,
        "topology": topology,
        **input_bytes,
        "stored_mb": sum(input_bytes.values()) / 1e6,
        "ours_mb": ours.peak / 1e6,
        "theirs_mb": result.memory.peak / 1e6,
        "rest_ours_mb": (ours.peak - sum(input_bytes.values())) / 1e6,
        "rest_theirs_mb": (result.memory.peak - sum(input_bytes.values())) / 1e6,
        "error": round(ours.peak / result.memory.peak - 1, 4),
        "their_seconds": round(result.seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="start of a model's label; default: all three")
    parser.add_argument("--topology", default="tpu:v5e:2x4")
    parser.add_argument("--full", action="store_true", help="run the compiler with full effort")
    options = parser.parse_args()
    chosen = [s for s in LARGE if not options.models or s.label.startswith(tuple(options.models))]
    if not chosen:
        parser.error(f"unknown model; known: {', '.join(s.label for s in LARGE)}")
    for setting in chosen:
        for mode in MODES:
            print(json.dumps(measure(setting, mode, options.topology, "" if options.full else "O1")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
