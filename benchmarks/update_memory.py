"""Peak memory with the weight update replicated and sharded, ours and the TPU compiler's.

    python -m benchmarks.update_memory [--topology tpu:v5e:2x4] [--full] [MODEL ...]

The three models of `models.sharded_update` on eight devices: W + V + P against W + V/N + P, W being the weights, V the
optimizer's state and P everything else at the peak. Needs no TPU, but `pip install "meshdsl[aot]"`. One JSON line for
each model and mode, bytes of one device. `--full` gives the compiler its full effort, several times the time.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import meshdsl as md
from models.sharded_update import LARGE, MODES, Setting, step


def measure(setting: Setting, mode: str, topology: str, effort: str) -> dict[str, Any]:
    """Both memories of one train step, and what of them are weights and state."""
    compiled, types = step(setting, mode)
    program = compiled.program(*types)
    kept = {part: [v for v in program.ins if v.name.partition("/")[0] == part] for part in ("params", "state")}
    donated = [v for vs in kept.values() for v in vs]
    ours = md.memory(program, donated=donated)
    found = md.compile_for(topology, program, donated=donated, effort=effort)
    assert found.memory is not None, str(found)
    held = {part: sum(map(program.local_bytes, vs)) for part, vs in kept.items()}
    return {
        "figure": "update_memory",
        "model": setting.label,
        "update": mode,
        "topology": topology,
        **held,
        "ours": ours.peak,
        "theirs": found.memory.peak,
        "rest_ours": ours.peak - sum(held.values()),
        "rest_theirs": found.memory.peak - sum(held.values()),
        "error": round(ours.peak / found.memory.peak - 1, 4),
        "their_seconds": round(found.seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="the start of its label; default: all three")
    parser.add_argument("--topology", default="tpu:v5e:2x4")
    parser.add_argument("--full", action="store_true", help="the compiler's full effort")
    options = parser.parse_args()
    chosen = [s for s in LARGE if not options.models or s.label.startswith(tuple(options.models))]
    if not chosen:
        parser.error(f"no such model; there are: {', '.join(s.label for s in LARGE)}")
    for setting in chosen:
        for mode in MODES:
            print(json.dumps(measure(setting, mode, options.topology, "" if options.full else "O1")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
