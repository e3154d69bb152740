"""The long forms of the laws: `python -m tests.laws [LAW ...] [--cases N]`, or `make laws LAW=steps CASES=2000`.

Each law draws many more cases than its test. It prints a line of JSON at its end, or one for each part, and the cases
that fail with the arguments that reproduce them; this command then ends with 1. Without LAW, all of them run, which
takes hours.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

# name: (module, its option for the number of cases, what it checks)
LAWS = {
    "fuzz": ("tests.lowering.fuzz", "--cases", "every operation with its gradient, and programs, under random layouts"),
    "bounds": ("tests.search.bounds_law", "--programs", "bounds of a search are at most the cost of every plan"),
    "ledger": ("tests.lowering.ledger_law", "--programs", "collectives that a program states are in its StableHLO"),
    "gspmd": ("tests.lowering.gspmd_law", "--programs", "bytes sent are at most those of GSPMD"),
    "padding": ("tests.lowering.padding_law", "--limit", "FLOP of bundled layouts on 8 to 256 devices"),
    "run": ("tests.lowering.run_law", "--layouts", "simulator and devices, every operation of every dtype"),
    "constants": ("tests.lowering.constant_law", "", "constants that differ in bits only"),
    "phases": ("tests.lowering.phases_law", "--cases", "collectives in steps, beside the flat program"),
    "steps": ("tests.compile.steps_law", "--steps", "training steps of random models under random plans"),
    "widths": ("tests.compile.widths_law", "--steps", "dtypes of sums under random plans"),
    "readers": (
        "tests.compile.readers_law",
        "--cases",
        "cost, memory, pictures and overlap plans of programs that run",
    ),
    "aliases": ("tests.compile.aliases", "--cases", "one tensor in several places of a call"),
    "updates": ("tests.updates.law", "--layouts", "sharded and replicated updates"),
    "branches": ("tests.updates.random_steps", "--cases", "steps with branches beside the update"),
    "pipelines": ("tests.pipelines.law", "--cases", "random models in pipeline stages"),
    "models": ("tests.models.layout_law", "", "three models under many layouts"),
    "local": ("tests.jax_functions.local_law", "--cases", "functions of md.local"),
    "sharded": ("tests.foreign.law", "--cases", "faults in sharded JAX programs, found by md.verify_jax"),
    "wrappers": ("tests.control.wrappers", "", "control functions inside transformations of JAX"),
    "on_device": ("tests.ops.on_device", "", "every operation on an accelerator, beside NumPy"),
    "routers": ("tests.nn.moe_reference", "--cases", "routers of a mixture of experts"),
    "misuse": ("tests.misuse", "--calls", "random wrong calls"),
    "checkpoints": ("tests.checkpoint.fuzz", "--scale", "damaged checkpoints, full disks, kills; CASES is a factor"),
    "flips": ("tests.checkpoint.flips", "--cases", "flipped bits in each file of a step at a URL"),
    "kills": ("tests.train.kills", "--cases", "training killed while it saves at a URL"),
    "faults": ("tests.train.faults", "", "training killed or stopped at any moment"),
    "endings": ("tests.train.endings", "", "how the processes of a run end when one of them does"),
    "elastic": ("tests.train.elastic", "", "a run that goes on with fewer processes"),
    "digests": ("tests.train.digest_cost", "", "seconds of the sums of bits, beside those of a step"),
    "long": ("tests.train.long", "--steps", "two processes with kills and changes of layout"),
    "commands": ("tests.cli.fuzz", "--cases", "random command lines and model files"),
    "signals": ("tests.cli.signals", "", "signals while a run starts, and readers that are gone"),
}


def main() -> int:
    rows = [f"  {name:<12} {what}" for name, (_, _, what) in LAWS.items()]
    parser = argparse.ArgumentParser(
        description="the long forms of the laws:\n\n" + "\n".join(rows),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("laws", nargs="*", metavar="LAW")
    parser.add_argument("--cases", metavar="N", help="how many, in the law's own unit (default: the law's)")
    options, more = parser.parse_known_args()
    failed = []
    for law in options.laws or LAWS:
        if law not in LAWS:
            parser.error(f"no law {law!r}; there are: {', '.join(LAWS)}")
        module, option, what = LAWS[law]
        cases = [option, options.cases] if option and options.cases else []
        print(f"{law}: {what}", file=sys.stderr)
        if subprocess.run([sys.executable, "-m", module, *cases, *more], check=False).returncode:
            failed.append(law)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
