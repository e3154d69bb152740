"""The options of `meshdsl train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import count, cpu_devices, factor, integer, options_of, positive, share, workload_options
from .plans import knob_options


def train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run: its settings, checkpoints, output and processes."""
    workload_options(
        parser,
        extra=", or a setting of the run, such as train.max_skips=3",
        of_mesh="; 'rows:*;cols:4' has as many rows as there are devices for",
    )
    option = options_of(parser)
    option("--config FILE", "TOML file with settings; command-line options override it", Path)
    exclusive = parser.add_mutually_exclusive_group()
    option = options_of(exclusive)
    option("--print-config", "print the merged settings as TOML and exit")
    option("--dry-run", "check the options and print the cost of the step, without running it")
    option = options_of(parser)
    option(
        "--machine NAME",
        "machine for --dry-run, --weight-update auto, --overlap and --collective-steps (default tpu-v5e)",
    )
    option(
        "--devices N",
        "run on N CPU devices, in total over all processes (default: accelerators if there are any, otherwise one "
        "CPU device per mesh position)",
        cpu_devices,
    )
    option(
        "--data SOURCE",
        "documents: FILE.jsonl (rows of text, of prompt and completion, or of messages), FILE.txt, hf:NAME of a "
        "data set; FILE.bin of token ids; or module:function (default: the workload's, else bytes of Python's sources)",
    )
    option(
        "--tokenizer FILE",
        "tokenizer of --data, or a directory with tokenizer.json (default: that of an imported run, else bytes)",
    )
    option("--held-out SHARE", "share of the documents for evaluation (default 0.05)", share)
    option("--steps N", "total number of steps (default 100)", count)
    option("--seed N", "seed of parameters and batches (default 0)", integer)
    option(
        "--eval-every N",
        "evaluate on held-out data every N steps and after the last step (default: only after the last)",
        count,
    )
    option("--eval-batches N", "batches per evaluation; 0 for no evaluation (default 8)", count)
    knob_options(parser)
    option(
        "--non-finite",
        "for a loss or gradient that is not finite: stop with exit code 5 (default), or skip the step; "
        "train.max_skips skipped steps in a row (default 10) also stop the run",
        ["stop", "skip"],
    )
    option(
        "--step-timeout TIMES",
        "end with exit code 69 if a step takes so many times the median step, and name the process that is late, "
        "what it does and the collective in which others wait for it (default: no limit)",
        factor,
    )
    saving = parser.add_argument_group("checkpoints")
    option = options_of(saving)
    option("--checkpoints DIR", "save the run in this directory, and resume from it")
    option("--save-every N", "save every N steps and after the last step (default 100)", positive)
    option("--keep N", "number of newest checkpoints to keep (default 3)", positive)
    option(
        "--resume auto|never|PATH",
        "auto: resume from the newest valid checkpoint, if any (default); never: start a new run; PATH: resume "
        "from this step or checkpoint directory",
    )
    option(
        "--optimizer-changed",
        "resume although optimizer state is dropped, or made anew, because the optimizer is another one",
    )
    option(
        "--take-over",
        "replace the lock of a writer on another machine once its heartbeat has stopped, for a run that is "
        "rescheduled to another machine; a writer that lives is never replaced",
        default=None,
    )
    output = parser.add_argument_group("output")
    option = options_of(output)
    option("--log-every N", "print every Nth step (default: 20 lines in total; every step with --json)", positive)
    option("--metrics FILE", "append every record to this file as JSON lines", Path)
    option("--tensorboard DIR", "write event files (needs the extra `tensorboard`)", Path)
    option("--wandb DIR", "write an offline run of W&B (needs the extra `wandb`)", Path)
    option("--profile DIR", "trace steps 3 to 7 of this run with JAX's profiler", Path)
    several = parser.add_argument_group("several processes")
    option = options_of(several)
    option("--coordinator HOST:PORT", "address of process 0; the same for all processes")
    option("--processes N", "number of processes", positive)
    option("--process I", "this process's index, from 0", count)
    option(
        "--cluster",
        "auto: under SLURM, Open MPI, Kubernetes and on TPU pods, find the other processes by the environment "
        "(default); none: run as a single process",
        ["auto", "none"],
        default="auto",
    )
