"""The options of `meshdsl train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import count, cpu_devices, factor, integer, positive, share, workload_options
from .plans import knob_options


def train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run: its settings, checkpoints, output and processes."""
    workload_options(
        parser,
        extra=", or a setting of the run, such as train.max_skips=3",
        of_mesh="; 'rows:*;cols:4' has as many rows as there are devices for",
    )
    option = parser.add_argument
    option("--config", type=Path, metavar="FILE", help="TOML file with settings; command-line options override it")
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument("--print-config", action="store_true", help="print the merged settings as TOML and exit")
    exclusive.add_argument(
        "--dry-run", action="store_true", help="check the options and print the cost of the step, without running it"
    )
    option(
        "--machine",
        metavar="NAME",
        help="machine for --dry-run, --weight-update auto, --overlap and --collective-steps (default tpu-v5e)",
    )
    option(
        "--devices",
        type=cpu_devices,
        metavar="N",
        help="run on N CPU devices, in total over all processes (default: accelerators if there are any, otherwise one "
        "CPU device per mesh position)",
    )
    option(
        "--data",
        metavar="SOURCE",
        help="documents: FILE.jsonl (rows of text, of prompt and completion, or of messages), FILE.txt, hf:NAME of a "
        "data set; FILE.bin of token ids; or module:function (default: the workload's, else bytes of Python's sources)",
    )
    option(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer of --data, or a directory with tokenizer.json (default: that of an imported run, else bytes)",
    )
    option("--held-out", type=share, metavar="SHARE", help="share of the documents for evaluation (default 0.05)")
    option("--steps", type=count, metavar="N", help="total number of steps (default 100)")
    option("--seed", type=integer, metavar="N", help="seed of parameters and batches (default 0)")
    option(
        "--eval-every",
        type=count,
        metavar="N",
        help="evaluate on held-out data every N steps and after the last step (default: only after the last)",
    )
    option("--eval-batches", type=count, metavar="N", help="batches per evaluation; 0 for no evaluation (default 8)")
    knob_options(parser)
    option(
        "--non-finite",
        choices=["stop", "skip"],
        help="for a loss or gradient that is not finite: stop with exit code 5 (default), or skip the step; "
        "train.max_skips skipped steps in a row (default 10) also stop the run",
    )
    option(
        "--step-timeout",
        type=factor,
        metavar="TIMES",
        help="end with exit code 69 if a step takes so many times the median step, and name the process that is late, "
        "what it does and the collective in which others wait for it (default: no limit)",
    )
    saving = parser.add_argument_group("checkpoints")
    option = saving.add_argument
    option("--checkpoints", metavar="DIR", help="save the run in this directory, and resume from it")
    option("--save-every", type=positive, metavar="N", help="save every N steps and after the last step (default 100)")
    option("--keep", type=positive, metavar="N", help="number of newest checkpoints to keep (default 3)")
    option(
        "--resume",
        metavar="auto|never|PATH",
        help="auto: resume from the newest valid checkpoint, if any (default); never: start a new run; PATH: resume "
        "from this step or checkpoint directory",
    )
    option(
        "--optimizer-changed",
        action="store_true",
        help="resume although optimizer state is dropped, or made anew, because the optimizer is another one",
    )
    option(
        "--take-over",
        action="store_true",
        default=None,
        help="replace the lock of a writer on another machine once its heartbeat has stopped, for a run that is "
        "rescheduled to another machine; a writer that lives is never replaced",
    )
    output = parser.add_argument_group("output")
    option = output.add_argument
    option(
        "--log-every",
        type=positive,
        metavar="N",
        help="print every Nth step (default: 20 lines in total; every step with --json)",
    )
    option("--metrics", type=Path, metavar="FILE", help="append every record to this file as JSON lines")
    option("--tensorboard", type=Path, metavar="DIR", help="write event files (needs the extra `tensorboard`)")
    option("--wandb", type=Path, metavar="DIR", help="write an offline run of W&B (needs the extra `wandb`)")
    option("--profile", type=Path, metavar="DIR", help="trace steps 3 to 7 of this run with JAX's profiler")
    several = parser.add_argument_group("several processes")
    option = several.add_argument
    option("--coordinator", metavar="HOST:PORT", help="address of process 0; the same for all processes")
    option("--processes", type=positive, metavar="N", help="number of processes")
    option("--process", type=count, metavar="I", help="this process's index, from 0")
    option(
        "--cluster",
        choices=["auto", "none"],
        default="auto",
        help="auto: under SLURM, Open MPI, Kubernetes and on TPU pods, find the other processes by the environment "
        "(default); none: run as a single process",
    )
